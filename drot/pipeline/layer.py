"""The objective of one decoder layer from its calibration inputs, and the pruning of the layer."""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from drot.architectures import INPUT_GROUPS, Architecture, HeadShape, layer_linears, module_at
from drot.calibration.dense_reference import DenseReference
from drot.calibration.hessian import InputHessian
from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream, Reader
from drot.config import PruningConfig, Recipe, Sparsity
from drot.devices import product_dtype
from drot.errors import UserError
from drot.pipeline.figures import GroupFigures
from drot.pruning import (
    PruneOutcome,
    dense_target,
    prune_magnitude,
    prune_sparsegpt,
    prune_wanda,
    solve_kept_weights,
)
from drot.rotation.importance import layer_metrics
from drot.rotation.objective import LayerObjective
from drot.surgery.boundary import BoundaryRotation
from drot.surgery.fold_norm import reset_norm
from drot.surgery.rotate import LayerRotation, folded_weights


@torch.no_grad()
def layer_objective(
    layer: nn.Module,
    index: int,
    stream: CalibrationStream,
    arch: Architecture,
    shape: HeadShape,
    recipe: Recipe,
    *,
    advance: bool = False,
) -> tuple[LayerObjective, dict[str, float]]:
    """The objective of `layer`, and the damping of each inverted Hessian. The layer is not changed.

    Only the input groups with a linear that is pruned have a Hessian. The norms' weights are folded into the
    linears, so the Hessians are of the norms' outputs without weights.

    Args:
        layer: a decoder layer.
        index: number of the layer.
        stream: inputs of the layer.
        arch: family of the model.
        shape: attention sizes of the model.
        recipe: the settings of the run.
        advance: whether the stream goes on to the output of the layer, in the same pass.
    """
    weights = folded_weights(layer, arch)
    device = stream.device
    method = recipe.pruning.method
    with_down = recipe.objective == "pruned"
    sparsity = {
        role: recipe.pruning.sparsity_for(name)
        for role, name in arch.linear_names(index).items()
        if not recipe.pruning.keeps(name)
    }
    groups = [group for group, roles in INPUT_GROUPS.items() if not sparsity.keys().isdisjoint(roles)]
    hessians: dict[str, Tensor] = {}
    readers: dict[str, Reader] = {}
    if method != "magnitude":
        linears, norms = layer_linears(layer, arch), {"attention": arch.attention_norm, "mlp": arch.mlp_norm}
        readers = {group: (linears[INPUT_GROUPS[group][0]], None) for group in groups}
        for group in norms.keys() & readers.keys():
            norm = module_at(layer, norms[group])
            plain = copy.deepcopy(norm)
            reset_norm(plain, arch.norm_offset)
            readers[group] = norm, plain
        if not with_down:  # the largest Hessian
            readers.pop("down", None)
    if readers or advance:
        hessians = stream.hessians(layer, index, readers, advance=advance)
    metrics = layer_metrics(
        method,
        hessians,
        shape,
        damping=recipe.damping,
        reference_compat=recipe.rotation.reference_compat,
        with_down=with_down,
        groups=groups,
    )
    objective = LayerObjective(
        {role: weight.to(device) for role, weight in weights.items()},
        metrics,
        shape,
        objective=recipe.objective,
        sparsity=sparsity,
        product_dtype=getattr(torch, product_dtype(recipe.rotation.product_dtype, device)),
        blocks=recipe.rotation.equal_blocks,
    )
    return objective, metrics.damping


@torch.no_grad()
def prune_layer(
    layer_pass: LayerPass,
    shape: HeadShape,
    recipe: Recipe,
    *,
    dense: DenseReference | None = None,
    rotation: LayerRotation | None = None,
    boundary: BoundaryRotation | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Prunes the seven linears of a layer in place.

    The Hessian of an input group is computed after the groups before it are pruned, and factorised once for
    all its linears. A linear with a sparsity of 0 is not changed.

    Returns role → figures for the manifest, and `<role>.<name>` → the tensors of GroupFigures.importance. The
    figures are sparsity, output error, damping, iterations of ADMM, and `one_shot`: for `before` and `after`
    the rotation, the pruned share of the importance, and the output error of the method alone, without a
    solver. Output errors are those of the target, if the target is the dense model, but for `before`. A run
    without calibration tokens has no output errors and an empty `one_shot`.

    Args:
        layer_pass: a new pass through the layer. Afterwards it can `advance` through the pruned layer.
        shape: attention sizes of the model.
        recipe: the settings of the run.
        dense: the layer before it is pruned, with its inputs in the dense model, for `target="dense"`.
        rotation: the rotation that the layer has; None if it is not rotated.
        boundary: the rotation of the residual that the layer holds; None if it holds no such rotation.
    """
    config, linears, index = recipe.pruning, layer_pass.linears, layer_pass.index
    names = layer_pass.arch.linear_names(index)
    figures: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for group, roles in INPUT_GROUPS.items():
        kept = [role for role in roles if config.sparsity_for(names[role]).ratio == 0]
        figures |= {role: {"sparsity": 0.0, "output_error": 0.0, "damping": None} for role in kept}
        if len(kept) == len(roles):
            continue
        hessian: InputHessian | None = None
        if not len(layer_pass.stream.hidden_states):
            assert config.method == "magnitude", f"{config.method} needs calibration tokens"
        elif dense is None:
            hessian = InputHessian(layer_pass.hessian(group), recipe.damping)
        else:
            statistics = dense.statistics(layer_pass, group)
            hessian = InputHessian(statistics.hessian, recipe.damping)
        importance: GroupFigures | None = None
        for role in (role for role in roles if role not in kept):
            weight, of_linear = linears[role].weight, config.for_linear(names[role])
            try:
                target = weight
                if dense is not None:
                    assert hessian is not None
                    target = dense_target(weight, statistics, hessian.factor, share=config.target_weight)
                outcome = first = prune_once(target, hessian, of_linear)
                one_shot: dict[str, dict[str, float | None]] = {}
                if hessian is not None:
                    outcome = solve_weight(first, target, hessian, of_linear, recipe.solve)
                    if importance is None:  # after the first linear, whose pruning checks the Hessian
                        down_r1 = None if boundary is None else boundary.next_r1
                        importance = GroupFigures(group, hessian, recipe, shape, rotation, down_r1)
                    unrotated = importance.unrotated(role, weight)
                    shares, plotted = importance.importance(weight, unrotated, of_linear.sparsity)
                    errors = {list(shares)[-1]: first.output_error}
                    if importance.rotated:
                        total = first.energy if dense is None else None  # a rotation leaves it as it is
                        before = prune_once(unrotated, importance.hessian, of_linear, total=total)
                        errors["before"] = before.output_error
                    one_shot = {
                        basis: {"removed_importance": share, "output_error": errors[basis]}
                        for basis, share in shares.items()
                    }
                    tensors |= {f"{role}.{name}": values for name, values in plotted.items()}
            except UserError as error:
                raise UserError(f"layer {index}, {role}: {error}") from None
            weight.copy_(outcome.weight)
            figures[role] = {
                "sparsity": float((weight == 0).float().mean()),
                "output_error": outcome.output_error,
                "damping": outcome.damping,
                "one_shot": one_shot,
                "admm_iterations": outcome.admm_iterations,
            }
    return {role: figures[role] for role in linears}, tensors


@torch.no_grad()
def output_errors(
    layer: nn.Module,
    index: int,
    stream: CalibrationStream,
    arch: Architecture,
    recipe: Recipe,
    sparsities: list[Sparsity],
) -> dict[str, dict[str, float | None]]:
    """Name of a linear → sparsity → relative output error of the linear, pruned alone. No weight is changed.

    The error is None where n:m does not divide the inputs of the linear.

    Args:
        layer: a decoder layer.
        index: number of the layer.
        stream: inputs of the layer.
        arch: family of the model.
        recipe: the settings of the run, of which `sparsity`, `keep` and `sparsity_of` are not used.
        sparsities: the sparsities to prune to.
    """
    linears, names = layer_linears(layer, arch), arch.linear_names(index)
    readers: dict[str, Reader] = {group: (linears[roles[0]], None) for group, roles in INPUT_GROUPS.items()}
    hessians = stream.hessians(layer, index, readers)
    errors: dict[str, dict[str, float | None]] = {name: {} for name in names.values()}
    for group, roles in INPUT_GROUPS.items():
        hessian = InputHessian(hessians.pop(group), recipe.damping)
        for role in roles:
            weight, of_linear, total = linears[role].weight, errors[names[role]], None
            for sparsity in sparsities:
                of_linear[str(sparsity)] = None
                if sparsity.structured and weight.shape[1] % sparsity.m:
                    continue
                alone = dataclasses.replace(recipe.pruning, sparsity=sparsity, keep=(), sparsity_of=())
                try:
                    outcome = prune_weight(weight, hessian, alone, recipe.solve, total=total)
                except UserError as error:
                    raise UserError(f"layer {index}, {role}: {error}") from None
                of_linear[str(sparsity)], total = outcome.output_error, outcome.energy
    return errors


def prune_weight(
    target: Tensor,
    hessian: InputHessian | None,
    config: PruningConfig,
    solver: str,
    *,
    total: float | None = None,
) -> PruneOutcome:
    """The pruned weight [out, in] whose outputs are near to those of `target` [out, in].

    Args:
        target: the weight whose outputs are wanted.
        hessian: H [in, in] of the inputs. None, for magnitude with the solver `none` only, gives no output
            error.
        config: the method and its settings.
        solver: `solve` of the recipe, with `auto` resolved.
        total: tr(T H Tᵀ) of the target T, where it is known.
    """
    outcome = prune_once(target, hessian, config, total=total)
    return outcome if hessian is None else solve_weight(outcome, target, hessian, config, solver)


def prune_once(
    target: Tensor, hessian: InputHessian | None, config: PruningConfig, *, total: float | None = None
) -> PruneOutcome:
    """The weight [out, in] that the method makes of `target` [out, in], without a solver.

    hessian: H [in, in] of the inputs; None for magnitude, whose outcome then has no output error.
    config: the method and its settings.
    total: tr(T H Tᵀ) of the target T, where it is known.
    """
    matrix = None if hessian is None else hessian.matrix
    if config.method == "magnitude":
        return prune_magnitude(target, config.sparsity, hessian=matrix, total=total)
    assert hessian is not None, f"{config.method} needs the Hessian"
    if config.method == "wanda":
        diagonal = hessian.matrix.diagonal()
        return prune_wanda(target, diagonal, config.sparsity, hessian=matrix, total=total)
    assert config.method == "sparsegpt", f"{config.method} has no branch here"
    return _sweep(target, hessian, config, total)


def solve_weight(
    outcome: PruneOutcome, target: Tensor, hessian: InputHessian, config: PruningConfig, solver: str
) -> PruneOutcome:
    """The outcome with the kept weights that the solver computes.

    Args:
        outcome: the result of `prune_once`.
        target: the weight [out, in] whose outputs are wanted.
        hessian: H [in, in] of the inputs.
        config: the method and its settings.
        solver: `solve` of the recipe, with `auto` resolved.
    """
    if solver == "sparsegpt" and config.method != "sparsegpt":
        return _sweep(target, hessian, config, outcome.energy, outcome.removed)
    if solver in ("pcg", "admm"):
        return solve_kept_weights(
            outcome,
            target,
            hessian.matrix,
            config.sparsity,
            solver=solver,
            damping=hessian.damping if outcome.damping is None else outcome.damping,
            total=outcome.energy,
        )
    return outcome


def _sweep(
    target: Tensor,
    hessian: InputHessian,
    config: PruningConfig,
    total: float | None,
    removed: Tensor | None = None,
) -> PruneOutcome:
    """SparseGPT's sweep with the factor of the input, as in `prune_sparsegpt`.

    Args:
        target: the weight [out, in] whose outputs are wanted.
        hessian: H [in, in] of the inputs.
        config: the settings of the method.
        total: tr(T H Tᵀ) of the target T; None computes it.
        removed: the mask of another method; None chooses the mask.
    """
    return prune_sparsegpt(
        target,
        hessian.matrix,
        config.sparsity,
        damping=hessian.damping,
        block_size=config.resolved_block_size,
        removed=removed,
        factor=hessian.factor,
        total=total,
    )
