"""What the pruning cost: perplexities and agreement from the manifests' evaluations."""

from dataclasses import dataclass

from drot.manifest.records import AgreementRecord, EvaluationRecord
from drot.manifest.tables import gap_closed, short
from drot.reporting.reading import Run


@dataclass(frozen=True)
class Measured:
    """The evaluation of one run on one text.

    text: name of the text. seqlen: tokens in a window.
    perplexity: of the run; None if it is not finite.
    dense: perplexity of the dense original; None if it was not measured.
    unrotated: perplexity of the same model pruned without a rotation; None if it was not measured.
    solver: perplexity with the solver and without a rotation; None if it was not measured.
    unrotated_name: where `unrotated` comes from.
    agreement: with the dense original; None if it was not measured.
    """

    text: str
    seqlen: int
    perplexity: float | None
    dense: float | None
    unrotated: float | None
    solver: float | None
    unrotated_name: str
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


def measurements(run: Run, others: list[Run]) -> list[Measured]:
    """The evaluations of `run`, the latest of each text and window length.

    A perplexity of the dense original or without rotation may come from another run on the same model.
    """
    model = run.manifest.base_model
    same_model = [o for o in others if o is not run and o.manifest.base_model == model]
    found = []
    for key, entry in _latest(run).items():
        text, _, seqlen = key
        dense, name = _dense(entry, text), "measured with the run"
        unrotated = entry.baselines.not_rotated.get(text) if entry.baselines else None
        for other in same_model:
            theirs = _latest(other).get(key)
            if theirs is not None and dense is None:
                dense = _dense(theirs, text)
            if theirs is not None and unrotated is None and run.rotated and not other.rotated:
                unrotated, name = theirs.perplexity.get(text), other.name
        solver = entry.baselines.solver.get(text) if entry.baselines else None
        own, agreement = entry.perplexity.get(text), entry.agreement.get(text)
        found.append(Measured(short(text), seqlen, own, dense, unrotated, solver, name, agreement))
    return found


def tasks(run: Run) -> dict[str, float]:
    """Task → the latest accuracy of the run."""
    entries = run.manifest.evaluations
    return {task: value for entry in entries for task, value in entry.tasks.items() if value is not None}


def _latest(run: Run) -> dict[_Key, EvaluationRecord]:
    """The latest evaluation of each kind; an evaluation with agreement goes before later ones without."""
    found: dict[_Key, EvaluationRecord] = {}
    for entry in run.manifest.evaluations:
        for text in filter(entry.texts.__contains__, entry.perplexity):
            key = text, entry.texts[text].sha256, entry.seqlen
            if text in entry.agreement or key not in found or text not in found[key].agreement:
                found[key] = entry
    return found


def _dense(entry: EvaluationRecord, text: str) -> float | None:
    """The perplexity of the dense model, which an evaluation against it records, or the demo."""
    if text in entry.agreement:
        return entry.agreement[text].dense_perplexity
    return entry.baselines.dense.get(text) if entry.baselines else None
