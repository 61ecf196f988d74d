"""The demo: the embedded model, pruned to 2:4 by SparseGPT alone, with a solver, and with the rotation."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.dtypes import cast_weights
from drot.checkpoint.load import load, load_tokenizer
from drot.checkpoint.resume import partial_folder
from drot.checkpoint.save import check_output
from drot.config import CalibrationConfig, Recipe, RotationConfig, default_seqlen, resolve
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.evaluation.record import record, text_record
from drot.machine.environment import machine_name
from drot.manifest.tables import gap_closed
from drot.pipeline.prune import prune
from drot.reporting.drawing import installed
from drot.reporting.write import report
from drot.text.source import load_calibration

ASSETS = Path(__file__).parent / "assets"
MODEL = ASSETS / "tiny-llama"
HELD_OUT = ASSETS / "python-heldout.txt"
CALIBRATION = CalibrationConfig(source=str(ASSETS / "python-calibration.txt"), nsamples=64, seqlen=512)


@dataclass(frozen=True)
class DemoFiles:
    """What comes with drot: a small LLaMA, text to calibrate it, and text that it was not trained on."""

    model: Path
    calibration: Path
    held_out: Path


DEMO = DemoFiles(MODEL, Path(CALIBRATION.source), HELD_OUT)
"""The files of the demo, for examples that need no network."""


@dataclass(frozen=True, kw_only=True)
class DemoRow:
    """The figures of one model.

    gap_closed: the share of SparseGPT's damage that is undone (`gap_closed`). None for the dense model
        and for SparseGPT alone, and if SparseGPT does no damage.
    sparsity: the share of zeros in the linears of the decoder layers.
    seconds: the time of the pruning; None for the dense model.
    """

    name: str
    perplexity: float
    gap_closed: float | None = None
    sparsity: float = 0.0
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The figures of the demo.

    rows: the dense model, pruned by SparseGPT, with the solver as well, and with the rotation as well.
    sentence: what the figures mean.
    rotation_helped: whether the rotated model has the smallest perplexity of the pruned models.
    report: the page of the run; None if matplotlib, which draws it, is not installed.
    """

    rows: list[DemoRow]
    sentence: str
    rotation_helped: bool
    report: Path | None = None


def run_demo(
    out: Path,
    *,
    steps: int | None = None,
    calibration: CalibrationConfig = CALIBRATION,
    windows: int | None = None,
    progress: Progress = silent,
) -> DemoResult:
    """Measures the perplexity of the four models on held-out text, and saves the rotated model to `out`.

    The perplexities are recorded in its manifest, and a report is written into its folder. All computation is
    in float32 on the CPU, so that the figures are the same on every machine.

    Args:
        out: folder for the rotated and pruned model; new or empty.
        steps: training steps of the rotation; None for the default.
        calibration: the calibration text.
        windows: number of windows of the held-out text; None for all.
        progress: receives the events of the pruning runs and of the evaluations.
    """
    check_output(out)
    if (partial := partial_folder(out)).exists():
        raise UserError(f"{partial} was left by an interrupted demo: remove it or name another `out`")
    tokenizer = load_tokenizer(MODEL)
    seqlen = calibration.seqlen or default_seqlen(None)
    tokens = load_calibration(replace(calibration, seqlen=seqlen), tokenizer, progress)
    held_out = load_eval_tokens(str(HELD_OUT), tokenizer, progress=progress)
    held_out = held_out[: None if windows is None else windows * seqlen]

    def measure(model: PreTrainedModel) -> float:
        return perplexity(model, held_out, seqlen=seqlen, progress=progress)

    def pruned(name: str, recipe: Recipe, to: Path | None = None) -> DemoRow:
        started = time.perf_counter()
        recipe = replace(recipe, calibration=calibration)
        result = prune(
            MODEL, recipe, out=to, tokenizer=tokenizer, calibration=tokens, device="cpu", dtype="float32",
            progress=progress,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        cast_weights(result.model, torch.float32)  # it has the dtype of the checkpoint
        value, sparsity = measure(result.model), result.manifest.sparsity
        return DemoRow(name=name, perplexity=value, sparsity=sparsity, seconds=seconds)

    dense = DemoRow(name="dense", perplexity=measure(load(MODEL, device="cpu", dtype="float32")))
    not_rotated = Recipe(rotation=RotationConfig(mode="none"))
    plain = pruned("SparseGPT 2:4", not_rotated.with_quality("fast"))
    solved = pruned("+ solver of the kept weights", replace(not_rotated, pruning=resolve(Recipe()).pruning))
    rotated = pruned("+ rotation: drot", Recipe(rotation=RotationConfig(steps=steps)), out)
    shares = [gap_closed(dense.perplexity, plain.perplexity, row.perplexity) for row in (solved, rotated)]
    _record(out, held_out, seqlen, (dense, plain, solved), rotated)
    return DemoResult(
        rows=[
            dense,
            plain,
            *(replace(row, gap_closed=share) for row, share in zip((solved, rotated), shares)),
        ],
        sentence=_sentence(*shares),
        rotation_helped=rotated.perplexity < min(plain.perplexity, solved.perplexity),
        report=report([out], progress=progress).page if installed() else None,
    )


def _record(out: Path, tokens: Tensor, seqlen: int, baselines: tuple[DemoRow, ...], rotated: DemoRow) -> None:
    """Adds the perplexities on the held-out text `tokens` [n] to the evaluations in the manifest."""
    text = HELD_OUT.name
    names = ("dense", "not_rotated", "solver")
    figures = {
        "seqlen": seqlen,
        "dtype": "float32",
        "machine": machine_name(torch.device("cpu")),
        "streamed": False,
        "texts": {text: text_record(text, tokens, seqlen)},
        "perplexity": {text: rotated.perplexity},
        "baselines": {name: {text: row.perplexity} for name, row in zip(names, baselines, strict=True)},
        "against": None,
        "agreement": {},
        "tasks": {},
        "task_details": {},
        "averages": {},
    }
    record(str(out), figures)


def _sentence(solver: float | None, whole: float | None) -> str:
    """What the table says.

    solver, whole: the shares of SparseGPT's damage that the solver and that solver and rotation undo.
    """
    if solver is None or whole is None or whole <= max(solver, 0.0):
        return "The rotation did not help. That is a fault of drot: it should reduce the damage of pruning."
    return (
        "Removing half of the weights makes the model worse. Solving for the weights that stay undoes "
        f"{solver:.0%} of that damage, rotating the model before as well {whole:.0%}, with as many "
        "zeros in the same 2:4 pattern."
    )
