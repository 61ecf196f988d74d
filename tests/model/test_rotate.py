"""Rotations change no outputs of a model of any family."""

import pytest
import torch
from small_models import FAMILIES, random_tokens, small_model

from drot.core.errors import UserError
from drot.model.boundary import BoundaryRotation, set_boundary
from drot.model.families import ARCHITECTURES, architecture_of, decoder_layers, head_shape
from drot.model.rotation import LayerRotation, rotate_ends, rotate_layer
from drot.pipeline import invariance
from drot.pipeline.invariance import InvarianceError, check_model, random_rotation
from drot.pipeline.validation import check_architecture

CPU = torch.device("cpu")


def rotate_model(model, seed=1):
    """Merges a random rotation into each layer, as the pipeline does, and returns the rotations."""
    arch, shape = architecture_of(model.config), head_shape(model.config)
    generator = torch.Generator().manual_seed(seed)
    layers = decoder_layers(model, arch)
    rotations = [random_rotation(model.config.hidden_size, shape, generator) for _ in layers]
    for layer, rotation in zip(layers, rotations, strict=True):
        rotate_layer(layer, arch, shape, rotation)
    rotate_ends(model, arch, rotations[0].r1, rotations[-1].r1)
    for rotation, next_rotation, next_layer in zip(rotations, rotations[1:], list(layers)[1:], strict=False):
        set_boundary(next_layer, arch, BoundaryRotation("input", rotation.r1, next_rotation.r1))
    return rotations


def test_every_supported_family_is_tested():
    assert {family.partition("-")[0] for family in FAMILIES} == set(ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_change_in_fp64(family):
    """The tolerance is 1e-6 although the weights are fp64, because transformers' RMSNorm computes in fp32."""
    model = small_model(family, dtype=torch.float64)
    tokens = random_tokens(2, 40)
    before = model(tokens).logits
    rotate_model(model)
    assert torch.allclose(model(tokens).logits, before, rtol=0, atol=1e-6 * float(before.abs().max()))
    assert model.config.tie_word_embeddings is False
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_cache_and_padding_agrees(family):
    """The boundary rotation must also be right for a single new token with a KV cache."""
    model = small_model(family)
    tokens = random_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    before = model.generate(tokens, **options)
    rotate_model(model)
    assert torch.equal(model.generate(tokens, **options), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_really_rotate(family):
    model = small_model(family)
    weight = model.model.layers[1].self_attn.q_proj.weight.clone()
    rotate_model(model)
    changed = (model.model.layers[1].self_attn.q_proj.weight - weight).norm() / weight.norm()
    assert changed > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_check_model_passes_and_does_not_change_the_model(family):
    model = small_model(family)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    arch, shape = architecture_of(model.config), head_shape(model.config)
    error = check_model(model, arch, shape, random_tokens(1, 40), CPU)
    assert 0 < error < 1e-5
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.config.tie_word_embeddings == FAMILIES[family].get("tie_word_embeddings", False)


@pytest.mark.parametrize("where", [0, 2])
def test_check_model_names_the_layer_that_fails(monkeypatch, where):
    model = small_model("llama")
    rotated = []

    def wrong(layer, *rest):
        rotate_layer(layer, *rest)
        if len(rotated) == where:
            layer.self_attn.o_proj.weight[0] += 0.05
        rotated.append(layer)

    monkeypatch.setattr(invariance, "rotate_layer", wrong)
    arch, shape = architecture_of(model.config), head_shape(model.config)
    with pytest.raises(InvarianceError, match=f"layer {where}: "):
        check_model(model, arch, shape, random_tokens(1, 40), CPU)


def test_check_model_names_lm_head_when_the_ends_fail(monkeypatch):
    model = small_model("llama")
    monkeypatch.setattr(invariance, "rotate_ends", lambda *args: None)
    arch, shape = architecture_of(model.config), head_shape(model.config)
    with pytest.raises(InvarianceError, match="lm_head: "):
        check_model(model, arch, shape, random_tokens(1, 40), CPU)


def test_merging_rounds_once():
    """The rotated fp32 weights are the fp64 products, rounded once."""
    model = small_model("llama")
    layer, arch, shape = model.model.layers[0], architecture_of(model.config), head_shape(model.config)
    rotation = random_rotation(32, shape, torch.Generator().manual_seed(3))
    exact = layer.mlp.up_proj.weight.double() * layer.post_attention_layernorm.weight.double() @ rotation.r1
    rotate_layer(layer, arch, shape, rotation)
    assert torch.equal(layer.mlp.up_proj.weight, exact.float())
    assert torch.equal(layer.post_attention_layernorm.weight, torch.ones(32))


def test_heads_share_the_rotation_of_their_kv_head():
    """The R2 of a KV head changes only the rows of v of that head and the columns of o of its query heads."""
    model = small_model("llama")
    layer, arch, shape = model.model.layers[0], architecture_of(model.config), head_shape(model.config)
    v, o = layer.self_attn.v_proj.weight.clone(), layer.self_attn.o_proj.weight.clone()
    r2 = torch.eye(12, dtype=torch.float64).repeat(2, 1, 1)
    r2[1] = random_rotation(32, shape, torch.Generator().manual_seed(3)).r2[1]
    layer.input_layernorm.weight.fill_(1)
    rotate_layer(layer, arch, shape, LayerRotation(torch.eye(32, dtype=torch.float64), r2))
    assert torch.equal(layer.self_attn.v_proj.weight[:12], v[:12])
    assert not torch.allclose(layer.self_attn.v_proj.weight[12:], v[12:])
    assert torch.equal(layer.self_attn.o_proj.weight[:, :24], o[:, :24])
    assert not torch.allclose(layer.self_attn.o_proj.weight[:, 24:], o[:, 24:])


def test_an_unsupported_family_is_refused_by_name():
    model = small_model("llama")
    model.config.model_type = "opt"
    with pytest.raises(UserError, match="'opt' is not supported: expected one of llama, mistral"):
        architecture_of(model.config)


def test_a_changed_model_is_refused_with_the_path():
    model = small_model("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 40, bias=False)
    with pytest.raises(UserError, match=r"layer 1: up_proj must be \[48, 32\] .* got \[40, 32\]"):
        check_architecture(model)
    model.model.layers[1].mlp.up_proj = torch.nn.Identity()
    with pytest.raises(UserError, match=r"mlp.up_proj must be a plain torch.nn.Linear, got Identity"):
        check_architecture(model)
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(UserError, match=r"no module 'mlp.up_proj'"):
        check_architecture(model)
