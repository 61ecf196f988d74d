"""Packed 2:4 linears in SGLang: the quantisation config `drot` and its linear method (packed_linear.py).

SGLang ignores a tensor that a checkpoint lacks. So a packed tensor starts with rows that no checkpoint has:
values of NaN, and positions 0, which do not ascend. A row that is still so was not loaded.
"""

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.parameter import ModelWeightParameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import nn

from drot.checkpoint.quantization_config import DrotConfig
from drot.core.errors import UserError
from drot.serving.packed_linear import PackedConfig, PackedLinearMethod

#: what SGLang's own classes stack, which do not all have such a mapping
STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
#: what SGLang adds to the keys of `quantization_config`
ADDED = ("packed_modules_mapping", "hf_config")


class SglangQuantization(PackedConfig, QuantizationConfig):
    """`quantization_config` of a checkpoint that drot wrote, for SGLang. `drot` holds its keys.

    stacked: a linear of the model → the linears of the checkpoint that it stacks.
    """

    engine = "SGLang"
    stacked = STACKED

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SglangQuantization":
        """config: the keys, with those that SGLang adds.

        Raises UserError for a key or value that this version of drot does not know.
        """
        return cls(DrotConfig(**{key: value for key, value in config.items() if key not in ADDED}))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """The method for the linear `prefix`; None for a module that is no linear, such as lm_head.

        Raises UserError for a linear of SGLang of which drot left only a part dense.
        """
        if not isinstance(layer, LinearBase):
            return None
        parts = self.parts_of(prefix, self.stacked)
        return SglangLinearMethod(prefix, parts) if parts else UnquantizedLinearMethod()

    def get_scaled_act_names(self) -> list[str]:
        return []


class SglangLinearMethod(PackedLinearMethod, LinearMethodBase):
    """parts: the names in the checkpoint of the linears that `prefix` stacks, or of the one that it is."""

    parameter = ModelWeightParameter

    def __init__(self, prefix: str, parts: list[str]) -> None:
        super().__init__(prefix)
        self.parts = parts

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """As PackedLinearMethod, with rows that no checkpoint has."""
        super().create_weights(layer, *args, **kwargs)
        layer.values.data.fill_(torch.nan)
        layer.positions.data.zero_()

    def process_weights_after_loading(self, layer: Any) -> None:
        """As PackedLinearMethod. Raises UserError also for a tensor that the checkpoint lacks."""
        sizes = layer.output_partition_sizes if len(self.parts) > 1 else [len(layer.values)]
        for name, unloaded in (("values", layer.values.isnan()), ("positions", layer.positions == 0)):
            for part, rows in zip(self.parts, unloaded.split(sizes), strict=True):
                if rows.all():
                    raise UserError(
                        f"the checkpoint lacks model.{part}.{name}: it is incomplete; copy it again"
                    )
        super().process_weights_after_loading(layer)
