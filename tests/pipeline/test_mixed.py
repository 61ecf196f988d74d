"""Mixed patterns: linears that stay dense, or that have another n:m or ratio than the rest."""

import json

import pytest
import torch
from runs import (
    TOKENS,
    assert_patterns,
    interrupted,
    named_linears,
    prune,
)
from runs import recipe as small_recipe
from small_models import random_tokens, relative_error, small_model

from drot.checkpoint.records import LinearRecord
from drot.checkpoint.rotations import open_rotations
from drot.config import PruningConfig, Recipe, Sparsity, resolve
from drot.core.errors import UserError
from drot.core.events import silent
from drot.model.decoder import DecoderModel
from drot.pipeline.context import RunContext
from drot.pipeline.training import _objectives

pytestmark = pytest.mark.slow

MIXED = dict(keep=("layers.0.*", "layers.2.mlp.up_proj"), sparsity_of={"down_proj": "4:8", "o_proj": "0.25"})
RESIDUAL = dict(boundary="residual", hessians="dense")


def recipe(mode="layer", **fields):
    return small_recipe(mode, **MIXED | fields)


# ---- the settings --------------------------------------------------------------------------------


def test_keep_goes_first_and_the_last_sparsity_is_used():
    config = PruningConfig(
        keep=["layers.0.*", "k_proj"], sparsity_of=["*_proj=1:4", "layers.1.mlp.*=4:8", "up_proj=0.5"]
    )
    expected = {
        "layers.0.mlp.up_proj": "0",
        "layers.1.self_attn.k_proj": "0",
        "layers.1.self_attn.q_proj": "1:4",
        "layers.1.mlp.gate_proj": "4:8",
        "layers.1.mlp.up_proj": "0.5",
        "layers.10.mlp.up_proj": "0.5",
    }
    assert {name: str(config.sparsity_for(name)) for name in expected} == expected
    assert [name for name in expected if config.keeps(name)] == list(expected)[:2]
    case = PruningConfig(keep=("Q_proj", "layers.0", "self_attn.q_proj"))
    assert not case.keeps("layers.0.self_attn.q_proj")


def test_equal_settings_in_all_their_forms():
    pair = (("down_proj", Sparsity.parse("4:8")),)
    forms = ({"down_proj": "4:8"}, "down_proj=4:8", ["down_proj=4:8"], [("down_proj", "4:8")], pair)
    assert {PruningConfig(keep="q_proj", sparsity_of=form) for form in forms} == {
        PruningConfig(keep=("q_proj",), sparsity_of=pair)
    }
    written = Recipe(pruning=PruningConfig(**MIXED)).to_dict()
    assert json.loads(json.dumps(written)) == written
    assert PruningConfig(**written["pruning"]) == PruningConfig(**MIXED)
    assert PruningConfig().for_linear("layers.0.mlp.up_proj") == PruningConfig()
    one = PruningConfig(damping=0.1, **MIXED).for_linear("layers.1.mlp.down_proj")
    assert one == PruningConfig(damping=0.1, sparsity="4:8")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(sparsity_of=["down_proj"]), "`sparsity_of`"),
        (dict(sparsity_of=["=2:4"]), "`sparsity_of`"),
        (dict(sparsity_of=[("down_proj", "4:8", 1)]), "`sparsity_of`"),
        (dict(sparsity_of={"down_proj": "8:4"}), "down_proj in `sparsity_of` .* got '8:4'"),
        (dict(keep=[""]), "`keep`"),
    ],
)
def test_values_are_checked(settings, message):
    with pytest.raises(UserError, match=message):
        PruningConfig(**settings)


@pytest.mark.parametrize(
    ("pruning", "message"),
    [
        (dict(keep=("layers.3.*",)), "of `keep` matches no linear"),
        (dict(sparsity_of={"Down_proj": "4:8"}), "of `sparsity_of` matches no linear"),
        (dict(sparsity_of={"layers.1.mlp.down_proj": "2:32"}), "2:32 of layers.1.mlp.down_proj needs"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_weights_are_read(pruning, message, tmp_path):
    small_model("llama", head_dim=16).config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        prune(tmp_path, Recipe().replace(**pruning))
    assert "\n" not in str(caught.value)


def test_a_pattern_may_fit_where_it_is_used():
    """3:16 divides the inputs of every linear but o_proj, which has another sparsity."""
    chosen = small_recipe("none", method="wanda", sparsity="3:16", sparsity_of={"o_proj": "2:4"})
    assert_patterns(prune(small_model("llama", head_dim=10), chosen).model, chosen.pruning)


# ---- the run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "method"),
    [("none", "magnitude"), ("none", "sparsegpt"), ("layer", "wanda"), ("shared", "sparsegpt")],
)
def test_every_linear_has_its_own_pattern(mode, method):
    chosen = recipe(mode, method=method)
    model, dense = small_model("qwen3-biased"), named_linears(small_model("qwen3-biased"))
    result = prune(model, chosen)
    assert_patterns(result.model, chosen.pruning)
    layers, zeros, total = result.manifest.layers, 0, 0
    for name, linear in named_linears(result.model).items():
        _, index, _, role = name.split(".")
        figures, kept = layers[int(index)].linears[role], chosen.pruning.keeps(name)
        assert kept == (index == "0" or (index, role) == ("2", "up_proj"))
        if kept:
            assert figures == LinearRecord(sparsity=0.0, output_error=0.0, damping=None)
        else:
            assert figures.output_error > 0
        if kept and mode == "none":
            assert torch.equal(linear.weight, dense[name].weight)
        zeros, total = zeros + int((linear.weight == 0).sum()), total + linear.weight.numel()
    assert result.manifest.sparsity == zeros / total
    assert all(list(layer.linears) == [name.split(".")[-1] for name in dense][:7] for layer in layers)
    json.dumps(result.manifest.to_dict(), allow_nan=False)


@pytest.mark.parametrize("boundary", ["input", "residual"])
def test_kept_weights_are_the_dense_ones_rotated(boundary, tmp_path):
    """The kept weights are those of a run without sparsity and with the same rotations, bit for bit."""
    file = tmp_path / "rotations.safetensors"
    rotation = dict(boundary=boundary, hessians="dense")
    chosen, nothing = recipe(**rotation), small_recipe(method="wanda", sparsity=0.0, **rotation)
    mixed = prune(small_model("llama-biased"), chosen, save_rotations_to=file)
    again = prune(small_model("llama-biased"), chosen, rotations=file)
    rotated = prune(small_model("llama-biased"), nothing, rotations=file)
    assert_patterns(mixed.model, chosen.pruning)
    found, first = named_linears(again.model), named_linears(mixed.model)
    for name, linear in named_linears(rotated.model).items():
        if chosen.pruning.keeps(name):
            assert torch.equal(linear.weight, found[name].weight), name
            torch.testing.assert_close(linear.weight, first[name].weight, rtol=0, atol=1e-5)
    rotations, _ = open_rotations(file, DecoderModel(mixed.model))
    eye = torch.eye(32, dtype=torch.float64)
    assert torch.equal(rotations[0].r1, eye)  # nothing of layer 0 is pruned
    assert not torch.allclose(rotations[1].r1, eye, atol=0.1)


def test_a_layer_that_is_kept_takes_no_training_step():
    events = []
    manifest = prune(chosen=recipe(), progress=events.append).manifest
    trained = manifest.layers[0].rotation
    assert (trained.loss_curve, trained.entropy_before, trained.damping) == ([0.0], 0.0, {})
    assert len(manifest.layers[1].rotation.loss_curve) == 6
    assert not [event for event in events if (event.phase, event.layer) == ("rotate", 0) and event.step]


@pytest.mark.parametrize(("optimizer", "layers_per_step"), [("fast", 1), ("paper", 0)])
def test_a_shared_rotation_is_trained_without_the_kept_layers(optimizer, layers_per_step):
    """The loss is that of the other layers, and it falls; R2 of a kept layer stays the identity."""
    chosen = recipe("shared", optimizer=optimizer, layers_per_step=layers_per_step, steps=20)
    result = prune(chosen=chosen)
    trained = result.manifest.shared_rotation
    assert 0 < trained.loss_after < trained.loss_before
    assert all(loss > 0 for loss in trained.loss_curve)
    assert_patterns(result.model, recipe().pruning)


@pytest.mark.parametrize(("mode", "objective"), [("layer", "pruned"), ("shared", "entropy")])
def test_a_model_that_is_kept_whole_does_not_change(mode, objective):
    model, tokens = small_model("llama"), random_tokens(2, 30, seed=5)
    before = model(tokens).logits
    result = prune(model, recipe(mode, objective=objective, keep=("*",)))
    assert relative_error(result.model(tokens).logits, before) < 1e-5
    assert result.manifest.sparsity == 0


def test_only_one_linear_is_pruned():
    chosen = small_recipe(sparsity=0, sparsity_of={"down_proj": "2:4"})
    result = prune(small_model("mistral"), chosen)
    assert_patterns(result.model, chosen.pruning)
    for layer in result.manifest.layers:
        assert list(layer.rotation.damping) == ["down"]
        assert [role for role, figures in layer.linears.items() if figures.damping] == ["down_proj"]
        assert layer.rotation.loss_after < layer.rotation.loss_before


def test_a_kept_down_proj_is_trained_with_no_layer():
    """With rotations on the residual, a down_proj belongs to the next layer: it takes its pattern along."""
    own = dict(keep=("layers.0.mlp.down_proj",), sparsity_of={"layers.1.mlp.down_proj": "4:8"})
    chosen = recipe(**RESIDUAL, **own)
    context = RunContext(small_model("llama"), resolve(chosen), TOKENS, torch.device("cpu"), silent)
    found = [[str(down.sparsity) for down in part.left_rotated] for _, part, _ in _objectives(context, None)]
    assert found == [[], [], ["4:8", "2:4"]]


def test_a_run_with_other_linears_kept_is_not_resumed(tmp_path):
    chosen, out = recipe(hessians="sequential"), tmp_path / "out"
    interrupted(chosen=chosen, out=out)
    with pytest.raises(UserError, match="cannot resume .*: pruning.keep: "):
        prune(chosen=chosen.replace(keep=("layers.0.*",)), out=out, resume=True)


def test_layers_of_which_some_have_nothing_to_train():
    """Layer 0 and layer 2; an R1 of blocks."""
    chosen = recipe(hessians="dense", blocks=2, keep=("layers.[02].*",))
    assert_patterns(prune(chosen=chosen).model, chosen.pruning)
