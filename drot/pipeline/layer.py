"""The pruning of one decoder layer, with its figures for the manifest and the maps of its importance."""

from typing import Any

import torch
from torch import Tensor

from drot.calibration.dense_reference import DenseReference, TargetStatistics
from drot.calibration.hessian import InputHessian
from drot.calibration.layer_pass import LayerPass
from drot.config import ResolvedRecipe
from drot.core.errors import UserError
from drot.model.layer import Linear
from drot.model.rotation import LayerRotation
from drot.pipeline.importance import GroupImportance
from drot.pruning import dense_target, prune_once, solve_weight


@torch.no_grad()
def prune_layer(
    layer_pass: LayerPass,
    recipe: ResolvedRecipe,
    *,
    dense: DenseReference | None = None,
    rotation: LayerRotation | None = None,
    output_r1: Tensor | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Prunes the linears of a layer in place.

    The Hessian of an input group is computed after the groups before it are pruned, and factorised once for
    all its linears. A linear with a sparsity of 0 is not changed, and has only the first three figures.

    Returns name of a linear → its entry of the manifest (manifest/records.py), and `<name>.<map>` → the
    tensors of GroupImportance. Output errors compare with the outputs of the target weight, which differs
    from the weight of the layer for `target="dense"`; the error `before` the rotation always compares with
    the outputs of the weight.

    layer_pass: a new pass through the layer. Afterwards it can `advance` through the pruned layer.
    dense: the layer before it is pruned, with its inputs in the dense model, for `target="dense"`.
    rotation: the rotation that was merged into the layer.
    output_r1: R1 [d, d] of the basis in which the layer writes.
    """
    layer, pruning = layer_pass.layer, recipe.pruning
    figures: dict[str, dict[str, Any]] = {
        name: {"sparsity": 0.0, "output_error": 0.0, "damping": None} for name in layer.linears
    }
    maps: dict[str, Tensor] = {}
    for group in layer.groups:
        linears = layer.linears_of(group)
        pruned = [linear for linear in linears if pruning.sparsity_for(linear.full_name).ratio > 0]
        if not pruned:
            continue
        hessian = statistics = importance = None
        if len(layer_pass.stream.hidden_states):
            statistics = None if dense is None else dense.statistics(layer_pass, group)
            matrix = layer_pass.hessian(group) if statistics is None else statistics.hessian
            hessian = InputHessian(matrix, pruning.damping, pruning.damping_average)
            writes_in = output_r1 if layer.ends_layer(group) else None
            importance = GroupImportance(group, hessian, recipe, layer.heads, rotation, writes_in)
        for linear in pruned:
            try:
                figures[linear.name] = _prune_linear(linear, recipe, hessian, statistics, importance, maps)
            except UserError as error:
                raise UserError(f"layer {layer.index}, {linear.name}: {error}") from None
    return figures, maps


def _prune_linear(
    linear: Linear,
    recipe: ResolvedRecipe,
    hessian: InputHessian | None,
    statistics: TargetStatistics | None,
    importance: GroupImportance | None,
    maps: dict[str, Tensor],
) -> dict[str, Any]:
    """Prunes a linear in place; returns its entry of the manifest, and adds its maps to `maps`."""
    weight, config = linear.weight, recipe.pruning.for_linear(linear.full_name)
    target = weight
    if statistics is not None and hessian is not None:
        target = dense_target(weight, statistics, hessian.factor, share=config.target_weight)
    outcome = first = prune_once(target, hessian, config)
    one_shot: dict[str, dict[str, float | None]] = {}
    if hessian is not None and importance is not None:
        outcome = solve_weight(first, target, hessian, config, recipe.pruning.solve)
        unrotated = importance.unrotated(linear.spec, weight)
        shares, found = importance.of_weight(weight, unrotated, config.sparsity)
        errors = {list(shares)[-1]: first.output_error}
        if importance.rotated:
            total = first.energy if statistics is None else None  # a rotation does not change it
            errors["before"] = prune_once(unrotated, importance.hessian, config, total=total).output_error
        for basis, lost in shares.items():
            one_shot[basis] = {"removed_importance": lost, "output_error": errors[basis]}
        maps |= {f"{linear.name}.{name}": values for name, values in found.items()}
    weight.copy_(outcome.weight)
    return {
        "sparsity": float((weight == 0).float().mean()),
        "output_error": outcome.output_error,
        "damping": outcome.damping,
        "one_shot": one_shot,
        "admm_iterations": outcome.admm_iterations,
    }
