"""Checks that a rotated model has the outputs of the original model on calibration tokens.

The checks run in fp32, one layer at a time, before anything is pruned. `check_model` uses the trained
rotations if all of them are known before the pruning starts. Otherwise it uses random rotations, and
`check_layer` checks each layer again when its rotation is trained.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from drot.calibration.stream import CalibrationStream
from drot.core.errors import UserError
from drot.model.decoder import DecoderModel, rotate_head
from drot.model.families import HeadShape
from drot.model.layer import DecoderLayer
from drot.model.rotation import Bases, Boundary, LayerRotation

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


def _random_rotations(model: DecoderModel, device: torch.device) -> Iterator[LayerRotation]:
    """A random rotation of each layer, the same at every call. They are drawn one by one, to save memory."""
    generator = torch.Generator().manual_seed(0)
    for _ in model.layers:
        yield random_rotation(model.hidden_size, model.heads, generator, device)


def _check_finite(hidden_states: Tensor, layer: DecoderLayer) -> None:
    """Raises UserError if the norm of the original layer's outputs is not finite."""
    norm = float(hidden_states.norm())
    if not math.isfinite(norm):
        raise UserError(
            f"layer {layer.index}: the model's outputs on the calibration text must have a finite norm, got "
            f"{norm} in fp32: the weights are damaged; copy the model again"
        )


def _relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))


def _embedded(model: DecoderModel, tokens: Tensor, device: torch.device) -> CalibrationStream:
    stream = CalibrationStream.embed(model, tokens, device)
    stream.hidden_states = stream.hidden_states.float()
    return stream


@torch.no_grad()
def check_outputs(model: DecoderModel, tokens: Tensor, device: torch.device) -> None:
    """Raises UserError if a layer's outputs on `tokens` [1, seqlen] are not finite in fp32.

    `check_model` checks the same for a model that is rotated.
    """
    stream = _embedded(model, tokens, device)
    for layer in model.layers:
        stream.advance(layer.copy(device, torch.float32))
        _check_finite(stream.hidden_states, layer)


@torch.no_grad()
def check_layer(
    layer: DecoderLayer,
    stream: CalibrationStream,
    rotation: LayerRotation,
    rotated_stream: CalibrationStream | None = None,
    boundary: Boundary | None = None,
) -> float:
    """Relative error, in fp32, of the rotated layer's output on `stream`. `layer` is not changed.

    Raises InvarianceError if the error is above TOLERANCE, and UserError if the original output is not
    finite.

    Args:
        layer: a decoder layer.
        stream: input of the layer; afterwards its output.
        rotation: R1 and R2 of the layer.
        rotated_stream: input of the rotated layer, in the basis R1; afterwards its output. None computes it
            from `stream`.
        boundary: the boundary of the residual that the rotated layer holds; None if it holds none.
    """
    device = stream.hidden_states.device
    r1 = rotation.r1.to(device)
    if rotated_stream is None:
        rotated_stream = CalibrationStream(stream.hidden_states.clone(), stream.layer_kwargs)
        rotated_stream.rotate(r1)
    rotated = layer.copy(device, torch.float32)
    stream.advance(rotated)
    _check_finite(stream.hidden_states, layer)
    rotated.rotate(rotation.to(device), boundary)
    rotated_stream.advance(rotated)
    output_r1 = r1 if boundary is None else boundary.next_r1.to(device)
    output = rotated_stream.hidden_states @ output_r1.T.to(rotated_stream.hidden_states.dtype)
    error = _relative_error(output, stream.hidden_states)
    if not error <= TOLERANCE:
        raise InvarianceError(
            f"layer {layer.index}: the rotated layer's output differs from the original output by "
            f"{error:.2e} (relative, fp32), above {TOLERANCE:g}; nothing was written"
        )
    return error


@torch.no_grad()
def check_model(
    model: DecoderModel,
    tokens: Tensor,
    device: torch.device,
    bases: Bases,
    rotations: Sequence[LayerRotation] | None = None,
) -> float:
    """Relative error, in fp32, of the rotated model's logits on `tokens` [1, seqlen]. `model` is not changed.

    Raises InvarianceError if the logits or the output of a layer have an error above TOLERANCE.

    device: where the check computes, to which one layer at a time is copied.
    rotations: the rotation of each layer; None draws random rotations.
    """
    place = bases.place or "input"  # the boundary matrices of a shared R1 are the identity
    bases = Bases(place, bases.layers)
    stream = _embedded(model, tokens, device)
    remaining = iter(rotations or _random_rotations(model, device))
    known = {0: next(remaining)}
    rotated_stream = CalibrationStream(stream.hidden_states.clone(), stream.layer_kwargs)
    rotated_stream.rotate(known[0].r1.to(device))
    for layer in model.layers:
        index = layer.index
        if (following := next(remaining, None)) is not None:
            known[index + 1] = following
        boundary = bases.held(index, known)
        if place == "input":
            if boundary is not None:
                rotated_stream.rotate(boundary.to(device).matrix())
            boundary = None
        check_layer(layer, stream, known[index], rotated_stream, boundary and boundary.to(device))
        known.pop(index - 1, None)
    last_r1 = known[bases.layers - 1].r1.to(device)
    norm, head = _float_copy(model.final_norm, device), _float_copy(model.head, device)
    expected = head(norm(stream.hidden_states))
    rotate_head(norm, head, last_r1)
    error = _relative_error(head(norm(rotated_stream.hidden_states)), expected)
    if not error <= TOLERANCE:
        raise InvarianceError(
            f"{model.family.head}: the rotated model's logits differ from the original logits by {error:.2e} "
            f"(relative, fp32), above {TOLERANCE:g}; nothing was written"
        )
    return error


def _float_copy(module: Any, device: torch.device) -> Any:
    return copy.deepcopy(module).to(device=device, dtype=torch.float32)
