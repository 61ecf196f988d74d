"""The pruning of one decoder layer, with its figures for the manifest and for plots."""

from typing import Any

import torch
from torch import Tensor

from drot.calibration.dense_reference import DenseReference
from drot.calibration.hessian import InputHessian
from drot.calibration.layer_pass import LayerPass
from drot.config import ResolvedRecipe
from drot.core.errors import UserError
from drot.model.boundary import BoundaryRotation
from drot.model.families import INPUT_GROUPS, HeadShape
from drot.model.rotate import LayerRotation
from drot.pipeline.figures import GroupFigures
from drot.pruning import dense_target, prune_once, solve_weight


@torch.no_grad()
def prune_layer(
    layer_pass: LayerPass,
    shape: HeadShape,
    recipe: ResolvedRecipe,
    *,
    dense: DenseReference | None = None,
    rotation: LayerRotation | None = None,
    boundary: BoundaryRotation | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Prunes the seven linears of a layer in place.

    The Hessian of an input group is computed after the groups before it are pruned, and factorised once for
    all its linears. A linear with a sparsity of 0 is not changed, and has only the first three figures.

    Returns two dicts. The first is role → figures for the manifest:
        sparsity: the share of zeros.
        output_error: relative error of the outputs on the calibration inputs; None without such inputs.
        damping: the damping of the inverted Hessian; None for a method that inverts no Hessian.
        one_shot: `before` and, in a rotated layer, `after` the rotation → removed_importance, the pruned
            share of the importance, and output_error, the error of the method alone, without a solver.
            Empty without calibration inputs.
        admm_iterations: iterations of ADMM.
    The second is `<role>.<name>` → the tensors of GroupFigures.importance.

    Output errors compare with the outputs of the target weight, which differs from the weight of the layer
    for `target="dense"`. The error `before` the rotation of a rotated layer always compares with the outputs
    of the weight.

    Args:
        layer_pass: a new pass through the layer. Afterwards it can `advance` through the pruned layer.
        shape: attention sizes of the model.
        recipe: the settings of the run.
        dense: the layer before it is pruned, with its inputs in the dense model, for `target="dense"`.
        rotation: the rotation that was merged into the layer; None for a layer that is not rotated.
        boundary: the rotation of the residual that the layer holds; None for a layer without it.
    """
    config, linears, index = recipe.pruning, layer_pass.linears, layer_pass.index
    damping, average = config.damping, config.damping_average
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
            hessian = InputHessian(layer_pass.hessian(group), damping, average)
        else:
            statistics = dense.statistics(layer_pass, group)
            hessian = InputHessian(statistics.hessian, damping, average)
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
                    outcome = solve_weight(first, target, hessian, of_linear, recipe.pruning.solve)
                    if importance is None:  # after the first linear, whose pruning checks the Hessian
                        down_r1 = None if boundary is None else boundary.next_r1
                        importance = GroupFigures(group, hessian, recipe, shape, rotation, down_r1)
                    unrotated = importance.unrotated(role, weight)
                    shares, plotted = importance.importance(weight, unrotated, of_linear.sparsity)
                    errors = {list(shares)[-1]: first.output_error}
                    if importance.rotated:
                        total = first.energy if dense is None else None  # a rotation does not change it
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
