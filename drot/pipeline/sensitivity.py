"""`drot.sensitivity`, which measures how much the output of each linear changes at each n:m or ratio."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.calibration.hessian import InputHessian
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.resume import RunState
from drot.config import Recipe, ResolvedPruning, ResolvedRecipe, Sparsity, resolve
from drot.core.checks import is_a
from drot.core.events import Progress, silent
from drot.machine.devices import dtype_name
from drot.machine.environment import device_name
from drot.machine.products import fp32_products, merging_dtype, without_autocast
from drot.machine.transfer import on_device
from drot.model.layer import DecoderLayer
from drot.model.rotation import LayerRotation
from drot.pipeline.context import RunContext
from drot.pipeline.identity import calibration_record
from drot.pipeline.invariance import ModelCheck
from drot.pipeline.layer import Role, fill_missing, located
from drot.pipeline.prepare import prepare
from drot.pipeline.rotation_files import read_given, with_given_r3
from drot.pipeline.run import PruningRun
from drot.pipeline.states import embed
from drot.pipeline.weigh import weigh_tokens
from drot.pruning import prune_once, solve_weights

#: the sparsities that are measured in addition to those of the recipe
SPARSITIES = tuple(map(Sparsity.parse, ("2:4", "4:8", "0.5")))


@dataclass(frozen=True)
class SensitivityResult:
    """The result of `drot.sensitivity`. Its repr is one line, without the recipe and the errors.

    errors: name of a linear → sparsity, as in `2:4` → relative output error. None where n:m does not divide
        the inputs of the linear.
    figures: further facts for `to_dict`.
    """

    recipe: ResolvedRecipe = field(repr=False)
    errors: dict[str, dict[str, float | None]] = field(repr=False)
    figures: dict[str, Any]

    @property
    def sparsities(self) -> list[str]:
        return list(next(iter(self.errors.values())))

    def largest(self, count: int) -> list[tuple[str, str, float]]:
        """Name, sparsity and error of the linears whose error is largest at the recipe's own sparsity.

        Linears that the recipe keeps dense are left out.
        """
        found = []
        for name, errors in self.errors.items():
            own = str(self.recipe.pruning.sparsity_for(name))
            if (error := errors.get(own)) is not None:
                found.append((name, own, error))
        return sorted(found, key=lambda row: -row[2])[:count]

    def to_dict(self) -> dict[str, Any]:
        """All figures in plain JSON types."""
        return {"recipe": self.recipe.to_dict(), **self.figures, "errors": self.errors}


@torch.inference_mode(False)  # in which gradients are unknown
@torch.no_grad()
@fp32_products("ieee")
@without_autocast()
def sensitivity(
    model: str | Path | PreTrainedModel,
    recipe: Recipe | None = None,
    *,
    tokenizer: Any = None,
    calibration: Tensor | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    rotations: str | Path | None = None,
    progress: Progress = silent,
) -> SensitivityResult:
    """The relative output error of each linear at 2:4, 4:8, 50 % and the sparsities of the recipe.

    The error is tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr(W H Wᵀ), where Ŵ is W pruned by the recipe's method. W is rotated
    and H is the Hessian of the rotated dense model, so each linear is pruned alone. The rotations are trained
    for the recipe's own sparsities, with `hessians="dense"`. The weights are not changed, and no result is
    written; a loaded model is in eval mode afterwards. Of a model that is read layer by layer, the rotations,
    and whatever else the main memory does not hold, lie in the system's folder for temporary files (TMPDIR)
    until the function returns.

    Raises UserError for a mistake in the input.

    Args:
        model: a name on the Hugging Face hub, a local folder, or a loaded model.
        recipe: the settings; None is `Recipe()`.
        tokenizer: the tokenizer for the calibration text. A loaded model needs it, or `calibration`.
        calibration: token ids [nsamples, seqlen], which replace the calibration text of the recipe.
        device: the device of the computation, as in `drot.prune`.
        dtype: dtype of the weights, as in `drot.prune`.
        rotations: a file written by `save_rotations_to` of `drot.prune`, whose rotations are used.
        progress: the callback for ProgressEvents.
    """
    is_a("recipe", recipe, Recipe, or_none=True)
    is_a("rotations", rotations, str, Path, or_none=True)
    recipe = with_given_r3(recipe or Recipe(), rotations)
    if recipe.rotation.mode == "layer" and rotations is None:
        recipe = recipe.replace(hessians="dense")
    measured = {
        sparsity: resolve(recipe.replace(sparsity=sparsity, keep=(), sparsity_of=())).pruning
        for sparsity in dict.fromkeys([*SPARSITIES, *recipe.pruning.sparsities])
        if sparsity.ratio > 0
    }
    run = prepare(
        model,
        recipe,
        tokenizer=tokenizer,
        calibration=calibration,
        device=device,
        dtype=dtype,
        rotations_given=rotations is not None,
        measures=True,
        progress=progress,
    )
    with _scratch(run) as state:
        if run.recipe.pruning.token_weights == "gradient":
            run.token_weights = weigh_tokens(run, state)
        given = None if rotations is None else read_given(run, Path(rotations))
        used, _ = PruningRun(run, given).known_rotations(state)
        errors, error = _errors(run, used, measured, state)
    figures = {
        "base_model": run.source,
        "calibration": calibration_record(run.tokens),
        "device": device_name(run.device),
        "dtype": dtype_name(run.dtype),
        "relative_logit_error": error,
    }
    return SensitivityResult(run.recipe, errors, figures)


@contextlib.contextmanager
def _scratch(run: RunContext) -> Iterator[RunState | None]:
    """Keeps rotations and hidden states in temporary files; None for a model whose layers are in memory."""
    if not run.model.is_skeleton:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="drot-") as folder:
        state = RunState(Path(folder) / "sensitivity", {})
        with state.saving():
            yield state


def _errors(
    run: RunContext,
    rotations: Mapping[int, LayerRotation],
    measured: dict[Sparsity, ResolvedPruning],
    state: RunState | None,
) -> tuple[dict[str, dict[str, float | None]], float | None]:
    """SensitivityResult.errors, from one pass of the dense model, and the error of the rotated logits.

    measured: sparsity → how to prune a linear to it. state: as of `embed`.
    """
    stream = embed(run, run.tokens, state)
    errors: dict[str, dict[str, float | None]] = {}
    check = ModelCheck(run.model, run.tokens[:1], run.device, run.bases.place) if rotations else None
    for layer in on_device(run.model.layers, run.device, run.home):
        with run.during("sensitivity", layer, announced=True):
            rotated, inputs = layer, stream
            if check is not None:
                rotation = rotations[layer.index]
                boundary = run.bases.merged(layer.index, rotations)
                check.pass_through(layer, rotation, boundary)
                rotated = layer.copy()
                if run.rotates_stream:
                    inputs = stream.copy()
                    inputs.rotate(rotation.r1)
                rotated.rotate(rotation.to(run.device), boundary, dtype=merging_dtype(run.device))
            errors |= _output_errors(rotated, inputs, measured)
        stream.advance(layer)
    return errors, None if check is None else check.logit_error(rotations[layer.index])


@torch.no_grad()
def _output_errors(
    layer: DecoderLayer, stream: CalibrationStream, measured: dict[Sparsity, ResolvedPruning]
) -> dict[str, dict[str, float | None]]:
    """SensitivityResult.errors of a layer's linears, each pruned alone. No weight is changed."""
    hessians = stream.hessians(layer, layer.groups)
    first = next(iter(measured.values()))  # all have one damping
    errors: dict[str, dict[str, float | None]] = {linear.full_name: {} for linear in layer.linears.values()}
    for group in layer.groups:
        matrix = hessians.pop(group.name)
        if group.expert is not None:
            fill_missing(matrix)
        hessian = InputHessian(matrix, first.damping, first.damping_average)
        for linear in layer.linears_of(group):
            weight, of_linear, total = linear.weight, errors[linear.full_name], None
            for sparsity, pruning in measured.items():
                of_linear[str(sparsity)] = None
                if sparsity.structured and weight.shape[1] % sparsity.m:
                    continue
                with located(layer.index, [Role([linear])]):
                    outcome = prune_once(weight, hessian, pruning, total=total)
                    (outcome,) = solve_weights([outcome], [weight], hessian, [pruning], pruning.solve)
                total = outcome.energy
                assert isinstance(outcome.output_error, float)
                of_linear[str(sparsity)] = outcome.output_error
    return errors
