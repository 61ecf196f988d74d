"""The demo: the embedded model, pruned to 2:4 by SparseGPT alone and by drot."""

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
from drot.config import CalibrationConfig, Recipe, RotationConfig, default_seqlen
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.evaluation.gap import gap_closed
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.evaluation.record import record, text_record
from drot.machine.environment import machine_name
from drot.pipeline.prune import prune
from drot.report.drawing import installed
from drot.report.write import write_report
from drot.text.source import load_calibration

ASSETS = Path(__file__).parent / "assets"
MODEL = ASSETS / "tiny-llama"
HELD_OUT = ASSETS / "python-heldout.txt"
CALIBRATION = CalibrationConfig(source=str(ASSETS / "python-calibration.txt"), nsamples=64, seqlen=512)


@dataclass(frozen=True, kw_only=True)
class DemoRow:
    """The figures of one model.

    gap_closed: the share of SparseGPT's damage that drot undoes (evaluation/gap.py). None for the dense model
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

    rows: the dense, the pruned, and the rotated and pruned model.
    sentence: what the figures mean.
    rotation_helped: whether the rotated model has the smaller perplexity of the two pruned models.
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
    """Measures the perplexity of the three models on held-out text, and saves the rotated model to `out`.

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

    def pruned(name: str, rotation: RotationConfig, to: Path | None) -> DemoRow:
        started = time.perf_counter()
        recipe = Recipe(rotation=rotation, calibration=calibration)
        result = prune(
            MODEL, recipe, out=to, tokenizer=tokenizer, calibration=tokens, device="cpu", dtype="float32",
            progress=progress,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        cast_weights(result.model, torch.float32)  # it has the dtype of the checkpoint
        value, sparsity = measure(result.model), result.manifest.sparsity
        return DemoRow(name=name, perplexity=value, sparsity=sparsity, seconds=seconds)

    dense = DemoRow(name="dense", perplexity=measure(load(MODEL, device="cpu", dtype="float32")))
    plain = pruned("SparseGPT 2:4", RotationConfig(mode="none"), None)
    rotated = pruned("drot: DenoiseRotator + SparseGPT 2:4", RotationConfig(steps=steps), out)
    share = gap_closed(dense.perplexity, plain.perplexity, rotated.perplexity)
    _record(out, held_out, seqlen, dense, plain, rotated)
    return DemoResult(
        rows=[dense, plain, replace(rotated, gap_closed=share)],
        sentence=_sentence(share),
        rotation_helped=rotated.perplexity < plain.perplexity,
        report=write_report([out], progress=progress).page if installed() else None,
    )


def _record(out: Path, tokens: Tensor, seqlen: int, dense: DemoRow, plain: DemoRow, rotated: DemoRow) -> None:
    """Adds the perplexities on the held-out text `tokens` [n] to the evaluations in the manifest."""
    text = HELD_OUT.name
    figures = {
        "seqlen": seqlen,
        "dtype": "float32",
        "machine": machine_name(torch.device("cpu")),
        "streamed": False,
        "texts": {text: text_record(text, tokens, seqlen)},
        "perplexity": {text: rotated.perplexity},
        "baselines": {"dense": {text: dense.perplexity}, "not_rotated": {text: plain.perplexity}},
        "against": None,
        "agreement": {},
        "tasks": {},
        "task_details": {},
        "averages": {},
    }
    record(str(out), figures)


def _sentence(share: float | None) -> str:
    if share is None or share <= 0:
        return "drot did not help. That is a fault of drot: it should reduce the damage of pruning."
    return (
        "Removing half of the weights makes the model worse. Rotating it first, and solving for the weights "
        f"that stay, undoes {share:.0%} of that damage, with as many zeros in the same 2:4 pattern."
    )
