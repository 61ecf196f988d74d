"""The inputs of a layer's linears in the dense model, next to their inputs in the pruned model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drot.calibration.hessian import HessianAccumulator, product_factor
from drot.calibration.layer_pass import LayerPass
from drot.machine.products import add_product
from drot.model.family import InputGroup


@dataclass(frozen=True)
class TargetStatistics:
    """Sums over the calibration tokens, in the scale of a Hessian, (2/n) Σ.

    x is the input of a linear in the pruned model, x_dense in the dense model. A linear whose outputs are
    added to the residual stream leaves there y, as it is now, and y_dense in the dense model; where the layer
    multiplies the outputs before it adds them, y is divided by the number. One of C and E is None.

    hessian: H = (2/n) Σ x xᵀ [in, in].
    input_change: C = (2/n) Σ (x_dense - x) xᵀ [in, in], of the other linears, and of those whose outputs pass
        a norm before they are added.
    output_change: E = (2/n) Σ (y_dense - y) xᵀ [out, in], of a linear that does.
    """

    hessian: Tensor
    input_change: Tensor | None = None
    output_change: Tensor | None = None


@dataclass(frozen=True)
class DenseReference:
    """A pass of the dense model through a layer that is not pruned, in the basis of the pruned layer."""

    dense: LayerPass

    @torch.no_grad()
    def statistics(self, pruned: LayerPass, group: InputGroup) -> TargetStatistics:
        """The statistics of an input group, whose linears are not pruned yet. Both passes go on to it.

        pruned: the pass through the layer that is being pruned.
        """
        out, size = pruned.layer.shape_of(group.linears[0])
        device, ranks = pruned.stream.device, pruned.stream.ranks
        hessian = HessianAccumulator(size, device, ranks)
        adds = pruned.layer.adds(group)
        change = torch.zeros(out if adds else size, size, device=device)
        batches = (of_model.inputs(group, outputs=True) for of_model in (pruned, self.dense))
        roots = pruned.stream.roots(pruned.layer, group)
        for (x, y), (x_dense, y_dense), root in zip(*batches, roots, strict=True):
            hessian.add(x, root)
            if y is not None and y_dense is not None:
                difference = product_factor(y_dense).sub(product_factor(y))
            else:
                difference = product_factor(x_dense).sub(product_factor(x))
            add_product(change, product_factor(difference, root).T, product_factor(x, root))
        ranks.add_(change)
        change.mul_(2.0 / ranks.total(len(pruned.stream.hidden_states)))
        if adds:
            change.div_(pruned.layer.residual_multiplier)  # E is of the outputs of the linear
            return TargetStatistics(hessian.hessian(), output_change=change)
        return TargetStatistics(hessian.hessian(), input_change=change)
