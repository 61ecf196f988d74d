"""`SparseLinear`: a linear layer that stores its 2:4 weight packed and multiplies with it."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drot.core.errors import UserError
from drot.machine.devices import check_gpu, is_gpu
from drot.ops import pack24, sparse24_compress, sparse24_linear, unpack24

#: the dtypes that packed weights can have
PACKABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: for whoever trains a packed model, or adds adapters to it
NOT_TRAINABLE = "packed weights cannot be trained: call dequantize() of the model first"


def compresses() -> bool:
    """Whether a GPU keeps compressed forms (`SparseLinear.compress`): not where DROT_COMPRESS is 0."""
    return os.environ.get("DROT_COMPRESS") != "0"


class PackedWeight(nn.Module):
    """A 2:4 weight as values [..., out, in/2] and positions uint8 [..., out, in/8], from `drot.ops.pack24`.

    Both are frozen parameters, so that they are saved, moved and offloaded as other weights are.
    """

    def __init__(self, values: Tensor, positions: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=False)
        self.positions = nn.Parameter(positions, requires_grad=False)

    def train(self, mode: bool = True) -> Any:
        """Raises UserError for training mode: the product has no gradient."""
        if mode:
            raise UserError(NOT_TRAINABLE)
        return super().train(mode)

    def to_dense(self) -> Tensor:
        """The weight [..., out, in]. Raises ValueError that names the first row, counted through all experts,
        whose positions do not ascend."""
        rows = unpack24(self.values.flatten(0, -2), self.positions.flatten(0, -2))
        return rows.unflatten(0, self.values.shape[:-1])


def in_dtype_of(values: Tensor, x: Tensor) -> Tensor:
    """x, under autocast in the dtype of `values`."""
    autocast = x.dtype != values.dtype and torch.is_autocast_enabled(x.device.type)
    return x.to(values.dtype) if autocast else x


class SparseLinear(PackedWeight):
    """y = x Wᵀ + b with a 2:4 weight W [out, in], for inference. It replaces a pruned nn.Linear.

    values: [out, in/2] in bf16, fp16 or fp32. positions: uint8 [out, in/8].
    bias: [out] or None, a frozen parameter too.
    """

    bias: nn.Parameter | None
    compressed: Tensor | None

    def __init__(self, values: Tensor, positions: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(values, positions)
        self.out_features, self.in_features = values.shape[0], 2 * values.shape[1]
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.keeps_compressed = False
        self.register_buffer("compressed", None, persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "SparseLinear":
        """A packed copy of `linear`. Raises ValueError that names the first row that is not 2:4."""
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(*pack24(linear.weight.detach()), bias)

    @classmethod
    def like(cls, linear: nn.Linear) -> "SparseLinear":
        """An uninitialised SparseLinear with the sizes, dtype and device of `linear`."""
        weight, bias = linear.weight.detach(), linear.bias
        out, columns = weight.shape
        positions = weight.new_empty(out, columns // 8, dtype=torch.uint8)
        return cls(weight.new_empty(out, columns // 2), positions, None if bias is None else bias.detach())

    def compress(self) -> None:
        """Keeps the compressed form of the weight, which is cuSPARSELt's own, beside the packed form.

        A GPU computes products of many tokens faster with it. It takes about as many bytes as the packed
        form. It is not saved. When the module moves or loads weights, it is computed again. `compressed`
        stays None if cuSPARSELt does not support the weight, as on the CPU.

        Raises UserError for a GPU for which drot was not built: transformers has moved a weight there, and
        no other part of drot has met the GPU before.
        """
        self.keeps_compressed, self.compressed = True, None
        if is_gpu(self.values.device):
            check_gpu(self.values.device, kernels=True)
            if self.values.dtype in PACKABLE_DTYPES:  # not after `.double()`, before the next cast
                compressed = sparse24_compress(self.values, self.positions)
                self.compressed = compressed if compressed.numel() else None

    def drop_compressed(self) -> None:
        """Undoes `compress`: frees the compressed form."""
        self.keeps_compressed, self.compressed = False, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.compressed = None
        super()._apply(fn, recurse)
        if self.keeps_compressed:
            self.compress()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.keeps_compressed:
            self.compress()

    def to_linear(self) -> nn.Linear:
        """The dense nn.Linear. Raises ValueError that names the first row whose positions do not ascend."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.to_dense(), requires_grad=False)
        linear.register_parameter("bias", self.bias)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], both in the dtype of values. Under autocast, x is cast to it."""
        # the dictionary saves 4 us of about 20, compared with access to the parameters as attributes
        parameters: Any = self._parameters
        values = parameters["values"]
        return sparse24_linear(
            in_dtype_of(values, x),
            values,
            parameters["positions"],
            parameters["bias"],
            compressed=self._buffers["compressed"],
        )

    def extra_repr(self) -> str:
        # peft prints this text when it refuses to add an adapter, and print(model) for every linear
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, 2:4; to train: dequantize()"


def packed_weights(model: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
    """The name and the module of each PackedWeight of `model`, those of experts among them."""
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            yield name, module


def packed_linears(model: nn.Module) -> Iterator[tuple[str, SparseLinear]]:
    """The name and the module of each SparseLinear of `model`."""
    for name, module in packed_weights(model):
        if isinstance(module, SparseLinear):
            yield name, module


def is_packed(model: nn.Module) -> bool:
    """Whether `model` has a PackedWeight."""
    return any(True for _ in packed_weights(model))
