"""Models whose pruned linears are packed: made from dense ones, from files, and turned back.

A packed checkpoint holds `<linear>.values` and `<linear>.positions` in place of the `<linear>.weight`
of all seven linears of every decoder layer, and its config.json says so; the rest is as it was.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.architectures import Architecture, architecture_of, decoder_layers, layer_linears, module_at
from drot.config import Sparsity
from drot.errors import UserError
from drot.sparse.fused import unfuse
from drot.sparse.linear import SparseLinear
from drot.surgery.residual import rotation_config

LAYOUTS = ("dense", "packed")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_layout(layout: str, sparsity: Sparsity | None = None) -> None:
    """Raises UserError for a layout that does not exist, or that the sparsity does not allow."""
    if layout not in LAYOUTS:
        raise UserError(f"--format must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    if layout == "packed" and sparsity is not None and (sparsity.n, sparsity.m) != (2, 4):
        raise UserError(f"--format packed needs --sparsity 2:4; got {sparsity}")


def check_packable(model: PreTrainedModel) -> None:
    """Raises UserError where a linear's dtype or number of inputs does not go into the packed layout."""
    arch = architecture_of(model.config)
    for index, layer in enumerate(decoder_layers(model, arch)):
        for role, linear in layer_linears(layer, arch).items():
            if linear.in_features % 8:
                raise UserError(
                    f"layer {index}, {role}: the packed format needs a multiple of 8 inputs, "
                    f"got {linear.in_features}: use --format dense"
                )
            if linear.weight.dtype not in DTYPES:
                raise UserError(
                    f"layer {index}, {role}: the packed format needs bfloat16, float16 or float32, "
                    f"got {str(linear.weight.dtype).removeprefix('torch.')}: name another --dtype"
                )


def packed_linears(model: nn.Module) -> Iterator[tuple[str, SparseLinear]]:
    """Names and modules of everything that is packed."""
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear):
            yield name, module


def is_packed(model: nn.Module) -> bool:
    return any(True for _ in packed_linears(model))


def compress_model(model: nn.Module) -> None:
    """`SparseLinear.compress` of all that is packed."""
    for _, linear in packed_linears(model):
        if linear.compressed is None:
            linear.compress()


# ---- from dense and back -------------------------------------------------------------------------


@torch.no_grad()
def pack_model(model: PreTrainedModel) -> None:
    """Packs the seven linears of every decoder layer, in place, one after the other.

    Raises UserError that names layer, linear and row where one is not 2:4; layers before it are then packed.
    """
    check_packable(model)
    arch = architecture_of(model.config)
    for index, layer in enumerate(decoder_layers(model, arch)):
        for role, linear in layer_linears(layer, arch).items():
            try:
                packed = SparseLinear.from_linear(linear)
            except ValueError as error:
                raise UserError(f"layer {index}, {role}: {error}: prune with --sparsity 2:4 first") from None
            layer.set_submodule(dict(arch.linears)[role], packed)
    _describe(model, arch)


@torch.no_grad()
def unpack_model(model: PreTrainedModel) -> None:
    """The inverse of `pack_model`, in place: plain nn.Linears with the zeros written out."""
    unfuse(model)
    arch = architecture_of(model.config)
    for layer in decoder_layers(model, arch):
        for _, path in arch.linears:
            layer.set_submodule(path, module_at(layer, path).to_linear())
    _describe(model, arch)


def _describe(model: PreTrainedModel, arch: Architecture) -> None:
    """Makes config.json say what the modules are; nothing where any engine can open them."""
    special = rotation_config(decoder_layers(model, arch)) | ({"packed": True} if is_packed(model) else {})
    if special:
        model.config.quantization_config = {"quant_method": "drot", **special}
    elif (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
    elif hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def describe_layout(model: PreTrainedModel) -> dict[str, Any]:
    """What the manifest says of the layout; a stock architecture opens without drot."""
    return {
        "format": "packed" if is_packed(model) else "dense",
        "stock_architecture": not hasattr(model.config, "quantization_config"),
    }


# ---- from files ----------------------------------------------------------------------------------


def expect_packed(model: PreTrainedModel) -> None:
    """Puts uninitialised SparseLinears into an empty model, so that packed weights can be read into it."""
    check_packable(model)
    arch = architecture_of(model.config)
    for layer in decoder_layers(model, arch):
        for role, linear in layer_linears(layer, arch).items():
            layer.set_submodule(dict(arch.linears)[role], SparseLinear.like(linear))


def check_files(model: PreTrainedModel, files: Sequence[str]) -> None:
    """Checks, by the headers of safetensors files, that all tensors of embedding, layers and norms are there
    and whole.

    Raises UserError, naming file or tensor, for a truncated file, a missing tensor, or a wrong shape or
    dtype: transformers itself would fill in random numbers, or cast, for some of them.
    """
    found: dict[str, tuple[list[int], str]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for key in handle.keys():  # noqa: SIM118
                    tensor = handle.get_slice(key)
                    found[key] = tensor.get_shape(), tensor.get_dtype()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is cut off or no safetensors file ({error}): copy it again") from None
    for key, tensor in model.state_dict().items():
        if not key.startswith(f"{model.base_model_prefix}."):
            continue  # lm_head may be the embedding, and other heads be yet to train
        if key not in found:
            raise UserError(f"{key} is missing from the checkpoint: convert or copy it again")
        shape, dtype = found[key]
        if shape != list(tensor.shape):
            raise UserError(f"{key} must be {list(tensor.shape)} by the model's config, got {shape}")
        kinds = ("U8",) if tensor.dtype == torch.uint8 else ("BF16", "F16", "F32")
        if dtype not in kinds:
            raise UserError(f"{key} must be of dtype {' or '.join(kinds)}, got {dtype}")


@torch.no_grad()
def check_positions(model: nn.Module) -> None:
    """Raises UserError, naming tensor and row, where two positions of a group do not ascend."""
    for name, module in packed_linears(model):
        positions = module.positions
        if positions.is_meta:
            continue  # offloaded to disk, read when it is used
        ascend = _ascends(positions, 0) & _ascends(positions, 4)
        if not bool(ascend.all()):
            row = int((~ascend).any(1).nonzero()[0])
            raise UserError(
                f"{name}.positions: two positions of a group of 4 are equal or out of order in row {row}: "
                "the file is damaged, copy or convert it again"
            )


def _ascends(positions: Tensor, shift: int) -> Tensor:
    """For each byte, whether the pair of two-bit positions from bit `shift` ascends."""
    return ((positions >> shift) & 3) < ((positions >> (shift + 2)) & 3)
