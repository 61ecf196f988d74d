"""`SparseExperts`: the 2:4 weights of all experts of a mixture, stored packed and multiplied so."""

import torch
from torch import Tensor

from drot.ops import pack24, sparse24_experts
from drot.sparse.linear import PackedWeight, in_dtype_of


class SparseExperts(PackedWeight):
    """y = x Wₑᵀ + bₑ with the 2:4 weights W [experts, out, in], for inference.

    It stands in the place of a parameter with the weights of all experts (drot/model/experts.py), which may
    be those of several linears. A GPU keeps no compressed form of it.

    values: [experts, out, in/2] in bf16, fp16 or fp32. positions: uint8 [experts, out, in/8].
    """

    @classmethod
    def from_dense(cls, weights: Tensor) -> "SparseExperts":
        """A packed copy of `weights` [experts, out, in]. Raises ValueError that names the first row that is
        not 2:4."""
        made = cls.like(weights)
        for expert, weight in enumerate(weights):  # one at a time: they may have to be copied
            try:
                made.values[expert], made.positions[expert] = pack24(weight.contiguous())
            except ValueError as error:
                raise ValueError(f"expert {expert}: {error}") from None
        return made

    @classmethod
    def like(cls, weights: Tensor) -> "SparseExperts":
        """An uninitialised SparseExperts with the sizes, dtype and device of `weights` [experts, out, in]."""
        *sizes, columns = weights.shape
        positions = weights.new_empty(*sizes, columns // 8, dtype=torch.uint8)
        return cls(weights.new_empty(*sizes, columns // 2), positions)

    def forward(self, x: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, in] -> [rows, out] in the dtype of values, where expert e has the rows up to ends[e].

        ends: int32 [experts]. bias: [experts, out]. Under autocast, x is cast to the dtype of values.
        """
        return sparse24_experts(in_dtype_of(self.values, x), self.values, self.positions, ends, bias)

    def extra_repr(self) -> str:
        experts, out, half = self.values.shape
        return f"experts={experts}, in_features={2 * half}, out_features={out}, 2:4; to train: dequantize()"
