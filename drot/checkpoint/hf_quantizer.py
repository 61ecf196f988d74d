"""The quantizer with which transformers' `from_pretrained` opens packed and rotated checkpoints."""

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer

from drot.architectures import architecture_of, decoder_layers
from drot.checkpoint.load import check_files
from drot.devices import parse_dtype
from drot.errors import UserError
from drot.sparse.linear import packed_linears
from drot.sparse.packed import check_positions, expect_packed, unpack_model
from drot.sparse.quantization_config import QUANT_METHOD, DrotConfig
from drot.sparse.stored_config import write_stored_form
from drot.surgery.boundary import add_boundary_rotation, rotated_layers

register_quantization_config(QUANT_METHOD)(DrotConfig)


@register_quantizer(QUANT_METHOD)
class DrotQuantizer(HfQuantizer):
    """Adds the boundary rotations and the packed linears to the empty model before weights are loaded.

    The packed weights are loaded as they are: no dense weight is allocated.
    """

    requires_calibration = True
    quantization_config: DrotConfig

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        if not hasattr(model, model.base_model_prefix):
            raise UserError(
                f"a checkpoint that drot wrote must be opened with its language model head, "
                f"got {type(model).__name__}: use AutoModelForCausalLM"
            )
        if (place := self.quantization_config.boundary) is not None:
            arch, hidden = architecture_of(model.config), model.config.hidden_size
            for layer in rotated_layers(decoder_layers(model, arch), place):
                weight = next(layer.parameters())
                add_boundary_rotation(layer, arch, place, hidden, dtype=weight.dtype, device=weight.device)
        if self.quantization_config.packed:
            expect_packed(model, self.quantization_config.dense_linears)
        if checkpoint_files is not None:  # None if the caller gave a state dict
            check_files(model, checkpoint_files)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for _, linear in packed_linears(model):
            linear.requires_grad_(False)  # transformers makes every floating-point parameter trainable
        check_positions(model)
        # transformers refuses .half() and the like for a quantized model, which a rotated dense model is not
        model.is_quantized = self.quantization_config.packed
        write_stored_form(model.config)  # the file may be of an older version of drot, with the stock form
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        unpack_model(model)
        if isinstance(dtype, str):  # save_pretrained has replaced the dtype in the config by its name
            dtype = parse_dtype(dtype)
        return model if dtype is None else model.to(dtype)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return not self.quantization_config.packed

    @property
    def is_qat_trainable(self) -> bool:
        """Read by transformers' Trainer."""
        return self.is_trainable

    @property
    def is_compileable(self) -> bool:
        return True
