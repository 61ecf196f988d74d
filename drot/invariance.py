"""Proof, on calibration tokens, that a rotated model still computes what the original does.

It is made in fp32, one layer at a time, before anything is pruned: with the trained rotations where
they are all known by then, otherwise with random ones (which prove the surgery), and again for each
layer with its own trained rotation.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.architectures import Architecture, HeadShape, decoder_layers, module_at
from drot.calibration.stream import CalibrationStream
from drot.surgery.residual import set_boundary
from drot.surgery.rotate import LayerRotation, rotate_ends, rotate_layer

#: largest relative error, ‖rotated − original‖ / ‖original‖ in fp32
TOLERANCE = 1e-4


class InvarianceError(RuntimeError):
    """A rotation changed the model's function: a fault of the surgery, which stops the run."""


def random_rotation(
    d: int, shape: HeadShape, generator: torch.Generator, device: torch.device | str = "cpu"
) -> LayerRotation:
    """Orthogonal R1 [d, d] and R2 [kv, h, h] in fp64 on `device`, by QR of a Gaussian drawn on the CPU."""

    def draw(*size: int) -> Tensor:
        gaussian = torch.randn(*size, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(gaussian.to(device))[0]

    return LayerRotation(draw(d, d), draw(shape.kv_heads, shape.head_dim, shape.head_dim))


def _relative(got: Tensor, expected: Tensor) -> float:
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
    down: Tensor | None = None,
) -> float:
    """Relative error of the layer's output on `stream` (fp32), original basis, under `rotation`.

    Advances `stream`, and `rotated_stream` (in the rotation's basis; made from `stream` where it is
    not given), by the layer. down: the next layer's R1 where down_proj is in that basis, in which
    `rotated_stream` then is. Raises InvarianceError that names the layer above TOLERANCE.
    """
    device = stream.hidden_states.device
    r1 = rotation.r1.to(device)
    if rotated_stream is None:
        rotated_stream = CalibrationStream(stream.hidden_states.clone(), stream.layer_kwargs)
        rotated_stream.rotate(r1)
    work = _float_copy(layer, device)
    stream.advance(work, index)
    rotate_layer(work, arch, shape, rotation.to(device), down)
    behind = r1
    if down is not None:
        behind = down.to(device)
        set_boundary(work, r1, behind, torch.float32, device, inside=arch)
    rotated_stream.advance(work, index)
    back = rotated_stream.hidden_states @ behind.T.to(rotated_stream.hidden_states.dtype)
    error = _relative(back, stream.hidden_states)
    if not error <= TOLERANCE:
        raise InvarianceError(
            f"layer {index}: the rotated layer's output differs from the original's by {error:.2e} "
            f"(relative, fp32), above {TOLERANCE:g}; nothing was written"
        )
    return error


@torch.no_grad()
def check_model(
    model: PreTrainedModel,
    arch: Architecture,
    shape: HeadShape,
    tokens: Tensor,
    device: torch.device,
    rotations: list[LayerRotation] | None = None,
    down_basis: str = "own",
) -> float:
    """Relative logit error (fp32) of the whole rotated model on `tokens` [1, seqlen].

    rotations: one a layer; None draws random ones. down_basis: as in RotationConfig. The model itself
    is not changed; one layer at a time is copied in fp32. Raises InvarianceError with the name of the
    first layer that differs.
    """
    d, layers = model.config.hidden_size, decoder_layers(model, arch)
    generator = torch.Generator().manual_seed(0)
    stream = CalibrationStream.embed(model, arch, tokens, device)
    stream.hidden_states = stream.hidden_states.float()
    each = iter(rotations or (random_rotation(d, shape, generator, device) for _ in layers))
    rotation = next(each)
    first = last = rotation.r1.to(device)
    rotated = CalibrationStream(stream.hidden_states.clone(), stream.layer_kwargs)
    rotated.rotate(first)
    for index, layer in enumerate(layers):
        following = next(each, None)
        after = None if following is None else following.r1.to(device)
        down = after if down_basis == "next" else None
        check_layer(layer, index, stream, arch, shape, rotation, rotated, down)
        if following is not None and after is not None:
            if down is None:
                rotated.rotate(last.T @ after)
            rotation, last = following, after
    ends = _Ends(model, arch, device)
    expected = ends.logits(stream.hidden_states)
    rotate_ends(ends, arch, first, last)
    got = ends.logits(rotated.hidden_states)
    error = _relative(got, expected)
    if not error <= TOLERANCE:
        raise InvarianceError(
            f"{arch.lm_head}: the rotated model's logits differ from the original's by {error:.2e} "
            f"(relative, fp32), above {TOLERANCE:g}; nothing was written"
        )
    return error


class _Ends(nn.Module):
    """fp32 copies of the embedding, final norm and head under the paths of the architecture."""

    def __init__(self, model: PreTrainedModel, arch: Architecture, device: torch.device) -> None:
        super().__init__()
        self.arch = arch
        self.config = copy.copy(model.config)
        for path in (arch.embedding, arch.final_norm, arch.lm_head):
            self._place(path, _float_copy(module_at(model, path), device))

    def _place(self, path: str, module: nn.Module) -> None:
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
