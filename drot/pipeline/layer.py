"""The objective of one decoder layer from its calibration inputs, and the pruning of the layer."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from drot.architectures import INPUT_GROUPS, Architecture, HeadShape, layer_linears, module_at
from drot.calibration.dense_reference import DenseReference
from drot.calibration.stream import CalibrationStream
from drot.config import PruningConfig, Recipe
from drot.errors import UserError
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
from drot.surgery.fold_norm import reset_norm
from drot.surgery.rotate import folded_weights


@torch.no_grad()
def layer_objective(
    layer: nn.Module,
    index: int,
    stream: CalibrationStream,
    arch: Architecture,
    shape: HeadShape,
    recipe: Recipe,
) -> tuple[LayerObjective, dict[str, float]]:
    """The objective of `layer`, and the damping of each inverted Hessian. The layer is not changed.

    Args:
        layer: a decoder layer.
        index: number of the layer.
        stream: inputs of the layer.
        arch: family of the model.
        shape: attention sizes of the model.
        recipe: the settings of the run.
    """
    weights = folded_weights(layer, arch)
    device = stream.device
    method = recipe.pruning.method
    with_down = recipe.objective == "pruned"
    hessians = {}
    if method != "magnitude":
        folded_layer = copy.deepcopy(layer)
        linears = layer_linears(folded_layer, arch)
        for role, linear in linears.items():
            linear.weight.copy_(weights[role])
        for path in (arch.attention_norm, arch.mlp_norm):
            reset_norm(module_at(folded_layer, path), arch.norm_offset)
        readers = {group: linears[roles[0]] for group, roles in INPUT_GROUPS.items()}
        if not with_down:  # the largest Hessian
            del readers["down"]
        hessians = stream.hessians(folded_layer, index, readers)
    metrics = layer_metrics(
        method,
        hessians,
        shape,
        damping=recipe.pruning.damping,
        reference_compat=recipe.rotation.reference_compat,
        with_down=with_down,
    )
    objective = LayerObjective(
        {role: weight.to(device) for role, weight in weights.items()},
        metrics,
        shape,
        objective=recipe.objective,
        sparsity=recipe.pruning.sparsity,
        product_dtype=getattr(torch, recipe.rotation.product_dtype),
        blocks=recipe.rotation.equal_blocks,
    )
    return objective, metrics.damping


@torch.no_grad()
def prune_layer(
    layer: nn.Module,
    index: int,
    stream: CalibrationStream,
    arch: Architecture,
    recipe: Recipe,
    dense: DenseReference | None = None,
) -> dict[str, dict[str, Any]]:
    """Prunes the seven linears of a layer in place and returns role → figures for the manifest.

    The Hessian of an input group is computed after the groups before it are pruned. The figures are sparsity,
    output error and damping. The output error is that of the target, if the target is the dense model.

    Args:
        layer: a decoder layer.
        index: number of the layer.
        stream: inputs of the layer.
        arch: family of the model.
        recipe: the settings of the run.
        dense: the layer before it is pruned, with its inputs in the dense model, for `target="dense"`.
    """
    config, linears, figures = recipe.pruning, layer_linears(layer, arch), {}
    for roles in INPUT_GROUPS.values():
        if dense is None:
            hessian = stream.hessians(layer, index, {"input": linears[roles[0]]})["input"]
        else:
            statistics = dense.statistics(layer, stream, index, roles[0], arch)
            hessian = statistics.hessian
        for role in roles:
            weight = linears[role].weight
            try:
                target = weight
                if dense is not None:
                    target = dense_target(
                        weight, statistics, share=config.target_weight, damping=config.damping
                    )
                outcome = prune_weight(target, hessian, config, recipe.solve)
            except UserError as error:
                raise UserError(f"layer {index}, {role}: {error}") from None
            weight.copy_(outcome.weight)
            figures[role] = {
                "sparsity": float((weight == 0).float().mean()),
                "output_error": outcome.output_error,
                "damping": outcome.damping,
            }
    return figures


def prune_weight(target: Tensor, hessian: Tensor, config: PruningConfig, solver: str) -> PruneOutcome:
    """The pruned weight [out, in] whose outputs are near to those of `target` [out, in].

    hessian: H [in, in] of the inputs.
    config: the method and its settings.
    solver: `solve` of the recipe, with `auto` resolved.
    """
    sparsity = config.sparsity
    sweep = functools.partial(
        prune_sparsegpt, target, hessian, sparsity, damping=config.damping, block_size=config.block_size
    )
    if config.method == "magnitude":
        outcome = prune_magnitude(target, sparsity, hessian=hessian)
    elif config.method == "wanda":
        outcome = prune_wanda(target, hessian.diagonal(), sparsity, hessian=hessian)
    else:
        assert config.method == "sparsegpt", f"{config.method} has no branch here"
        outcome = sweep()
    if solver == "sparsegpt" and config.method != "sparsegpt":
        return sweep(removed=outcome.removed)
    if solver in ("pcg", "admm"):
        damping = config.damping if outcome.damping is None else outcome.damping
        return solve_kept_weights(outcome, target, hessian, sparsity, solver=solver, damping=damping)
    return outcome
