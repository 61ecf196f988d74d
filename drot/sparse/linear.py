"""`SparseLinear`: a linear layer that keeps and multiplies a packed 2:4 weight."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drot.ops import pack24, sparse24_compress, sparse24_linear, unpack24


class SparseLinear(nn.Module):
    """y = x Wᵀ + b with W [out, in] 2:4, for inference: it takes the place of a pruned nn.Linear.

    values [out, in/2] in bf16, fp16 or fp32 and positions uint8 [out, in/8], as `drot.ops.pack24`
    lays them out; bias [out] or None. They are frozen parameters, so that they are saved, moved and
    offloaded as any weight is.
    """

    bias: nn.Parameter | None
    compressed: Tensor | None

    def __init__(self, values: Tensor, positions: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape[0], 2 * values.shape[1]
        self.values = nn.Parameter(values, requires_grad=False)
        self.positions = nn.Parameter(positions, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.keeps_layout = False
        self.register_buffer("compressed", None, persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "SparseLinear":
        """Packs a linear, which is left as it was. ValueError names the first row that is not 2:4."""
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(*pack24(linear.weight.detach()), bias)

    @classmethod
    def like(cls, linear: nn.Linear) -> "SparseLinear":
        """An uninitialised one of the linear's sizes, dtype and device, for weights that are yet to come."""
        weight, bias = linear.weight.detach(), linear.bias
        out, columns = weight.shape
        positions = weight.new_empty(out, columns // 8, dtype=torch.uint8)
        return cls(weight.new_empty(out, columns // 2), positions, None if bias is None else bias.detach())

    def compress(self) -> None:
        """Keeps the weight in the GPU library's own layout as well, which products of many tokens are
        faster with and which takes about as many bytes again. Nothing where there is no such layout, as
        on the CPU. It is made anew when the module moves or loads other weights, and not saved."""
        layout = sparse24_compress(self.values, self.positions)
        self.keeps_layout, self.compressed = True, layout if layout.numel() else None

    def forget_layout(self) -> None:
        """Undoes `compress`."""
        self.keeps_layout, self.compressed = False, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.compressed = None
        super()._apply(fn, recurse)
        if self.keeps_layout:
            self.compress()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.keeps_layout:
            self.compress()

    def to_linear(self) -> nn.Linear:
        """The nn.Linear with the zeros written out. ValueError names a row whose positions do not ascend."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(unpack24(self.values, self.positions), requires_grad=False)
        linear.register_parameter("bias", self.bias)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of values. x must have it, but under autocast."""
        own: Any = self._parameters  # as attributes they would take 4 us more, of some 20 in all
        values = own["values"]
        if x.dtype != values.dtype and torch.is_autocast_enabled(x.device.type):
            x = x.to(values.dtype)
        return sparse24_linear(
            x, values, own["positions"], own["bias"], compressed=self._buffers["compressed"]
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
