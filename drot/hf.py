"""Registers drot with transformers, so that `from_pretrained` opens packed checkpoints and such with
residual rotations.

Their config.json says `quantization_config: {"quant_method": "drot", ...}`; dense weights with a shared
rotation, or none, need nothing of this and load anywhere.
"""

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from drot.architectures import architecture_of, decoder_layers
from drot.errors import UserError
from drot.sparse.packed import check_files, check_positions, expect_packed, packed_linears, unpack_model
from drot.surgery.residual import add_residual_rotation

QUANT_METHOD = "drot"


@register_quantization_config(QUANT_METHOD)
class DrotConfig(QuantizationConfigMixin):
    """residual_rotation: there is a stored matrix [d, d] between neighbouring layers; down_basis `own`:
    every layer but the first multiplies its input by it; `next`: every layer but the last multiplies the
    residual beside its MLP (drot/surgery/residual.py). packed: the decoder layers' linears are stored as
    values and positions (drot/sparse/packed.py).

    UserError for anything else, which a later drot may write.
    """

    def __init__(
        self, residual_rotation: bool = False, down_basis: str = "own", packed: bool = False, **kwargs: Any
    ) -> None:
        if unknown := sorted(kwargs.keys() - {"quant_method"}):
            raise UserError(
                f"config.json asks for {', '.join(unknown)}, which this version does not know: update drot"
            )
        if down_basis not in ("own", "next"):
            raise UserError(f"config.json: down_basis must be own or next, got {down_basis!r}: update drot")
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # transformers' enum is its own methods
        self.residual_rotation, self.down_basis, self.packed = residual_rotation, down_basis, packed


@register_quantizer(QUANT_METHOD)
class DrotQuantizer(HfQuantizer):
    """Puts residual rotations and packed linears into the empty model before its weights are read, so
    that no dense weight is ever made."""

    requires_calibration = True
    quantization_config: DrotConfig

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        if not hasattr(model, model.base_model_prefix):
            raise UserError(
                f"a checkpoint of drot opens as a whole model, got {type(model).__name__}: "
                "use AutoModelForCausalLM"
            )
        if self.quantization_config.residual_rotation:
            arch = architecture_of(model.config)
            inside = arch if self.quantization_config.down_basis == "next" else None
            layers = decoder_layers(model, arch)
            for layer in layers[:-1] if inside else layers[1:]:
                weight = next(layer.parameters())
                add_residual_rotation(
                    layer, model.config.hidden_size, dtype=weight.dtype, device=weight.device, inside=inside
                )
        if self.quantization_config.packed:
            expect_packed(model)
        if checkpoint_files is not None:  # None: the caller brought a state dict
            check_files(model, checkpoint_files)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for _, linear in packed_linears(model):
            linear.requires_grad_(False)  # transformers makes every floating-point parameter trainable
        check_positions(model)
        model.is_quantized = self.quantization_config.packed  # else .half() and the like were refused
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        unpack_model(model)
        return model if dtype is None else model.to(dtype)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return not self.quantization_config.packed

    @property
    def is_qat_trainable(self) -> bool:
        """What transformers' Trainer asks."""
        return self.is_trainable

    @property
    def is_compileable(self) -> bool:
        return True
