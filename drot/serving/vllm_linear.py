"""Packed 2:4 linears in vLLM: the quantisation config `drot` and its linear method (packed_linear.py)."""

from typing import Any

from torch import nn
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
from drot.serving.packed_linear import PackedConfig, PackedLinearMethod
from drot.serving.shares import DUMMY_POSITIONS


@register_quantization_config(QUANT_METHOD)
class VllmQuantization(PackedConfig, QuantizationConfig):
    """`quantization_config` of a checkpoint that drot wrote, for vLLM. `drot` holds its keys.

    It says which linears are packed. The rotations are those of the model (vllm_models.py,
    vllm_transformers.py).
    """

    engine = "vLLM"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "VllmQuantization":
        """Raises UserError for a key or value that this version of drot does not know."""
        return cls(DrotConfig(**config))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """The method for the linear `prefix`; None for a module that is no linear, such as lm_head.

        Raises UserError for a linear of vLLM of which drot left only a part dense.
        """
        if not isinstance(layer, LinearBase):
            return None
        packed = self.parts_of(prefix, self.packed_modules_mapping)
        return VllmLinearMethod(prefix) if packed else UnquantizedLinearMethod()


@register_weight_loader_v2_supported_method
class VllmLinearMethod(PackedLinearMethod, LinearMethodBase):
    parameter = ModelWeightParameter

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """As PackedLinearMethod, with positions for `--load-format dummy`."""
        super().create_weights(layer, *args, **kwargs)
        set_weight_attrs(layer.positions, {"dummy_weight_value": DUMMY_POSITIONS})

    def process_weights_after_loading(self, layer: Any) -> None:
        """As PackedLinearMethod. Latent attention then finds that the weight is packed, and asks `apply` for
        it."""
        super().process_weights_after_loading(layer)
        object.__setattr__(layer, "weight_packed", layer.values)  # not as a second parameter
