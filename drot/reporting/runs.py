"""What a report reads of a checkpoint: manifest, maps of importance, and what evaluations measured."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drot.checkpoint.importance import load_importance_maps
from drot.checkpoint.manifest import Manifest, read_manifest
from drot.checkpoint.records import (
    AgreementRecord,
    Baselines,
    EvaluationRecord,
    LinearRecord,
    RotationRecord,
    TrainingRecord,
)
from drot.checkpoint.tables import gap_closed, short, short_task
from drot.config import Recipe

#: before and after the rotation
BASES = ("before", "after")
#: what stands for a mean that fp16 cannot hold
LARGEST = float(np.finfo(np.float16).max)
#: a figure of a linear; None if the run has none
LinearFigure = Callable[[LinearRecord], float | None]
#: the share of the importance that one-shot pruning removes, before and after the rotation
REMOVED_IMPORTANCE: tuple[LinearFigure, LinearFigure] = (
    lambda linear: linear.one_shot.before.removed_importance,
    lambda linear: linear.one_shot.after.removed_importance,
)
#: the output error of one-shot pruning, before and after the rotation
ONE_SHOT_ERROR: tuple[LinearFigure, LinearFigure] = (
    lambda linear: linear.one_shot.before.output_error,
    lambda linear: linear.one_shot.after.output_error,
)


def final_error(linear: LinearRecord) -> float | None:
    """The output error of a linear as it was pruned, before any training of all layers."""
    return linear.output_error


@dataclass(frozen=True)
class Importance:
    """The importance of a linear's weights in one basis.

    basis: `before` or `after` the rotation.
    means: fp32 [rows, columns], the means over blocks of the weight; 1 is the mean before the rotation.
    counts: int64 [2, HISTOGRAM_BINS], the numbers of kept and of removed weights by importance.
    removed: the share of the importance that the removed weights hold; None if it was not recorded.
    """

    basis: str
    means: np.ndarray
    counts: np.ndarray
    removed: float | None


@dataclass(frozen=True)
class Run:
    """One run that `drot prune` has written.

    name: the name of its folder.
    maps: the arrays of `load_importance_maps`.
    """

    name: str
    manifest: Manifest
    maps: dict[str, np.ndarray]

    @property
    def recipe(self) -> Recipe:
        return self.manifest.recipe

    @property
    def roles(self) -> list[str]:
        """The linears of a layer, in the order of the forward pass."""
        return list(dict.fromkeys(role for layer in self.manifest.layers for role in layer.linears))

    @property
    def linears(self) -> list[str]:
        """The linears with maps, such as `layers.0.self_attn.q_proj`."""
        names = [name.removesuffix(".map_before") for name in self.maps if name.endswith(".map_before")]
        return [name for name in names if self.importance(name)]

    def importance(self, linear: str) -> list[Importance]:
        """The importance of the weights of the linear, such as `layers.0.self_attn.q_proj`, in each basis."""
        _, layer, *_ = linear.split(".")
        linears = next((each.linears for each in self.manifest.layers if each.layer == int(layer)), {})
        # of an expert the role is as long as `experts.0.gate_proj`
        record = next((found for role, found in linears.items() if linear.endswith(f".{role}")), None)
        found = []
        for basis, share in zip(BASES, REMOVED_IMPORTANCE, strict=True):
            means = self.maps.get(f"{linear}.map_{basis}")
            counts = self.maps.get(f"{linear}.histogram_{basis}")
            if record is not None and means is not None and counts is not None:
                means = np.nan_to_num(means.astype(np.float32), posinf=LARGEST)
                found.append(Importance(basis, means, counts, share(record)))
        return found

    @property
    def rotations(self) -> dict[int, RotationRecord]:
        """Layer → the training of its rotation; layers that are kept whole have none."""
        trained = {layer.layer: layer.rotation for layer in self.manifest.layers if layer.rotation}
        return {layer: record for layer, record in trained.items() if record.entropy_before > 0}

    @property
    def trainings(self) -> dict[str, TrainingRecord]:
        """`layer <i>`, or `all layers` for a shared rotation → the training."""
        if self.manifest.shared_rotation is not None:
            return {"all layers": self.manifest.shared_rotation}
        return {f"layer {layer}": record for layer, record in self.rotations.items()}

    def pruned(self) -> Iterator[tuple[int, str, LinearRecord]]:
        """Layer, role and record of each linear that was pruned."""
        for layer in self.manifest.layers:
            for role, linear in layer.linears.items():
                if linear.sparsity > 0:
                    yield layer.layer, role, linear

    def layer_means(self, figure: LinearFigure) -> dict[int, float]:
        """Layer → mean of a figure over its pruned linears; layers without the figure are left out."""
        found: dict[int, list[float]] = {}
        for layer, _, linear in self.pruned():
            if (value := figure(linear)) is not None:
                found.setdefault(layer, []).append(value)
        return {layer: statistics.fmean(values) for layer, values in found.items()}

    def mean(self, figure: LinearFigure) -> float | None:
        """The mean of a figure over all pruned linears; None without a figure."""
        values = [value for *_, linear in self.pruned() if (value := figure(linear)) is not None]
        return statistics.fmean(values) if values else None

    def ratios(self, below: LinearFigure, above: LinearFigure) -> dict[tuple[int, str], float]:
        """(layer, role) → above / below of a linear, where both are there."""
        found = {}
        for layer, role, linear in self.pruned():
            first, second = below(linear), above(linear)
            if first and second is not None:
                found[layer, role] = second / first
        return found


def read_run(folder: str | Path) -> Run:
    """The run in `folder`. Raises UserError for a folder that is no checkpoint of drot."""
    manifest = read_manifest(folder)
    folder = Path(folder)
    return Run(folder.resolve().name, manifest, load_importance_maps(folder))


# ---- what the pruning cost, by the evaluations --------------------------------------------------------


@dataclass(frozen=True)
class TextEvaluation:
    """The evaluation of one run on one text.

    text: name of the text. seqlen: tokens in a window.
    perplexity: of the run; None if it is not finite.
    dense: perplexity of the dense original; None if it was not measured.
    unrotated: perplexity of the same model pruned without a rotation; None if it was not measured.
    solver: perplexity with the solver and without a rotation; None if it was not measured.
    agreement: with the dense original; None if it was not measured.
    """

    text: str
    seqlen: int
    perplexity: float | None
    dense: float | None
    unrotated: float | None
    solver: float | None
    agreement: AgreementRecord | None

    @property
    def rise(self) -> float | None:
        """The rise of the perplexity as a share of the dense model's; None if one is not known."""
        return self.perplexity / self.dense - 1 if self.perplexity and self.dense else None

    @property
    def share(self) -> float | None:
        """The share of the gap between not rotated and dense that the run closes; None if not known."""
        return gap_closed(self.dense, self.unrotated, self.perplexity)


#: the text, its tokens and the windows of a measurement
_Key = tuple[str, str, int]


def measurements(run: Run) -> list[TextEvaluation]:
    """The evaluations of `run`, the latest of each text and window length."""
    found = []
    for (text, _, seqlen), entry in _latest(run).items():
        baselines = _baselines(run, entry, text)
        agreement = entry.agreement.get(text)
        found.append(
            TextEvaluation(
                text=short(text),
                seqlen=seqlen,
                perplexity=entry.perplexity.get(text),
                dense=agreement.dense_perplexity if agreement else baselines.dense.get(text),
                unrotated=baselines.not_rotated.get(text),
                solver=baselines.solver.get(text),
                agreement=agreement,
            )
        )
    return found


def _baselines(run: Run, entry: EvaluationRecord, text: str) -> Baselines:
    """The baselines of the last evaluation that measured `text` as `entry` did and has baselines."""
    for other in (entry, *reversed(run.manifest.evaluations)):
        alike = text in other.texts and other.texts[text].sha256 == entry.texts[text].sha256
        if other.baselines and alike and (other.seqlen, other.dtype) == (entry.seqlen, entry.dtype):
            return other.baselines
    return Baselines(dense={}, not_rotated={})


def tasks(run: Run) -> dict[str, float]:
    """Task → the latest accuracy of the run."""
    entries = run.manifest.evaluations
    found = (each for entry in entries for each in entry.tasks.items())
    latest = {task: value for task, value in found if value is not None}
    names = [short_task(task) for task in latest]
    return {
        name if names.count(name) == 1 else task: value
        for name, (task, value) in zip(names, latest.items(), strict=True)
    }


def _latest(run: Run) -> dict[_Key, EvaluationRecord]:
    """The latest evaluation of each kind; an evaluation with agreement goes before later ones without."""
    found: dict[_Key, EvaluationRecord] = {}
    for entry in run.manifest.evaluations:
        for text in filter(entry.texts.__contains__, entry.perplexity):
            key = text, entry.texts[text].sha256, entry.seqlen
            if text in entry.agreement or key not in found or text not in found[key].agreement:
                found[key] = entry
    return found
