"""The declarations of families: paths, names and shapes, and linears that are slices of fused modules."""

import re
from typing import get_args

import pytest
import torch
from runs import TOKENS, assert_patterns, named_linears, one_shot, prune
from small_models import random_rotations, random_tokens, relative_error, rotate_model, small_model
from torch import nn

from drot.core.errors import UserError
from drot.model.decoder import DecoderModel
from drot.model.dense import LLAMA
from drot.model.families import FAMILIES, linears_of
from drot.model.rotation import LayerRotation
from drot.model.sizes import Width, experts_of, routed_share


@pytest.fixture
def phi3():
    """A small random model whose linears that read one input are one module."""
    return small_model("phi3")


# ---- every declared family ---------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_declared_parts_exist(model_type):
    model = DecoderModel(small_model(model_type))
    model.check()
    linears = [linear for layer in model.layers for linear in layer.linears.values()]
    assert list(linears_of(model.config)) == [
        (linear.full_name, linear.spec, tuple(linear.weight.shape)) for linear in linears
    ]
    names = named_linears(model.model)
    assert len(names) == sum(len(layer.linears) for layer in model.layers)
    assert all(re.fullmatch(r"layers\.[0-2](\.\w+)+", name) for name in names)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_declaration_is_consistent(family):
    """The linears of a group share their input, and each rotation has the width of what it rotates."""
    plain = set(get_args(Width)) - {"experts"}
    widths = {None: plain, "r1": {"hidden"}, "r2": {"query", "kv"}, "r3": {"mlp", "expert", "shared"}}
    for group in family.groups:
        assert len({(linear.input, linear.shape[1]) for linear in group.linears}) == 1
        assert group.norm is None or group.input == "r1"
    written = {linear.output for linear in family.linears if linear.writes_residual}
    assert written == ({"r1"} if family.post_norms is None else {None})
    assert family.rotates_stream == (written == {"r1"})
    for linear in family.linears:
        outputs, inputs = linear.shape
        assert inputs in widths[linear.input] and outputs in widths[linear.output]
    if not family.one_block:
        assert [group.name for group in family.groups if group.writes_residual][:2] == ["o", "down"]


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if not family.experts])
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


def paths_of(layer):
    return {linear.path for linear in layer.family.linears}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite", "deepseek_v2"])
@pytest.mark.parametrize("rank", [24, None])
def test_queries_have_a_latent_or_not(model_type, rank):
    model = small_model(model_type, q_lora_rank=rank)
    tokens = random_tokens(2, 30)
    logits = model(tokens).logits
    layers = DecoderModel(model).layers
    latent = {"self_attn.q_a_proj", "self_attn.q_b_proj"}
    for layer in layers:
        found = {path for path in paths_of(layer) if path.startswith("self_attn.q_")}
        assert found == ({"self_attn.q_proj"} if rank is None else latent)
    DecoderModel(model).check()
    rotate_model(model)
    assert relative_error(model(tokens).logits, logits) < 1e-5
    result = prune(model, chosen := one_shot("none"))
    assert_patterns(result.model, chosen.pruning)


@pytest.mark.parametrize("count", [0, 1])
def test_shared_experts_are_there_or_not(count):
    layers = DecoderModel(small_model("ernie4_5_moe", moe_num_shared_experts=count)).layers
    assert [any("shared" in path for path in paths_of(layer)) for layer in layers] == [
        False,
        *2 * [count > 0],
    ]


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        (dict(moe_layer_start_index=0), []),
        (dict(moe_layer_start_index=1, moe_layer_end_index=1), [0, 2]),
        (dict(moe_layer_start_index=0, moe_layer_interval=2), [0, 2]),
    ],
)
def test_the_layers_of_ernie_without_experts(settings, dense):
    model = small_model("ernie4_5_moe", **settings)
    DecoderModel(model).check()
    layers = DecoderModel(model).layers
    assert [layer.index for layer in layers if layer.family.experts is None] == dense
    assert [i for i, layer in enumerate(model.model.layers) if not hasattr(layer.mlp, "experts")] == dense


def test_an_entry_that_a_family_does_not_read_changes_nothing():
    """All layers of Solar Open have experts, also if its config says how many have none."""
    model = small_model("solar_open")
    model.config.first_k_dense_replace = 2
    DecoderModel(model).check()


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("olmoe", dict(clip_qkv=8.0)),
        ("ernie4_5_moe", dict(use_bias=True)),
        ("glm_moe_dsa", dict(indexer_types=["full", "shared", "shared", "full"])),
    ],
)
def test_a_setting_that_no_rotation_fits_is_refused(model_type, settings):
    model = small_model(model_type, **settings)
    ((name, value),) = settings.items()
    got = re.escape(str(value))
    with pytest.raises(UserError, match=f"'{model_type}' must have {name}=.* in its config, got {got}"):
        DecoderModel(model)


def test_a_dense_model_whose_config_counts_one_expert():
    """Hunyuan's dense models are published with this entry."""
    model = small_model("hunyuan_v1_dense", num_experts=1)
    assert experts_of(model.config) == 0 and routed_share(model.config) == 1.0


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
    modules = [(linears[0].module_name, linears[0].plain.out_features) for linears in layer.modules]
    assert modules == [("qkv_proj", 64), ("o_proj", 32), ("gate_up_proj", 96), ("down_proj", 32)]


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


def test_a_fused_module_of_another_size_is_refused(phi3):
    """Its last slice would be cut out of the wrong rows."""
    phi3.model.layers[1].self_attn.qkv_proj = nn.Linear(32, 72, bias=False)
    with pytest.raises(UserError, match=r"layer 1: qkv_proj must be \[64, 32\] by .* config, got \[72, 32\]"):
        DecoderModel(phi3).check()
