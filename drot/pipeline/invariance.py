"""Checks that a rotated model has the outputs of the original model on calibration tokens.

The checks run in fp32, one layer at a time, before anything is pruned. `check_model` uses the trained
rotations if all of them are known before the pruning starts. Otherwise it uses random rotations, and
`check_layer` checks each layer again when its rotation is trained.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from drot.calibration.stream import CalibrationStream
from drot.config import BoundaryPlace
from drot.core.errors import UserError
from drot.model.boundary import BoundaryRotation
from drot.model.families import Architecture, HeadShape, decoder_layers, module_at
from drot.model.rotate import LayerRotation, rotate_ends, rotate_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Largest accepted error ‖rotated − original‖ / ‖original‖, in fp32.
TOLERANCE = 1e-4


class InvarianceError(RuntimeError):
    """A rotation changed the model's outputs. This is a fault of drot and stops the run."""


def random_rotation(
    d: int, shape: HeadShape, generator: torch.Generator, device: torch.device | str = "cpu"
) -> LayerRotation:
    """Random orthogonal R1 [d, d] and R2 [kv_heads, head_dim, head_dim], in fp64 on `device`.

    The matrices are QR factors of Gaussian matrices that are drawn on the CPU.
    """

    def draw(*size: int) -> Tensor:
        gaussian = torch.randn(*size, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(gaussian.to(device))[0]

    return LayerRotation(draw(d, d), draw(shape.kv_heads, shape.head_dim, shape.head_dim))


def _random_rotations(count: int, d: int, shape: HeadShape, device: torch.device) -> Iterator[LayerRotation]:
    """`count` random rotations, the same at every call. They are drawn one by one, to save memory."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield random_rotation(d, shape, generator, device)


def _check_finite(hidden_states: Tensor, index: int) -> None:
    """Raises UserError if the norm of the outputs of layer `index` of the original model is not finite."""
    norm = float(hidden_states.norm())
    if not math.isfinite(norm):
        raise UserError(
            f"layer {index}: the model's outputs on the calibration text must have a finite norm, got {norm} "
            "in fp32: the weights are damaged; copy the model again"
        )


@torch.no_grad()
def check_outputs(model: "PreTrainedModel", arch: Architecture, tokens: Tensor, device: torch.device) -> None:
    """Raises UserError if a layer's outputs on `tokens` [1, seqlen] are not finite in fp32.

    `check_model` checks the same for a model that is rotated. `model` is not changed.
    """
    stream = CalibrationStream.embed(model, arch, tokens, device)
    stream.hidden_states = stream.hidden_states.float()
    for index, layer in enumerate(decoder_layers(model, arch)):
        stream.advance(_float_copy(layer, device), index)
        _check_finite(stream.hidden_states, index)


def _relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))


def _float_copy(module: nn.Module, device: torch.device) -> nn.Module:
    return copy.deepcopy(module).to(device=device, dtype=torch.float32)


@torch.no_grad()
def check_layer(
    layer: nn.Module,
    index: int,
    stream: CalibrationStream,
    arch: Architecture,
    shape: HeadShape,
    rotation: LayerRotation,
    rotated_stream: CalibrationStream | None = None,
    boundary: BoundaryRotation | None = None,
) -> float:
    """Relative error, in fp32, of the rotated layer's output on `stream`. `layer` is not changed.

    Raises InvarianceError if the error is above TOLERANCE, and UserError if the original output is not
    finite.

    Args:
        layer: a decoder layer.
        index: number of the layer.
        stream: input of the layer; afterwards its output.
        arch: family of the model.
        shape: attention sizes of the model.
        rotation: R1 and R2 of the layer.
        rotated_stream: input of the rotated layer, in the basis R1; afterwards its output. None computes it
            from `stream`.
        boundary: the rotation of the residual that the rotated layer holds, after which `rotated_stream` is
            in the basis next_r1. None if the layer holds no such rotation.
    """
    device = stream.hidden_states.device
    r1 = rotation.r1.to(device)
    if rotated_stream is None:
        rotated_stream = CalibrationStream(stream.hidden_states.clone(), stream.layer_kwargs)
        rotated_stream.rotate(r1)
    layer_copy = _float_copy(layer, device)
    stream.advance(layer_copy, index)
    _check_finite(stream.hidden_states, index)
    rotate_layer(layer_copy, arch, shape, rotation.to(device), boundary)
    rotated_stream.advance(layer_copy, index)
    output_r1 = r1 if boundary is None else boundary.next_r1.to(device)
    output = rotated_stream.hidden_states @ output_r1.T.to(rotated_stream.hidden_states.dtype)
    error = _relative_error(output, stream.hidden_states)
    if not error <= TOLERANCE:
        raise InvarianceError(
            f"layer {index}: the rotated layer's output differs from the original output by {error:.2e} "
            f"(relative, fp32), above {TOLERANCE:g}; nothing was written"
        )
    return error


@torch.no_grad()
def check_model(
    model: "PreTrainedModel",
    arch: Architecture,
    shape: HeadShape,
    tokens: Tensor,
    device: torch.device,
    rotations: Sequence[LayerRotation] | None = None,
    place: BoundaryPlace = "input",
) -> float:
    """Relative error, in fp32, of the rotated model's logits on `tokens`. `model` is not changed.

    Raises InvarianceError if the logits or the output of a layer have an error above TOLERANCE.

    Args:
        model: a causal language model.
        arch: family of the model.
        shape: attention sizes of the model.
        tokens: token ids [1, seqlen].
        device: device of the computation, to which one layer at a time is copied.
        rotations: the rotation of each layer; None draws random rotations.
        place: place of the boundary rotations.
    """
    d, layers = model.config.hidden_size, decoder_layers(model, arch)
    stream = CalibrationStream.embed(model, arch, tokens, device)
    stream.hidden_states = stream.hidden_states.float()
    remaining = iter(rotations or _random_rotations(len(layers), d, shape, device))
    rotation = next(remaining)
    first_r1 = last_r1 = rotation.r1.to(device)
    rotated_stream = CalibrationStream(stream.hidden_states.clone(), stream.layer_kwargs)
    rotated_stream.rotate(first_r1)
    for index, layer in enumerate(layers):
        next_rotation = next(remaining, None)
        if next_rotation is None:
            check_layer(layer, index, stream, arch, shape, rotation, rotated_stream)
            break
        boundary = BoundaryRotation(place, rotation.r1, next_rotation.r1).to(device)
        if place == "residual":
            check_layer(layer, index, stream, arch, shape, rotation, rotated_stream, boundary)
        else:
            check_layer(layer, index, stream, arch, shape, rotation, rotated_stream)
            rotated_stream.rotate(boundary.matrix())
        rotation, last_r1 = next_rotation, boundary.next_r1
    ends = _Ends(model, arch, device)
    expected = ends.logits(stream.hidden_states)
    rotate_ends(ends, arch, first_r1, last_r1)
    got = ends.logits(rotated_stream.hidden_states)
    error = _relative_error(got, expected)
    if not error <= TOLERANCE:
        raise InvarianceError(
            f"{arch.lm_head}: the rotated model's logits differ from the original logits by {error:.2e} "
            f"(relative, fp32), above {TOLERANCE:g}; nothing was written"
        )
    return error


class _Ends(nn.Module):
    """fp32 copies of a model's embedding, final norm and lm_head, under the same paths as in the model."""

    def __init__(self, model: "PreTrainedModel", arch: Architecture, device: torch.device) -> None:
        super().__init__()
        self.arch = arch
        self.config = copy.copy(model.config)
        for path in (arch.embedding, arch.final_norm, arch.lm_head):
            self._set_module(path, _float_copy(module_at(model, path), device))

    def _set_module(self, path: str, module: nn.Module) -> None:
        *parents, name = path.split(".")
        node: nn.Module = self
        for parent in parents:
            if not hasattr(node, parent):
                setattr(node, parent, nn.Module())
            node = getattr(node, parent)
        setattr(node, name, module)

    def logits(self, hidden_states: Tensor) -> Tensor:
        normed = module_at(self, self.arch.final_norm)(hidden_states)
        return module_at(self, self.arch.lm_head)(normed)
