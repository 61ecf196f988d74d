"""Checks that a rotated model has the outputs of the original model on calibration tokens.

The checks run in fp32, one layer at a time, before a layer is pruned. `ModelCheck` uses the trained
rotations if all of them are known before the pruning starts; where the layers are read from files, it then
takes each layer on its way to the pruning, so that the files are read once. Otherwise it uses random
rotations, and `check_layer` checks each layer again when its rotation is trained.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from drot.calibration.stream import CalibrationStream
from drot.core.errors import UserError
from drot.machine.products import merging_dtype
from drot.machine.ranks import ALONE, Ranks
from drot.model.decoder import DecoderModel, rotate_head
from drot.model.layer import DecoderLayer
from drot.model.linear import copied
from drot.model.rotation import Bases, Boundary, LayerRotation, around_ones
from drot.model.sizes import HeadShape

#: Largest accepted error ‖rotated − original‖ / ‖original‖, in fp32.
TOLERANCE = 1e-4
#: `ModelCheck` takes this many tokens at most: a rotation that is wrong is wrong at every token.
CHECKED_TOKENS = 512


class InvarianceError(RuntimeError):
    """A rotation changed the model's outputs. This is a fault of drot and stops the run."""


def random_rotations(
    downs: Sequence[int],
    d: int,
    shape: HeadShape,
    device: torch.device,
    *,
    size: int = 0,
    keeps_ones: bool = False,
) -> Iterator[LayerRotation]:
    """A random rotation for each layer, from two QRs of a d x d matrix.

    The layers take the two in turn, with the columns shifted: so no two neighbours have one R1, and the
    product of two neighbours has no zeros.

    downs: for each layer, the number of blocks of R3. size: that of these blocks; 0 without R3.
    keeps_ones: as in `random_rotation`.
    """
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"down": (max(downs), size) if size else None, "keeps_ones": keeps_ones}
    drawn = [random_rotation(d, shape, generator, device, **options) for _ in range(min(len(downs), 2))]
    for index, blocks in enumerate(downs):
        rotation = drawn[index % 2]
        r3 = None if rotation.r3 is None else rotation.r3[:blocks].roll(index, 2)
        yield LayerRotation(rotation.r1.roll(index, 1), rotation.r2.roll(index, 2), r3)


def random_rotation(
    d: int,
    shape: HeadShape,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    *,
    down: tuple[int, int] | None = None,
    keeps_ones: bool = False,
) -> LayerRotation:
    """QR factors of Gaussian matrices that are drawn on the CPU, in fp64 on `device`.

    down: number and size of the blocks of R3; None without R3.
    keeps_ones: whether R1 1 = 1, as a family with LayerNorm needs.
    """

    def draw(*size: int) -> Tensor:
        gaussian = torch.randn(*size, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(gaussian.to(device))[0]

    if keeps_ones:
        r1 = around_ones(
            torch.block_diag(torch.ones(1, 1, dtype=torch.float64).to(device), draw(d - 1, d - 1))
        )
    else:
        r1 = draw(d, d)
    r2 = draw(shape.kv_heads, shape.head_dim, shape.head_dim)
    return LayerRotation(r1, r2, draw(*down, down[-1]) if down else None)


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
            f"above {TOLERANCE:g}; the result was not written"
        )
    return error


def _embedded(model: DecoderModel, tokens: Tensor, device: torch.device) -> CalibrationStream:
    stream = CalibrationStream.embed(model, tokens, device)
    stream.hidden_states = stream.hidden_states.float()
    return stream


@torch.no_grad()
def check_outputs(model: DecoderModel, tokens: Tensor, device: torch.device) -> None:
    """Raises UserError if a layer's outputs on `tokens` [1, seqlen] are not finite in fp32.

    `ModelCheck` checks the same for a model that is rotated.
    """
    stream = _embedded(model, tokens, device)
    for layer in model.loaded_layers():
        stream.advance(layer.copy(device, torch.float32))
        _check_finite(stream.hidden_states, layer)


@torch.no_grad()
def check_layer(
    layer: DecoderLayer,
    stream: CalibrationStream,
    rotation: LayerRotation,
    rotated_stream: CalibrationStream | None = None,
    boundary: Boundary | None = None,
    ranks: Ranks = ALONE,
) -> float:
    """Relative error, in fp32, of the rotated layer's output on `stream`. `layer` is not changed.

    Raises InvarianceError if the error is above TOLERANCE, and UserError if the original output is not
    finite.

    stream: input of the layer; afterwards its output.
    rotated_stream: input of the rotated layer, in the basis R1; afterwards its output. None computes it from
        `stream`.
    boundary: the boundary of the residual, or that inside of the layer, which the rotated layer holds.
    ranks: those that check the same layer, and share its rotation.
    """
    device, rotates = stream.hidden_states.device, layer.family.rotates_stream
    r1 = rotation.r1.to(device)
    if rotated_stream is None:
        rotated_stream = stream.rotated_copy(r1) if rotates else stream.copy()
    rotated = layer.copy(device, torch.float32)
    stream.advance(rotated)
    _check_finite(stream.hidden_states, layer)
    rotated.rotate(rotation.to(device), boundary, dtype=merging_dtype(device), ranks=ranks)
    rotated_stream.advance(rotated)
    output = rotated_stream.hidden_states
    if rotates:
        output_r1 = r1 if boundary is None else boundary.next_r1.to(device)
        output = output @ output_r1.T.to(output.dtype)
    return _checked_error(f"layer {layer.index}", output, stream.hidden_states)


class ModelCheck:
    """The relative error, in fp32, of a rotated model. `model` is not changed.

    The caller gives its layers, in their order, to `pass_through`, and then asks for `logit_error`;
    `of_all_layers` does both.

    tokens: [1, seqlen], of which the check takes the first CHECKED_TOKENS.
    device: where the check computes, to which one layer at a time is copied.
    rotations: the rotation of each layer, which are asked for one after the other; without them, the check
        takes `random_rotations`, with an R3 of `down_block` columns.
    ranks: those that check the same model, and share the rotation of a layer.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: DecoderModel,
        tokens: Tensor,
        device: torch.device,
        bases: Bases,
        rotations: Collection[LayerRotation] = (),
        down_block: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._model, self._device, self._ranks = model, device, ranks
        self._rotates = rotates = model.family.rotates_stream
        # of a shared R1 each boundary matrix is the identity
        self._bases = Bases(bases.place or ("input" if rotates else "inside"), bases.layers)
        self._stream = _embedded(model, tokens[:, :CHECKED_TOKENS], device)
        size = down_block or 0
        downs = [layer.down_inputs() // size if size else 0 for layer in model.layers]
        options: dict[str, Any] = {"size": size, "keeps_ones": model.family.layer_norm}
        drawn = random_rotations(downs, model.hidden_size, model.heads, device, **options)
        self._remaining = iter(rotations or drawn)
        #: on the device, of three layers at most, to save memory
        self._known = {0: next(self._remaining).to(device)}
        self._rotated = self._stream.rotated_copy(self._known[0].r1) if rotates else self._stream.copy()

    def of_all_layers(self) -> float:
        """The error of the logits, after a pass through all layers of the model."""
        for layer in self._model.loaded_layers(self._device):
            self.pass_through(layer)
        return self.logit_error()

    @torch.no_grad()
    def pass_through(self, layer: DecoderLayer) -> None:
        """Passes the tokens through the next layer. Raises InvarianceError if its output differs."""
        known = self._known
        if (following := next(self._remaining, None)) is not None:
            known[layer.index + 1] = following.to(self._device)
        boundary = self._bases.held(layer.index, known)
        if boundary is not None and boundary.place == "input":
            assert boundary.r1 is not None
            self._rotated.rotate(boundary.r1.T)  # two products with few tokens, and none of the matrices
            self._rotated.rotate(boundary.next_r1)
            boundary = None
        check_layer(layer, self._stream, known[layer.index], self._rotated, boundary, self._ranks)
        known.pop(layer.index - 1, None)

    @torch.no_grad()
    def logit_error(self) -> float:
        """The error of the logits. Raises InvarianceError if it is above TOLERANCE."""
        model, device = self._model, self._device
        with model.in_memory(model.family.final_norm, model.family.head):
            norm, head = (copied(module, device, torch.float32) for module in (model.final_norm, model.head))
        expected = head(norm(self._stream.hidden_states))
        if self._rotates:
            rotate_head(norm, head, model.family, self._known[self._bases.layers - 1].r1, device)
        got = head(norm(self._rotated.hidden_states))
        return _checked_error(model.family.head, got, expected)
