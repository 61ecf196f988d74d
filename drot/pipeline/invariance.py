"""Checks that a rotated model has the outputs of the original model on calibration tokens.

The checks run in fp32, one layer at a time, before anything is pruned. `check_model` uses the trained
rotations if all of them are known before the pruning starts. Otherwise it uses random rotations, and
`check_layer` checks each layer again when its rotation is trained.
"""

import copy
import math
from collections.abc import Sequence
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
    """QR factors of Gaussian matrices that are drawn on the CPU, in fp64 on `device`."""

    def draw(*size: int) -> Tensor:
        gaussian = torch.randn(*size, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(gaussian.to(device))[0]

    return LayerRotation(draw(d, d), draw(shape.kv_heads, shape.head_dim, shape.head_dim))


def _check_finite(hidden_states: Tensor, layer: DecoderLayer) -> None:
    norm = float(hidden_states.norm())
    if not math.isfinite(norm):
        raise UserError(
            f"layer {layer.index}: the model's outputs on the calibration text must have a finite norm, got "
            f"{norm} in fp32: the weights are damaged; copy the model again"
        )


def _checked_error(where: str, got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖. Raises InvarianceError if it is above TOLERANCE or NaN."""
    error = float((got - expected).norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))
    if not error <= TOLERANCE:
        raise InvarianceError(
            f"{where}: the rotated output differs from the original output by {error:.2e} (relative, fp32), "
            f"above {TOLERANCE:g}; nothing was written"
        )
    return error


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

    stream: input of the layer; afterwards its output.
    rotated_stream: input of the rotated layer, in the basis R1; afterwards its output. None computes it from
        `stream`.
    boundary: the boundary of the residual that the rotated layer holds.
    """
    device = stream.hidden_states.device
    r1 = rotation.r1.to(device)
    if rotated_stream is None:
        rotated_stream = stream.rotated_copy(r1)
    rotated = layer.copy(device, torch.float32)
    stream.advance(rotated)
    _check_finite(stream.hidden_states, layer)
    rotated.rotate(rotation.to(device), boundary)
    rotated_stream.advance(rotated)
    output_r1 = r1 if boundary is None else boundary.next_r1.to(device)
    output = rotated_stream.hidden_states @ output_r1.T.to(rotated_stream.hidden_states.dtype)
    return _checked_error(f"layer {layer.index}", output, stream.hidden_states)


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
    rotations: the rotation of each layer; None draws them at random.
    """
    bases = Bases(bases.place or "input", bases.layers)  # of a shared R1 each boundary matrix is the identity
    stream, generator = _embedded(model, tokens, device), torch.Generator().manual_seed(0)
    drawn = (random_rotation(model.hidden_size, model.heads, generator, device) for _ in model.layers)
    remaining = iter(rotations or drawn)
    known = {0: next(remaining)}  # of three layers at most, to save memory
    rotated_stream = stream.rotated_copy(known[0].r1)
    for layer in model.layers:
        if (following := next(remaining, None)) is not None:
            known[layer.index + 1] = following
        boundary = bases.held(layer.index, known)
        if boundary is not None and boundary.place == "input":
            rotated_stream.rotate(boundary.to(device).matrix())
            boundary = None
        check_layer(layer, stream, known[layer.index], rotated_stream, boundary and boundary.to(device))
        known.pop(layer.index - 1, None)
    last_r1 = known[bases.layers - 1].r1.to(device)
    norm, head = _float_copy(model.final_norm, device), _float_copy(model.head, device)
    expected = head(norm(stream.hidden_states))
    rotate_head(norm, head, last_r1)
    return _checked_error(model.family.head, head(norm(rotated_stream.hidden_states)), expected)


def _float_copy(module: Any, device: torch.device) -> Any:
    return copy.deepcopy(module).to(device=device, dtype=torch.float32)
