"""The tensors that a checkpoint would have if it were only rotated, computed from the dense model in fp64.

An artifact stores how the checkpoint differs from these tensors. Two machines may add the terms of a product
in another order, so their fp64 products differ in the last places. `Prediction.tolerance` bounds that.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drot.checkpoint.offload import open_skeleton
from drot.checkpoint.opening import load_config, refuse_multimodal
from drot.checkpoint.quantization_config import quantization_config_of
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent
from drot.model.decoder import DecoderModel, rotated_shift
from drot.model.families import family_of
from drot.model.linear import module_at, scale_of
from drot.model.rotation import Bases, LayerRotation

#: The elements of a piece, so that only a part of a large tensor is in fp64 at a time.
PIECE = 2**24
#: A sum of n products in fp64 is wrong by at most n · UNIT times the product of the norms. GUARD is for the
#: sums of v_proj and o_proj, which have two products one after the other, and for two machines; GUARD_OF_ENDS
#: for embedding and head, which have one product.
UNIT, GUARD, GUARD_OF_ENDS = 2.0**-53, 64, 8


@dataclass(frozen=True)
class Prediction:
    """One tensor of the rotated dense model.

    name: its name in the model's state dict.
    pieces: the tensor in fp64, split along its first dimension into pieces of at most PIECE elements. A
        number, of no dimension, is a piece of one element.
    tolerance: by how much an element may differ on another machine. 0 if no product is computed.
    """

    name: str
    pieces: Iterator[Tensor]
    tolerance: float


def open_source(name: str | Path) -> DecoderModel:
    """The dense model `name` in the dtype of its files, from which each layer is read when its turn comes.

    Raises UserError for a packed model.
    """
    config = load_config(name)
    if quantization_config_of(config):
        raise UserError(f"{name} is quantised, packed or rotated: name the dense `model`")
    refuse_multimodal(name, "share the checkpoint, no artifact can hold it")
    if family_of(config).experts is not None:
        raise UserError(f"{name} is a mixture of experts, which no artifact can hold: share the checkpoint")
    model, weights, _ = open_skeleton(name)
    return DecoderModel(model, weights=weights)


def rows_of_a_piece(shape: torch.Size) -> int:
    """The number of rows of a piece of a tensor of `shape`."""
    return max(1, PIECE // max(1, shape[1:].numel()))


@torch.no_grad()
def predictions(
    decoder: DecoderModel,
    rotations: Mapping[int, LayerRotation] | None,
    bases: Bases,
    phase: str,
    progress: Progress,
) -> Iterator[Prediction]:
    """All tensors of the rotated model, one layer after the other. The model is not changed.

    The pieces of a prediction can be asked for until the next prediction is.

    decoder: the dense model.
    rotations: the rotation of each layer; None predicts the dense model itself.
    bases: which layers of the checkpoint hold a rotation.
    phase: of the events that `progress` gets, one for each layer.
    """
    family = decoder.family
    with decoder.in_memory(*decoder.ends):
        for end in _of_ends(decoder, rotations):
            yield dataclasses.replace(end, name=family.in_files(end.name))
    for dense in decoder.loaded_layers():
        progress(ProgressEvent(phase=phase, layer=dense.index, layers=len(decoder.layers)))
        layer, prefix = dense.copy(dtype=torch.float64), f"{family.in_files(family.layers)}.{dense.index}"
        if rotations is not None:
            boundary = bases.held(layer.index, rotations)
            layer.rotate(rotations[layer.index], bases.merged(layer.index, rotations))
            if bases.place == "input" and boundary is not None:
                layer.hold(boundary)
        for name, tensor in layer.module.state_dict().items():
            tolerance = 0.0 if rotations is None else _tolerance(tensor)
            yield Prediction(f"{prefix}.{family.name_in_files(name)}", _split(tensor), tolerance)
        del layer, tensor  # before the copy of the next layer


def _of_ends(decoder: DecoderModel, rotations: Mapping[int, LayerRotation] | None) -> Iterator[Prediction]:
    """The predictions of the tensors outside of the layers, with the names of the model."""
    family = decoder.family
    rotates = rotations is not None and family.rotates_stream
    of_norm = [f"{family.final_norm}.{name}" for name, _ in decoder.final_norm.named_parameters()]
    ends = {*of_norm, *(f"{path}.weight" for path in decoder.ends)}
    for name, tensor in decoder.model.state_dict().items():
        if name.startswith(f"{family.layers}."):
            continue
        if not rotates or name not in ends:
            yield Prediction(name, _split(tensor), 0.0)
    if rotations is not None and rotates:
        norm, head, scale = decoder.final_norm, decoder.head.weight, scale_of(decoder.final_norm, family)
        first, last = (rotations[index].r1.double() for index in (0, len(decoder.layers) - 1))
        reset = torch.full_like(norm.weight, 1.0 - family.norm_offset)
        yield Prediction(f"{family.final_norm}.weight", _split(reset), 0.0)
        if (shift := rotated_shift(norm, family, last)) is not None:
            yield Prediction(f"{family.final_norm}.bias", _split(shift), _tolerance(shift))
        for path in family.embeddings:
            rows = module_at(decoder.model, path).weight
            yield Prediction(f"{path}.weight", (part @ first for part in _split(rows)), _of_rows(rows))
        yield Prediction(
            f"{family.head}.weight",
            ((rows.double() * scale) @ last for rows in _split(head)),
            _of_rows(head) * float(scale.abs().max()),
        )


def _split(tensor: Tensor) -> Iterator[Tensor]:
    tensor = torch.atleast_1d(tensor.detach())
    for rows in tensor.split(rows_of_a_piece(tensor.shape)):
        yield rows.double()


def _tolerance(tensor: Tensor) -> float:
    """GUARD · n · UNIT · the largest norm of a row or a column, which a rotation does not change."""
    matrix = tensor.detach() if tensor.dim() == 2 else tensor.detach().reshape(1, -1)
    norms = [torch.linalg.vector_norm(matrix, dim=dim, dtype=torch.float64).max() for dim in (0, 1)]
    return float(max(norms)) * max(matrix.shape) * UNIT * GUARD


def _of_rows(matrix: Tensor) -> float:
    """GUARD_OF_ENDS · n · UNIT · the largest norm of a row, for a product of the rows with a rotation.

    With the norms of the columns, as long as the vocabulary, most elements of an fp32 embedding would be too
    small beside the tolerance: the artifact would hold them whole.
    """
    norms = torch.linalg.vector_norm(matrix.detach(), dim=1, dtype=torch.float64)
    return float(norms.max()) * matrix.shape[1] * UNIT * GUARD_OF_ENDS
