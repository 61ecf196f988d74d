"""The objective of one decoder layer's rotation, from the calibration inputs of the layer."""

import copy

import torch
from torch import Tensor, nn

from drot.calibration.stream import CalibrationStream, Reader
from drot.config import ResolvedRecipe
from drot.model.families import INPUT_GROUPS, Architecture, HeadShape, layer_linears, module_at
from drot.model.fold_norm import reset_norm
from drot.model.rotate import folded_weights
from drot.rotation.importance import layer_metrics
from drot.rotation.objective import LayerObjective


@torch.no_grad()
def layer_objective(
    layer: nn.Module,
    index: int,
    stream: CalibrationStream,
    arch: Architecture,
    shape: HeadShape,
    recipe: ResolvedRecipe,
    *,
    advance: bool = False,
) -> tuple[LayerObjective, dict[str, float]]:
    """The objective of `layer`, and the damping of each inverted Hessian. The layer is not changed.

    A Hessian is computed only for an input group with a linear that is pruned. The weights of the norms are
    folded into the linears, so a Hessian behind a norm is that of the norm's output without its weights.

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
    with_down = recipe.rotation.objective == "pruned"
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
        if not with_down:  # the entropy needs no metric of down_proj, whose Hessian is the largest
            readers.pop("down", None)
    if readers or advance:
        hessians = stream.hessians(layer, index, readers, advance=advance)
    metrics = layer_metrics(
        method,
        hessians,
        shape,
        damping=recipe.pruning.damping,
        average=recipe.pruning.damping_average,
        reference_compat=recipe.rotation.reference_compat,
        with_down=with_down,
        groups=groups,
    )
    objective = LayerObjective(
        {role: weight.to(device) for role, weight in weights.items()},
        metrics,
        shape,
        objective=recipe.rotation.objective,
        sparsity=sparsity,
        product_dtype=getattr(torch, recipe.rotation.product_dtype),
        blocks=recipe.rotation.equal_blocks,
    )
    return objective, metrics.damping
