"""Rotations change no outputs of any model: property tests over random architectures."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import BARE, LINEAR_ATTENTION, ROUTERS_IN_FP32, build, settings_of_models, tokens_for
from small_models import random_rotation, random_rotations, relative_error, rotate_model
from torch import nn

from drot.model.decoder import DecoderModel
from drot.model.rotation import LayerRotation

#: dtype → largest relative error of the logits. fp64 is exact to 15 digits, fp32 to 7. In bf16 each weight of
#: the rotated model and each hidden state is rounded to 8 bits, in another basis than the original's.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.25}


def compute_norms_in_fp64(model):
    """transformers computes every norm of its own in fp32, also in an fp64 model."""
    for module in model.modules():
        if type(module).__name__ in ("CohereLayerNorm", "Cohere2LayerNorm", "Cohere2MoeLayerNorm"):

            def normalised(x, weight=module.weight, eps=module.variance_epsilon):
                return weight * nn.functional.layer_norm(x, x.shape[-1:], eps=eps)

            module.forward = normalised
        if type(module).__name__.endswith("RMSNorm"):
            eps, offset = getattr(module, "variance_epsilon", None), 0.0
            if eps is None:  # Gemma's and Qwen3.5's
                eps, offset = module.eps, 0.0 if type(module).__name__.startswith("Gemma4") else 1.0
            weight = getattr(module, "weight", torch.ones(()))  # that of Gemma 4's values has none

            # the sum is made at each call, as the rotation changes the weight
            def forward(x, weight=weight, offset=offset, eps=eps):
                return (offset + weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

            module.forward = forward


def rotations_of(model, mode, seed, block_sizes):
    """A random rotation of each layer, whose R1 has diagonal blocks of `block_sizes`; () for a dense R1."""
    rotations, generator = random_rotations(model, seed), torch.Generator().manual_seed(seed)
    handle = DecoderModel(model)
    if block_sizes:
        for index, rotation in enumerate(rotations):
            options = dict(keeps_ones=handle.family.layer_norm)
            drawn = [
                random_rotation(n, handle.layers[index].heads, generator, **options).r1 for n in block_sizes
            ]
            rotations[index] = LayerRotation(torch.block_diag(*drawn), rotation.r2)
    if mode == "shared":
        rotations = [LayerRotation(rotations[0].r1, rotation.r2) for rotation in rotations]
    return rotations


@st.composite
def blocks_of(draw, size):
    """The sizes of the diagonal blocks of R1; () for a dense R1."""
    if draw(st.booleans()):
        return ()
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, size], strict=True))


def assert_same_logits(mode, data, settings, seed):
    model, tokens = build(settings), tokens_for(settings, length=24)
    if settings["dtype"] == torch.float64:
        compute_norms_in_fp64(model)
        model.set_experts_implementation("eager")  # torch has no grouped products in fp64
    before = model(tokens).logits
    rotations = rotations_of(model, mode, seed, data.draw(blocks_of(settings["hidden_size"])))
    rotate_model(model, rotations, None if mode == "shared" else mode)
    in_fp32 = settings["family"] in (*ROUTERS_IN_FP32, *LINEAR_ATTENTION)  # the latter do it too
    dtype = torch.float32 if in_fp32 else settings["dtype"]
    tolerance = max(TOLERANCE[settings["dtype"]], TOLERANCE[dtype])
    assert relative_error(model(tokens).logits, before) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mode", ["input", "residual", "shared"])
@given(data=st.data(), settings=settings_of_models(), seed=st.integers(0, 2**16))
def test_a_random_rotation_changes_no_logits(dtype, mode, data, settings, seed):
    assert_same_logits(mode, data, settings | {"dtype": dtype}, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", BARE)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    mode=st.sampled_from(["residual", "input", "shared"]),
    seed=st.integers(0, 2**16),
)
def test_a_random_rotation_of_each_family_changes_no_logits(family, dtype, mode, data, seed):
    settings = data.draw(settings_of_models(families=[family]))
    assert_same_logits(mode, data, settings | {"dtype": dtype}, seed)
