"""How much the rows of a weight count in the objective `pruned`.

A row of importance s, of which the mask removes a part, changes the loss by about g² times that part, with g²
the mean square of the gradient of the loss in the output of the row (token_weights.py). Without gradients all
linears count alike: each by out_features / (sum of all its scores at R = I). The sum is not taken at the
current R, because the training could then lower the loss by increasing the sum.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from drot.model.family import LinearSpec
from drot.model.sizes import HeadShape
from drot.rotation.importance import Metric


class OutputWeights:
    """The factors of the rows of the weights of a layer.

    They are factors of the weights, not of the loss, so that linears with different factors share one op.

    outputs: name of a linear → how much each of its outputs counts [out]. A linear that has none, as that of
        an expert, or zeros alone, counts as much for each output as the others do on average.
    pruned: the linears that are pruned, their folded weights [out, in], and the metrics of their inputs.
    shape: the heads, in each of which R2 mixes the rows of v_proj.
    """

    def __init__(
        self,
        outputs: Mapping[str, Tensor],
        pruned: Sequence[tuple[LinearSpec, Tensor, Metric]],
        shape: HeadShape,
    ) -> None:
        self._shape = shape
        known = [one for one in pruned if one[0].name in outputs and outputs[one[0].name].any()]
        self._outputs = {linear.name: self._mixed(linear, outputs[linear.name]) for linear, _, _ in known}
        self._usual = 1.0
        if known and len(known) < len(pruned):
            total = sum(_total(weight, metric, self._of(linear, weight)) for linear, weight, metric in known)
            self._usual = total / sum(len(weight) for _, weight, _ in known) or 1.0

    def factors(self, linear: LinearSpec, weight: Tensor, metrics: Sequence[Metric]) -> Tensor:
        """The factors [n, out or 1, 1] of the weights [n, out, in] of a linear, or of those of n experts."""
        if linear.name in self._outputs:
            return self._of(linear, weight).sqrt().to(weight.dtype)[None, :, None]
        squares = weight.square().sum(-2)
        if metrics[0].matrix is not None:
            diagonals = torch.stack([found for metric in metrics if (found := metric.diagonal) is not None])
            squares = squares * metrics[0].column_scale(diagonals.to(squares))
        totals = squares.sum(-1).double()
        found = torch.where(totals > 0, (self._usual * weight.shape[-2] / totals).sqrt(), 1)
        return found.to(weight.dtype)[:, None, None]

    def _of(self, linear: LinearSpec, weight: Tensor) -> Tensor:
        return self._outputs[linear.name].to(weight.device)

    def _mixed(self, linear: LinearSpec, outputs: Tensor) -> Tensor:
        """`outputs`, or their mean over those that a rotation mixes."""
        if linear.output is None:
            return outputs
        mixed = outputs.view(-1, self._shape.head_dim) if linear.output == "r2" else outputs[None]
        return mixed.mean(1, keepdim=True).expand_as(mixed).flatten()


def _total(weight: Tensor, metric: Metric, outputs: Tensor) -> float:
    """The sum of the scores of a weight [out, in] at R = I, times the weights [out] of its outputs."""
    of_columns = outputs.to(weight) @ weight.square()
    if metric.diagonal is not None:
        of_columns = of_columns * metric.column_scale(metric.diagonal.to(of_columns))
    return float(of_columns.double().sum())
