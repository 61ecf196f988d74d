"""Rotations change no outputs of any model: property tests over random architectures."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import build, relative_error, settings_of_models, tokens_for

from drot.model.boundary import BoundaryRotation, rotated_layers, set_boundary
from drot.model.families import architecture_of, decoder_layers, head_shape
from drot.model.rotation import LayerRotation, rotate_ends, rotate_layer
from drot.pipeline.invariance import random_rotation

#: dtype → largest relative error of the logits. fp64 is exact to 15 digits, fp32 to 7. In bf16 each weight of
#: the rotated model and each hidden state is rounded to 8 bits, in another basis than the original's.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.15}


def compute_norms_in_fp64(model):
    """transformers computes every RMSNorm in fp32, also in an fp64 model."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            weight, eps = module.weight, module.variance_epsilon

            def forward(x, weight=weight, eps=eps):
                return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

            module.forward = forward


def rotate(model, mode, seed, draw_blocks):
    """Merges random rotations into a model, as the pipeline does."""
    arch, shape, d = architecture_of(model.config), head_shape(model.config), model.config.hidden_size
    layers, generator = decoder_layers(model, arch), torch.Generator().manual_seed(seed)

    def draw():
        rotation = random_rotation(d, shape, generator)
        if not draw_blocks:
            return rotation
        blocks = [torch.randn(size, size, generator=generator, dtype=torch.float64) for size in draw_blocks]
        return LayerRotation(torch.block_diag(*(torch.linalg.qr(block)[0] for block in blocks)), rotation.r2)

    rotations = [draw() for _ in layers]
    if mode == "shared":
        rotations = [LayerRotation(rotations[0].r1, rotation.r2) for rotation in rotations]
    boundaries = [
        BoundaryRotation("residual" if mode == "residual" else "input", now.r1, after.r1)
        for now, after in itertools.pairwise(rotations)
    ]
    held = [*boundaries, None] if mode == "residual" else [None] * len(layers)
    for layer, rotation, boundary in zip(layers, rotations, held, strict=True):
        rotate_layer(layer, arch, shape, rotation, boundary)
    rotate_ends(model, arch, rotations[0].r1, rotations[-1].r1)
    if mode == "input":
        for layer, boundary in zip(rotated_layers(layers, "input"), boundaries, strict=True):
            set_boundary(layer, arch, boundary)


@st.composite
def blocks_of(draw, size):
    """The sizes of the diagonal blocks of R1; () for a dense R1."""
    if draw(st.booleans()):
        return ()
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, size], strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mode", ["input", "residual", "shared"])
@given(data=st.data(), settings=settings_of_models(), seed=st.integers(0, 2**16))
def test_a_random_rotation_changes_no_logits(dtype, mode, data, settings, seed):
    model, tokens = build(settings | {"dtype": dtype}), tokens_for(settings, length=24)
    if dtype == torch.float64:
        compute_norms_in_fp64(model)
    before = model(tokens).logits
    rotate(model, mode, seed, data.draw(blocks_of(settings["hidden_size"])))
    assert relative_error(model(tokens).logits, before) < TOLERANCE[dtype]
