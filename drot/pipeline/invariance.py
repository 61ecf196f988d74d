"""Checks that a rotated model has the outputs of the original model on calibration tokens.

The checks run in fp32, one layer at a time: each layer with its rotation, before it is pruned.
"""

import math

import torch
from torch import Tensor

from drot.calibration.stream import CalibrationStream
from drot.core.errors import UserError
from drot.machine.products import merging_dtype
from drot.machine.ranks import ALONE, Ranks
from drot.model.boundary import BoundaryPlace
from drot.model.decoder import DecoderModel, rotate_head
from drot.model.layer import DecoderLayer
from drot.model.linear import copied
from drot.model.rotation import Boundary, LayerRotation

#: Largest accepted error ‖rotated − original‖ / ‖original‖, in fp32.
TOLERANCE = 1e-4
#: `ModelCheck` takes this many tokens at most: a rotation that is wrong is wrong at every token.
CHECKED_TOKENS = 128
#: Largest share of the tokens that may take other experts: where two experts score alike, rounding chooses.
REROUTED_SHARE = 0.05


class InvarianceError(RuntimeError):
    """A rotation changed the model's outputs. This is a fault of drot and stops the run."""


def check_finite_outputs(hidden_states: Tensor, layer: DecoderLayer) -> None:
    """Raises UserError if the outputs of `layer` have no finite norm in fp32."""
    norm = float(hidden_states.float().norm())
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
            f"above {TOLERANCE:g}; the result was not written"
        )
    return error


def _rerouted(got: Tensor, expected: Tensor) -> Tensor:
    """The tokens that a mixture has given to other experts, bool [1, seqlen, 1], of outputs [1, seqlen, d].

    These are the tokens whose error is above TOLERANCE, if they are at most REROUTED_SHARE of all: a rotation
    that is wrong is wrong at every token.
    """
    others = (got - expected).norm(dim=-1, keepdim=True) > TOLERANCE * expected.norm(dim=-1, keepdim=True)
    return others & (others.sum() <= REROUTED_SHARE * others.numel())


def _embedded(model: DecoderModel, tokens: Tensor, device: torch.device) -> CalibrationStream:
    stream = CalibrationStream.embed(model, tokens, device)
    stream.hidden_states = stream.hidden_states.float()
    return stream


@torch.no_grad()
def check_outputs(model: DecoderModel, tokens: Tensor, device: torch.device) -> None:
    """Raises UserError if a layer's outputs on `tokens` [1, seqlen] are not finite in fp32."""
    stream = _embedded(model, tokens, device)
    for layer in model.loaded_layers():
        stream.advance(layer.copy(device, torch.float32))
        check_finite_outputs(stream.hidden_states, layer)


class ModelCheck:
    """The relative errors, in fp32, of a model that is rotated layer by layer.

    The caller gives the layers, in their order and not rotated yet, to `pass_through`, and then asks for
    `logit_error`. The layers are not changed.

    tokens: [1, seqlen], of which the check takes the first CHECKED_TOKENS.
    device: where the check computes, to which one layer at a time is copied.
    place: of the boundaries between the layers, as in Bases.
    ranks: those that check the same model, and share the rotation of a layer.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: DecoderModel,
        tokens: Tensor,
        device: torch.device,
        place: BoundaryPlace | None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._model, self._device, self._place, self._ranks = model, device, place, ranks
        self._rotates = model.family.rotates_stream
        self._stream = _embedded(model, tokens[:, :CHECKED_TOKENS], device)
        #: at the place `residual` in the basis of the next layer, otherwise in the original basis
        self._rotated = self._stream.copy()

    @torch.no_grad()
    def pass_through(self, layer: DecoderLayer, rotation: LayerRotation, boundary: Boundary | None) -> float:
        """Passes the tokens through the next layer. Returns the error of its output.

        Raises InvarianceError if the error is above TOLERANCE, and UserError if the output of the original
        layer is not finite.

        boundary: that of the residual, or that inside of the layer, which the rotated layer holds.
        """
        rotation = rotation.to(self._device)
        if self._rotates and (layer.index == 0 or self._place != "residual"):
            self._rotated.rotate(rotation.r1)
        copy = layer.copy(self._device, torch.float32)
        self._stream.advance(copy)
        check_finite_outputs(self._stream.hidden_states, layer)
        copy.rotate(rotation, boundary, dtype=merging_dtype(self._device), ranks=self._ranks)
        self._rotated.advance(copy)
        output, expected = self._rotated.hidden_states, self._stream.hidden_states
        basis = None
        if self._rotates:
            basis = (rotation.r1 if boundary is None else boundary.next_r1.to(self._device)).to(output.dtype)
            output = output @ basis.T
        if (
            any(group.expert is not None for group in layer.groups)
            and (others := _rerouted(output, expected)).any()
        ):
            output = torch.where(others, expected, output)
            self._rotated.hidden_states = output if basis is None else output @ basis
        if self._place != "residual":
            self._rotated.hidden_states = output
        return _checked_error(f"layer {layer.index}", output, expected)

    @torch.no_grad()
    def logit_error(self, last: LayerRotation) -> float:
        """The error of the logits. Raises InvarianceError if it is above TOLERANCE.

        last: the rotation of the last layer.
        """
        model, device = self._model, self._device
        with model.in_memory(model.family.final_norm, model.family.head):
            norm, head = (copied(module, device, torch.float32) for module in (model.final_norm, model.head))
        expected = head(norm(self._stream.hidden_states))
        if self._rotates:
            r1 = last.r1.to(device)
            rotate_head(norm, head, model.family, r1, device)
            if self._place != "residual":
                self._rotated.rotate(r1)
        got = head(norm(self._rotated.hidden_states))
        return _checked_error(model.family.head, got, expected)
