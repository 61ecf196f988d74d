"""The inputs of a layer's linears in the dense model, next to their inputs in the pruned model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drot.calibration.hessian import HessianAccumulator, product_factor
from drot.calibration.layer_pass import LayerPass
from drot.machine.products import add_product
from drot.model.families import InputGroup


@dataclass(frozen=True)
class TargetStatistics:
    """Sums over the calibration tokens, in the scale of a Hessian, (2/n) Σ.

    x is the input of a linear in the pruned model, x_dense in the dense model. r and r_dense are the residual
    streams that the linear's output is added to.

    hessian: H = (2/n) Σ x xᵀ [in, in].
    input_change: C = (2/n) Σ (x_dense - x) xᵀ [in, in].
    residual_change: E = (2/n) Σ (r_dense - r) xᵀ [out, in]; None if the output is not added to the stream.
    """

    hessian: Tensor
    input_change: Tensor
    residual_change: Tensor | None


@dataclass(frozen=True)
class DenseReference:
    """A pass of the dense model through a layer that is not pruned, in the basis of the pruned layer."""

    dense: LayerPass

    @torch.no_grad()
    def statistics(self, pruned: LayerPass, group: InputGroup) -> TargetStatistics:
        """The statistics of an input group, E of its first linear. Both passes go on to this group.

        pruned: the pass through the layer that is being pruned.
        """
        out, size = pruned.layer.shape_of(group.linears[0])
        device = pruned.stream.device
        hessian = HessianAccumulator(size, device)
        change = torch.zeros(size, size, device=device)
        residual = torch.zeros(out, size, device=device) if group.writes_residual else None
        batches = (of_model.inputs(group, residual=True) for of_model in (pruned, self.dense))
        for (x, rest), (x_dense, rest_dense) in zip(*batches, strict=True):
            hessian.add(x)
            rows = product_factor(x)
            add_product(change, (product_factor(x_dense) - rows).T, rows)
            if residual is not None and rest is not None and rest_dense is not None:
                add_product(residual, (product_factor(rest_dense) - product_factor(rest)).T, rows)
        scale = 2.0 / len(pruned.stream.hidden_states)
        return TargetStatistics(
            hessian.hessian(), change * scale, None if residual is None else residual * scale
        )
