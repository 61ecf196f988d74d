"""Registers drot with transformers, so that `from_pretrained` opens checkpoints with residual rotations.

Such a checkpoint's config.json says `quantization_config: {"quant_method": "drot", ...}`; a shared
rotation, or none, needs nothing of this and loads anywhere.
"""

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from drot.architectures import architecture_of, decoder_layers
from drot.surgery.residual import add_residual_rotation

QUANT_METHOD = "drot"


@register_quantization_config(QUANT_METHOD)
class DrotConfig(QuantizationConfigMixin):
    """residual_rotation: every layer but the first multiplies its input by a stored matrix [d, d]."""

    def __init__(self, residual_rotation: bool = False, **kwargs: Any) -> None:
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # transformers' enum is its own methods
        self.residual_rotation = residual_rotation


@register_quantizer(QUANT_METHOD)
class DrotQuantizer(HfQuantizer):
    """Puts the residual rotations into the empty model before its weights are read."""

    requires_calibration = True
    quantization_config: DrotConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.quantization_config.residual_rotation:
            arch = architecture_of(model.config)
            for layer in decoder_layers(model, arch)[1:]:
                weight = next(layer.parameters())
                add_residual_rotation(
                    layer, model.config.hidden_size, dtype=weight.dtype, device=weight.device
                )
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True
