"""Rotations change no outputs of a model of any family."""

import copy
import dataclasses
import pickle

import pytest
import torch
from small_models import (
    FAMILIES,
    WITHOUT_EXPERTS,
    place_in,
    random_rotations,
    random_tokens,
    relative_error,
    rotate_model,
    small_model,
)
from transformers import core_model_loading

from drot.calibration.stream import CalibrationStream
from drot.core.errors import UserError
from drot.model.boundary import remove_boundary_rotation, remove_down_rotation, rotation_place
from drot.model.decoder import DecoderModel
from drot.model.layer import DecoderLayer
from drot.model.rotation import Bases, LayerRotation
from drot.pipeline import invariance
from drot.pipeline.invariance import InvarianceError

CPU = torch.device("cpu")


def check_model(model, place="input", down_block=16):
    handle, rotations = DecoderModel(model), random_rotations(model, down_block=down_block)
    bases = Bases(place_in(handle, place), len(handle.layers))
    check = invariance.ModelCheck(handle, random_tokens(1, 40), CPU, bases.place)
    for layer, rotation in zip(handle.layers, rotations, strict=True):
        assert 0 < check.pass_through(layer, rotation, bases.merged(layer.index, rotations)) < 1e-5
    return check.logit_error(rotations[-1])


@pytest.mark.parametrize(("place", "down_block"), [("input", None), ("input", 16), ("residual", 16)])
@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_logits_do_not_change_in_fp64(family, place, down_block):
    """The weights are fp64, but transformers' RMSNorm computes in fp32, also that of Gemma 4's values, and
    so does its linear attention. VaultGemma rounds most."""
    model = small_model(family, dtype=torch.float64)
    tolerance = 1e-5 if family.startswith(("qwen3_5_text", "gemma4", "vaultgemma")) else 1e-6
    tokens = random_tokens(2, 40)
    before, tied = model(tokens).logits, model.config.tie_word_embeddings
    rotate_model(model, random_rotations(model, down_block=down_block), place)
    assert torch.allclose(model(tokens).logits, before, rtol=0, atol=tolerance * float(before.abs().max()))
    tied &= not DecoderModel(model).family.rotates_stream  # embedding and lm_head are then what they were
    assert model.config.tie_word_embeddings is tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_generation_with_cache_and_padding_agrees(family):
    """The boundary rotation must also be right for a single new token with a KV cache."""
    model = small_model(family)
    tokens = random_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    before = model.generate(tokens, **options)
    rotate_model(model, random_rotations(model, down_block=8))
    assert torch.equal(model.generate(tokens, **options), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_really_rotate(family):
    model = small_model(family)
    linear = next(iter(DecoderModel(model).layers[1].linears.values()))
    weight = linear.weight.clone()
    rotate_model(model)
    assert relative_error(linear.weight, weight) > 0.5


@pytest.mark.parametrize("place", [None, "input", "residual"])
def test_copies_and_pickles_of_a_rotated_model(place):
    """deepcopy and pickle keep the classes that the layers and their MLPs have got."""
    model, tokens = small_model("llama", dtype=torch.float64), random_tokens(2, 12)
    rotations = random_rotations(model, down_block=24)
    shared = [dataclasses.replace(rotation, r1=rotations[0].r1) for rotation in rotations]
    rotate_model(model, rotations if place else shared, place)
    expected = model(tokens).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens).logits, expected)
        assert type(other.model.layers[0]).__name__ == "LlamaDecoderLayer"
        names = set(other.state_dict())
        assert {"model.layers.2.mlp.down_rotation.weight", "model.layers.2.mlp.down_proj.weight"} <= names
        assert "model.layers.0.post_attention_layernorm.weight" not in names  # a stock model lacks a tensor
    stock = small_model("llama", dtype=torch.float64)
    for layer in model.model.layers:
        remove_down_rotation(layer)
        if rotation_place(layer) is not None:
            remove_boundary_rotation(layer)
    assert {type(each) for each in model.modules()} == {type(each) for each in stock.modules()}
    assert model.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize(
    ("size", "near"), [(5, "4 or 6"), (40, "24 or 48"), (64, "48"), (49, "48")], ids=lambda value: str(value)
)
def test_a_bad_size_of_a_block_names_the_sizes_near_it(size, near):
    with pytest.raises(UserError, match=f"must divide the intermediate size 48; got {size}: use {near}$"):
        DecoderModel(small_model("llama")).layers[0].expect_down_rotation(size)


@pytest.mark.parametrize("place", ["input", "residual"])
@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_check_model_passes_and_does_not_change_the_model(family, place):
    model = small_model(family)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    tied = model.config.tie_word_embeddings
    assert 0 < check_model(model, place) < 1e-5
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.config.tie_word_embeddings == tied


@pytest.mark.parametrize("where", [0, 2])
def test_check_model_names_the_layer_that_fails(monkeypatch, where):
    rotate = DecoderLayer.rotate

    def wrong(layer, *args, **kwargs):
        rotate(layer, *args, **kwargs)
        if layer.index == where:
            layer.linears["o_proj"].weight[0] += 0.05

    monkeypatch.setattr(DecoderLayer, "rotate", wrong)
    with pytest.raises(InvarianceError, match=f"layer {where}: "):
        check_model(small_model("llama"))


def test_check_model_names_the_layer_whose_boundary_is_wrong(monkeypatch):
    rotate = DecoderLayer.rotate

    def wrong(layer, rotation, boundary, **kwargs):
        if layer.index == 1:
            boundary = dataclasses.replace(boundary, next_r1=rotation.r1)
        rotate(layer, rotation, boundary, **kwargs)

    monkeypatch.setattr(DecoderLayer, "rotate", wrong)
    with pytest.raises(InvarianceError, match="layer 1: "):
        check_model(small_model("llama"), "residual")


def test_check_model_names_lm_head_when_the_ends_fail(monkeypatch):
    monkeypatch.setattr(invariance, "rotate_head", lambda *args: None)
    with pytest.raises(InvarianceError, match="lm_head: "):
        check_model(small_model("llama"))


def test_merging_rounds_once():
    """The rotated fp32 weights are the fp64 products, rounded once."""
    model = small_model("llama")
    layer, rotation = model.model.layers[0], random_rotations(model)[0]
    exact = layer.mlp.up_proj.weight.double() * layer.post_attention_layernorm.weight.double() @ rotation.r1
    DecoderModel(model).layers[0].rotate(rotation)
    assert torch.equal(layer.mlp.up_proj.weight, exact.float())
    assert torch.equal(layer.post_attention_layernorm.weight, torch.ones(32))


#: families whose weights are merged in other ways: fused, with biases or shifts, experts, Mambas
MERGED = "llama-biased", "phi3", "gemma2", "opt", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h"


@pytest.mark.parametrize("family", MERGED)
def test_merging_where_fp64_is_slow(family):
    """Weights and biases differ by rounding in fp32 alone; in bf16 next to none differs, by its last bit."""
    exact, bits = small_model(family, dtype=torch.float64), {}
    start = {key: value.clone() for key, value in exact.state_dict().items()}
    rotate_model(exact)
    for dtype, most in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        model = small_model(family, dtype=dtype)
        model.load_state_dict(start)
        rotate_model(model, dtype=torch.float32)
        for (name, found), want in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert (found.double() - want).norm() <= most * want.norm(), name
        bits[dtype] = torch.cat([each.bfloat16().flatten() for each in model.parameters()])
    assert (bits[torch.float32] != bits[torch.float64]).double().mean() < 2e-3


def test_heads_share_the_rotation_of_their_kv_head():
    """The R2 of a KV head changes only the rows of v of that head and the columns of o of its query heads."""
    model = small_model("llama")
    layer = model.model.layers[0]
    v, o = layer.self_attn.v_proj.weight.clone(), layer.self_attn.o_proj.weight.clone()
    r2 = torch.eye(12, dtype=torch.float64).repeat(2, 1, 1)
    r2[1] = random_rotations(model)[0].r2[1]
    layer.input_layernorm.weight.fill_(1)
    DecoderModel(model).layers[0].rotate(LayerRotation(torch.eye(32, dtype=torch.float64), r2))
    assert torch.equal(layer.self_attn.v_proj.weight[:12], v[:12])
    assert not torch.allclose(layer.self_attn.v_proj.weight[12:], v[12:])
    assert torch.equal(layer.self_attn.o_proj.weight[:, :24], o[:, :24])
    assert not torch.allclose(layer.self_attn.o_proj.weight[:, 24:], o[:, 24:])


def test_an_unsupported_family_is_refused_by_name():
    model = small_model("llama")
    model.config.model_type = "gpt2"
    with pytest.raises(UserError, match="'gpt2' is not supported"):
        DecoderModel(model)


def test_a_family_that_needs_a_newer_transformers_is_refused(monkeypatch):
    model = small_model("qwen3_5_text")
    monkeypatch.delattr(core_model_loading, "PrefixChange")
    with pytest.raises(UserError, match="'qwen3_5_text' needs a newer transformers"):
        DecoderModel(model)


def test_a_kind_of_opt_that_no_rotation_fits_is_refused():
    model = small_model("opt")
    model.config.do_layer_norm_before = False
    with pytest.raises(
        UserError, match=r"'opt' must have do_layer_norm_before=True in its config, got False"
    ):
        DecoderModel(model)
    with pytest.raises(UserError, match=r"embed_tokens must have 32 columns, the hidden size, got 24"):
        DecoderModel(small_model("opt", word_embed_proj_dim=24)).check()
    model = small_model("opt")
    model.model.decoder.final_layer_norm.weight[3] = 0
    with pytest.raises(UserError, match=r"final_layer_norm.weight must hold no zero"):
        DecoderModel(model).check()


def test_gemma_4_without_experts_may_name_some():
    model = small_model("gemma4_text", enable_moe_block=False, num_experts=4, top_k_experts=2)
    decoder = DecoderModel(model)
    decoder.check()
    assert decoder.family.experts is None and "experts.0.gate_proj" not in decoder.layers[0].linears


def test_a_changed_model_is_refused_with_the_path():
    model = small_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.up_proj = torch.nn.Linear(32, 40, bias=False)
    with pytest.raises(UserError, match="layer 1: up_proj must be"):
        DecoderModel(model).check()
    mlp.up_proj = torch.nn.Identity()
    with pytest.raises(UserError, match=r"mlp\.up_proj must be a plain torch\.nn\.Linear, got Identity"):
        DecoderModel(model).check()
    del mlp.up_proj
    with pytest.raises(UserError, match=r"no module 'mlp\.up_proj'"):
        DecoderModel(model).check()


def test_a_few_tokens_may_take_other_experts():
    """Rounding chooses where two experts score alike."""
    expected = torch.randn(1, 40, 8)
    got = expected.clone()
    got[0, :2] += 1
    assert invariance._rerouted(got, expected).flatten().nonzero().flatten().tolist() == [0, 1]
    got[0, 2] += 1
    assert not invariance._rerouted(got, expected).any()


def test_other_experts_of_a_token_do_not_stop_a_run(monkeypatch):
    """Of one layer: the next layers go on with the outputs of the original model."""
    model, real = small_model("qwen3_moe"), CalibrationStream.advance
    calls = []

    def advance(stream, layer):
        real(stream, layer)
        calls.append(layer.index)
        if calls.count(1) == 2 and len(calls) == 4:  # of the rotated layer 1
            stream.hidden_states[0, 0] += 1

    monkeypatch.setattr(CalibrationStream, "advance", advance)
    for place in ("input", "residual"):
        calls.clear()
        assert check_model(model, place, 8) < 1e-5
        assert calls[:4] == [0, 0, 1, 1]
    monkeypatch.setattr(invariance, "REROUTED_SHARE", 0.0)
    calls.clear()
    with pytest.raises(InvarianceError, match="layer 1"):
        check_model(model, down_block=8)
