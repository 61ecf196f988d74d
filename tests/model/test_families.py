"""The declarations of families: paths, names and shapes, and linears that are slices of fused modules."""

import re

import pytest
import torch
from runs import TOKENS, assert_patterns, named_linears, one_shot, prune
from small_models import COMMON, random_rotations, random_tokens, relative_error, rotate_model, small_model
from transformers import Phi3Config, Phi3ForCausalLM

from drot.model import families
from drot.model.decoder import DecoderModel
from drot.model.families import FAMILIES, LLAMA, Family, InputGroup, LinearSpec
from drot.model.rotation import LayerRotation

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
PHI3 = Family(
    attention="self_attn",
    mlp="mlp",
    groups=(
        InputGroup(
            name="attention",
            norm="input_layernorm",
            linears=(
                LinearSpec(QKV, ("query", "hidden"), input="r1", part="q_proj"),
                LinearSpec(QKV, ("kv", "hidden"), input="r1", part="k_proj"),
                LinearSpec(QKV, ("kv", "hidden"), input="r1", output="r2", part="v_proj"),
            ),
        ),
        LLAMA.groups[1],
        InputGroup(
            name="mlp",
            norm="post_attention_layernorm",
            linears=(
                LinearSpec(GATE_UP, ("mlp", "hidden"), input="r1", part="gate_proj"),
                LinearSpec(GATE_UP, ("mlp", "hidden"), input="r1", part="up_proj"),
            ),
        ),
        LLAMA.groups[3],
    ),
)


@pytest.fixture
def phi3(monkeypatch):
    """A small random model whose linears that read one input are one module."""
    monkeypatch.setitem(families.FAMILIES, "phi3", PHI3)
    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**COMMON, pad_token_id=0, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.normal_(0, 0.15)
    return model.eval().requires_grad_(False)


# ---- every declared family ---------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_declared_parts_exist(model_type):
    model = DecoderModel(small_model(model_type))
    model.check()
    assert list(model.family.names(3)) == [
        (linear.full_name, linear.spec) for layer in model.layers for linear in layer.linears.values()
    ]
    names = named_linears(model.model)
    assert len(names) == 3 * len(model.family.linears)
    assert all(re.fullmatch(r"layers\.[0-2](\.\w+)+", name) for name in names)
    for layer in model.layers:
        for linear in layer.linears.values():
            assert tuple(linear.weight.shape) == layer.shape_of(linear.spec)


@pytest.mark.parametrize("family", [*FAMILIES.values(), PHI3], ids=[*FAMILIES, "phi3"])
def test_a_declaration_is_consistent(family):
    """The linears of a group share their input, and each rotation has the width of what it rotates."""
    widths = {None: {"hidden", "query", "kv", "mlp"}, "r1": {"hidden"}, "r2": {"query", "kv"}}
    for group in family.groups:
        assert len({(linear.input, linear.shape[1]) for linear in group.linears}) == 1
        assert group.norm is None or group.input == "r1"
    for linear in family.linears:
        outputs, inputs = linear.shape
        assert inputs in widths[linear.input] and outputs in widths[linear.output]
    assert [group.name for group in family.groups if group.writes_residual] == ["o", "down"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_linears_of_a_group_read_the_output_of_its_norm(model_type):
    model = small_model(model_type)
    layer, inputs, outputs = DecoderModel(model).layers[1], {}, {}
    for linear in layer.linears.values():
        linear.module.register_forward_pre_hook(
            lambda module, args, name=linear.name: inputs.update({name: args[0]})
        )
    for path, norm in zip(layer.family.norms, layer.norms, strict=True):
        norm.register_forward_hook(lambda module, args, out, path=path: outputs.update({path: out}))
    model(TOKENS)
    for group in layer.groups:
        first, *others = (inputs[spec.name] for spec in group.linears)
        assert all(torch.equal(other, first) for other in others)
        assert group.norm is None or torch.equal(outputs[group.norm], first)


# ---- slices of fused modules -------------------------------------------------------------------------


def test_slices_are_views_of_the_fused_weight(phi3):
    layer = DecoderModel(phi3).layers[1]
    fused = layer.module.self_attn.qkv_proj.weight
    slices = [layer.linears[name].weight for name in ("q_proj", "k_proj", "v_proj")]
    assert [len(weight) for weight in slices] == [32, 16, 16]
    assert torch.equal(torch.cat(slices), fused)
    layer.linears["k_proj"].weight.zero_()
    assert torch.equal((fused == 0).all(1).nonzero()[:, 0], torch.arange(32, 48))
    assert layer.linears["up_proj"].full_name == "layers.1.mlp.up_proj"
    assert [module.out_features for module in layer.modules_of_linears] == [64, 32, 96, 32]


@pytest.mark.parametrize("place", ["input", "residual", None])
def test_rotations_of_slices_change_no_logits(phi3, place):
    tokens = random_tokens(2, 30)
    before, weight = phi3(tokens).logits, phi3.model.layers[1].self_attn.qkv_proj.weight.clone()
    rotations = random_rotations(phi3)
    if place is None:
        rotations = [LayerRotation(rotations[0].r1, rotation.r2) for rotation in rotations]
    rotate_model(phi3, rotations, place)
    assert relative_error(phi3(tokens).logits, before) < 1e-5
    assert relative_error(phi3.model.layers[1].self_attn.qkv_proj.weight, weight) > 0.5


def test_slices_are_pruned_one_by_one(phi3):
    """k_proj stays dense inside a module whose other rows are 2:4."""
    chosen = one_shot(keep=("k_proj",), sparsity_of={"up_proj": "1:4"})
    result = prune(phi3, chosen)
    assert_patterns(result.model, chosen.pruning)
    assert list(result.manifest.layers[0].linears) == [linear.name for linear in LLAMA.linears]
    assert result.manifest.relative_logit_error < 1e-5
