"""The quantizer with which transformers' `from_pretrained` opens packed and rotated checkpoints."""

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer

from drot.checkpoint.keep import keep_files
from drot.checkpoint.load import check_files
from drot.checkpoint.source import read_headers
from drot.core.errors import UserError
from drot.model.boundary import (
    NORM_PREFIX,
    add_boundary_rotation,
    apply_boundary_rotation,
    check_boundary_rotations,
    rotated_layers,
    rotation_place,
)
from drot.model.families import architecture_of, decoder_layers
from drot.sparse.fused import unfuse
from drot.sparse.linear import NOT_TRAINABLE, packed_linears
from drot.sparse.packed import check_packed, compress_model, expect_packed, unpack_model
from drot.sparse.quantization_config import QUANT_METHOD, DrotConfig, quantization_config_of
from drot.sparse.stored_config import write_stored_form

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
            # a file of an older version of drot has the stock name of each norm
            apply = checkpoint_files is None or any(
                NORM_PREFIX in name for name in read_headers(checkpoint_files)
            )
            for layer in rotated_layers(decoder_layers(model, arch), place):
                weight = next(layer.parameters())
                add_boundary_rotation(
                    layer, arch, place, hidden, dtype=weight.dtype, device=weight.device, apply=apply
                )
        if self.quantization_config.packed:
            expect_packed(model, self.quantization_config.dense_linears)
        if checkpoint_files is not None:  # None if the caller gave a state dict
            check_files(model, checkpoint_files)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        arch = architecture_of(model.config)
        if (place := self.quantization_config.boundary) is not None:
            for layer in rotated_layers(decoder_layers(model, arch), place):
                apply_boundary_rotation(layer, arch, place)  # in a file of an older version of drot
        check_packed(model)
        check_boundary_rotations(decoder_layers(model, arch), arch.layers)
        # transformers makes every floating-point parameter trainable
        for _, linear in packed_linears(model):
            linear.requires_grad_(False)
        compress_model(model)  # has no effect on a CPU, until the model moves to a GPU
        for layer in decoder_layers(model, arch):
            if rotation_place(layer) is not None:
                layer.residual_rotation.requires_grad_(False)
        # transformers refuses .half() and the like for a quantized model, which a rotated dense model is not
        model.is_quantized = self.quantization_config.packed
        write_stored_form(model.config)  # the file may be of an older version of drot, with the stock form
        keep_files(model, model.name_or_path)
        return model

    def dequantize(self, model: Any, dtype: Any = None) -> Any:
        """Makes packed linears dense, in place, and returns the model.

        Rotations stay, and so does their entry in the config, which transformers' own method would remove.

        dtype: the dtype of the result. None leaves the dtype as it is.
        """
        unfuse(model)
        packed = [name for name, _ in packed_linears(model)]
        unpack_model(model)
        # as trainable as the other weights: from_pretrained makes them trainable, drot.load freezes them
        trainable = model.get_input_embeddings().weight.requires_grad
        for name in packed:
            model.get_submodule(name).requires_grad_(trainable)
        self.quantization_config = DrotConfig(**quantization_config_of(model.config))
        model.is_quantized = False
        return model if dtype is None else model.to(dtype)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Read by transformers' Trainer. Raises UserError if the model is packed.

        For False, the Trainer would advise adapters, which peft cannot add to packed linears.
        """
        if self.quantization_config.packed:
            raise UserError(NOT_TRAINABLE)
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Read by transformers' Trainer."""
        return self.is_trainable

    @property
    def is_compileable(self) -> bool:
        return True
