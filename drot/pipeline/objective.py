"""The objective of one decoder layer's rotation, from the calibration inputs of the layer."""

import torch
from torch import Tensor

from drot.calibration.stream import CalibrationStream
from drot.config import WITHOUT_HESSIAN, ResolvedRecipe
from drot.model.layer import DecoderLayer
from drot.rotation.importance import is_rotated, layer_metrics
from drot.rotation.objective import LayerObjective


@torch.no_grad()
def layer_objective(
    layer: DecoderLayer,
    stream: CalibrationStream,
    recipe: ResolvedRecipe,
    *,
    advance: bool = False,
    own: bool = True,
) -> tuple[LayerObjective | None, dict[str, float]]:
    """The objective of `layer`, and the damping of each inverted Hessian. The layer is not changed.

    A Hessian is computed only for an input group with a linear that is pruned. The weights of the norms are
    folded into the linears, so a Hessian behind a norm is that of the norm's output without its weights.

    With `mode="shared"` a family whose stream cannot rotate has no R1, and the objective holds no linear on
    which R1 alone acts.

    advance: whether the stream goes on to the output of the layer, in the same pass.
    own: whether this rank needs the objective. Otherwise it adds its part of the Hessians, and returns None.
    """
    device, pruning, method = stream.device, recipe.pruning, recipe.pruning.method
    down_block = recipe.rotation.down_block
    sparsity = {
        name: pruning.sparsity_for(linear.full_name)
        for name, linear in layer.linears.items()
        if not pruning.keeps(linear.full_name)
    }
    fixed_r1 = recipe.rotation.mode == "shared" and not layer.family.rotates_stream
    if fixed_r1:
        acted_on = {name for name, linear in layer.linears.items() if {"r2", "r3"} & linear.spec.rotations}
        sparsity = {name: value for name, value in sparsity.items() if name in acted_on}
    groups = [group for group in layer.groups if any(linear.name in sparsity for linear in group.linears)]
    # the entropy needs no metric of an input that is not rotated, whose Hessian is the largest
    unrotated = recipe.rotation.objective == "pruned"
    read = [
        group
        for group in groups
        if method not in WITHOUT_HESSIAN and (unrotated or is_rotated(group, down_block))
    ]
    hessians: dict[str, Tensor] = {}
    if read or advance:
        hessians = stream.hessians(layer, read, folded=True, advance=advance)
    if not own:
        return None, {}
    weights = layer.folded_weights()
    metrics, dampings = layer_metrics(
        method,
        hessians,
        groups,
        layer.heads,
        damping=recipe.pruning.damping,
        average=recipe.pruning.damping_average,
        reference_compat=recipe.rotation.reference_compat,
        unrotated=unrotated,
        down_block=down_block,
    )
    weighted = recipe.rotation.output_weights == "gradient"
    objective = LayerObjective(
        {name: weight.to(device) for name, weight in weights.items()},
        metrics,
        layer.groups,
        layer.heads,
        objective=recipe.rotation.objective,
        sparsity=sparsity,
        product_dtype=getattr(torch, recipe.rotation.product_dtype),
        blocks=recipe.rotation.blocks,
        down_block=down_block,
        fixed_r1=fixed_r1,
        one_block=layer.family.one_block,
        keeps_ones=layer.family.layer_norm,
        outputs=stream.weights.of_outputs(layer) if weighted and stream.weights else {},
    )
    return objective, dampings
