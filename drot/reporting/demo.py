"""The demo: the embedded model, pruned to 2:4 by SparseGPT alone, with a solver, and with the rotation."""

from dataclasses import dataclass
from pathlib import Path

from drot.checkpoint.resume import partial_folder
from drot.checkpoint.save import check_output
from drot.config import CalibrationConfig, Recipe, RotationConfig
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.pipeline.prune import prune
from drot.reporting.compare import Comparison, compare
from drot.reporting.drawing import installed
from drot.reporting.write import report

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
class DemoResult:
    """The figures of the demo.

    comparison: the dense model, pruned by SparseGPT, with the solver as well, and with the rotation as well.
    sentence: what the figures mean.
    rotation_helped: whether the rotated model has the smallest perplexity of the pruned models.
    report: the page of the run; None if matplotlib, which draws it, is not installed.
    """

    comparison: Comparison
    sentence: str
    rotation_helped: bool
    report: Path | None = None


def run_demo(
    out: Path,
    *,
    steps: int | None = None,
    calibration: CalibrationConfig = CALIBRATION,
    held_out: Path = HELD_OUT,
    progress: Progress = silent,
) -> DemoResult:
    """Prunes the model to `out` with rotation and solver, and compares it with its baselines (`compare`).

    The perplexities are recorded in its manifest, and a report is written into its folder. All computation is
    in float32 on the CPU, so that the figures are the same on every machine.

    Args:
        out: folder for the rotated and pruned model; new or empty.
        steps: training steps of the rotation; None for the default.
        calibration: the calibration text, and the length of the windows.
        held_out: the text on which the perplexities are measured.
        progress: receives the events of the pruning runs and of the evaluations.
    """
    check_output(out)
    if (partial := partial_folder(out)).exists():
        raise UserError(f"{partial} was left by an interrupted demo: remove it or name another `out`")
    recipe = Recipe(rotation=RotationConfig(steps=steps), calibration=calibration)
    prune(MODEL, recipe, out=out, device="cpu", dtype="float32", progress=progress)
    text = str(held_out)
    comparison = compare(
        out, ppl=[text], seqlen=calibration.seqlen, device="cpu", dtype="float32", progress=progress
    )
    *_, solved, rotated = rows = comparison.models
    return DemoResult(
        comparison=comparison,
        sentence=_sentence(solved.gap_closed[text], rotated.gap_closed[text]),
        rotation_helped=rotated.perplexity[text] < min(row.perplexity[text] for row in rows[1:-1]),
        report=report(out, progress=progress).page if installed() else None,
    )


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
