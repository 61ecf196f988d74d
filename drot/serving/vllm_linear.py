"""Packed 2:4 linears in vLLM: the quantisation config `drot` and its linear method.

A packed checkpoint names `<linear>.values` and `<linear>.positions` (drot/sparse/packed.py). Both tensors
have one row for each output, and their columns divide with the inputs. So vLLM's loaders stack them (q, k and
v; gate and up) and divide them among tensor-parallel ranks as they do with a dense weight.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from drot.checkpoint.quantization_config import QUANT_METHOD, DrotConfig
from drot.core.errors import UserError
from drot.machine.devices import check_gpu, is_gpu
from drot.ops import sparse24_compress, sparse24_linear
from drot.sparse.packed import DTYPES, check_packed_tensors

#: The inputs of a rank's linear must be a multiple of it, as the kernel for few tokens (csrc/ops/cuda/
#: sparse24_skinny.cuh) takes; with other inputs each product would unpack the weight.
INPUTS = 64
#: The outputs of a rank's linear must be a multiple of it, as cuSPARSELt takes.
OUTPUTS = 32


@register_quantization_config(QUANT_METHOD)
class DrotQuantization(QuantizationConfig):
    """`quantization_config` of a checkpoint that drot wrote, for vLLM. `drot` holds its keys.

    It says which linears are packed. The rotations are those of the model (drot/serving/vllm_models.py).
    """

    def __init__(self, drot: DrotConfig) -> None:
        super().__init__()
        self.drot = drot

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has the keys

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DrotQuantization":
        """Raises UserError for a key or value that this version of drot does not know."""
        return cls(DrotConfig(**config))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """The method for the linear `prefix`; None for a module that is no linear, such as lm_head.

        Raises UserError for a linear of vLLM of which drot left only a part dense.
        """
        if not isinstance(layer, LinearBase):
            return None
        return DrotLinearMethod(prefix) if self._is_packed(prefix) else UnquantizedLinearMethod()

    def _is_packed(self, prefix: str) -> bool:
        path, _, name = prefix.removeprefix("model.").rpartition(".")
        parts = [f"{path}.{part}" for part in self.packed_modules_mapping.get(name, [name])]
        dense = [part for part in parts if part in self.drot.dense_linears]
        if dense and len(dense) < len(parts):
            raise UserError(
                f"vLLM computes {', '.join(parts)} as one product, and drot packed only some of them: keep "
                "all or none of them dense, or serve this checkpoint by `drot serve`"
            )
        return self.drot.packed and not dense


@register_weight_loader_v2_supported_method
class DrotLinearMethod(LinearMethodBase):
    """y = x Wᵀ + b with a packed 2:4 weight W, by drot's op. prefix: the name of the linear, for messages."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Declares values [out, in/2] in `params_dtype` and positions uint8 [out, in/8] of this rank.

        Raises UserError if the kernels do not take the rank's share of the inputs or outputs.
        """
        inputs, outputs = input_size_per_partition, sum(output_partition_sizes)
        for what, size, multiple in (("inputs", inputs, INPUTS), ("outputs", outputs, OUTPUTS)):
            if size % multiple:
                raise UserError(
                    f"{self.prefix}: the {what} of a packed linear on each tensor-parallel rank must be a "
                    f"multiple of {multiple}, got {size}: take fewer ranks, or serve the dense checkpoint"
                )
        loader = extra_weight_attrs.pop("weight_loader")
        for name, columns, dtype in (
            ("values", inputs // 2, params_dtype),
            ("positions", inputs // 8, torch.uint8),
        ):
            data = torch.empty(outputs, columns, dtype=dtype)
            parameter = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra_weight_attrs)
            if name == "positions":  # those of `--load-format dummy`: random bits are no positions
                set_weight_attrs(parameter, {"dummy_weight_value": 0b0100_0100})

    @torch.no_grad()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks the weight, and makes the compressed form that a GPU takes for many tokens.

        Raises UserError for a damaged weight, and for a GPU for which drot was not built.
        """
        values, positions = (
            nn.Parameter(w.data, requires_grad=False) for w in (layer.values, layer.positions)
        )
        layer.values, layer.positions = values, positions  # without vLLM's loaders
        check_packed_tensors(self.prefix, values, positions)
        if is_gpu(values.device):
            check_gpu(values.device, packed=True)
        compressed = sparse24_compress(values, positions)
        layer.register_buffer("compressed", compressed if compressed.numel() else None, persistent=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out], both in the dtype of values."""
        return sparse24_linear(x, layer.values, layer.positions, bias, compressed=layer.compressed)
