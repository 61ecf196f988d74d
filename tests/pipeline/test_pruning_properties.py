"""Pruned models have the pattern of their recipe and come back from disk: random models and recipes."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from random_models import build, settings_of_models, tokens_for
from runs import named_linears, saved_bytes
from small_models import INSIDE, relative_error
from transformers import AutoModelForCausalLM

import drot
from drot.checkpoint.convert import convert
from drot.config import PruningConfig, Recipe, RecoveryConfig, RotationConfig, matches
from drot.model.families import linears_of
from drot.sparse.packed import PACKABLE, unpack_model

pytestmark = pytest.mark.slow
#: of several choices, the first is that of the first example
KEEP = [("*.self_attn.*", "up_proj"), ("layers.0.*",), ("down_proj",)]


@st.composite
def rotations_of(draw):
    """A RotationConfig of every mode, trained for two steps."""
    mode = draw(st.sampled_from(["layer", "shared", "none"]))
    if mode == "none":
        return RotationConfig(mode="none")
    options = dict(mode=mode, steps=2, blocks=draw(st.sampled_from([1, 2])))
    options["objective"] = draw(st.sampled_from(["pruned", "entropy"]))
    options["optimizer"] = draw(st.sampled_from(["fast", "paper"]))
    if mode == "layer" and draw(st.booleans()):
        options |= dict(hessians="dense", boundary=draw(st.sampled_from(["input", "residual"])))
    return RotationConfig(**options)


@st.composite
def recipes(draw, sparsities):
    return Recipe(
        rotation=draw(rotations_of()),
        pruning=PruningConfig(
            method=draw(st.sampled_from(["sparsegpt", "wanda", "magnitude"])),
            sparsity=draw(st.sampled_from(sparsities)),
            keep=draw(st.sampled_from([(), *KEEP])),
            sparsity_of=draw(st.sampled_from([(), ("q_proj=1:4",), ("o_proj=0.3", "*.0.mlp.*=3:4")])),
            solve=draw(st.sampled_from(["pcg", "admm", "none", "sparsegpt", "auto"])),
            target=draw(st.sampled_from(["auto", "self", "dense"])),
        ),
        recovery=RecoveryConfig(recover=draw(st.sampled_from(["none", "block"])), recover_epochs=1),
    )


def prune(settings, recipe, **options):
    if settings["family"] in INSIDE and recipe.rotation.boundary != "auto":
        recipe = recipe.replace(boundary="auto")
    model = build(settings)
    # a pattern that matches no linear is refused, and OPT has no down_proj
    names = [name for name, _, _ in linears_of(model.config)]
    present = [pattern for pattern in recipe.pruning.keep if any(matches(pattern, name) for name in names)]
    chosen = [pair for pair in recipe.pruning.sparsity_of if any(matches(pair[0], name) for name in names)]
    recipe = recipe.replace(keep=present, sparsity_of=chosen)
    return drot.prune(
        model, recipe, calibration=tokens_for(settings, rows=4, seed=1), device="cpu", **options
    )


def check_pattern(name, zeros, pruning, sparsity):
    """Asserts that `zeros` [out, in] has exactly the zeros that the recipe demands."""
    if sparsity.structured:
        assert (zeros.unflatten(1, (-1, sparsity.m)).sum(-1) == sparsity.m - sparsity.n).all(), name
    elif sparsity.ratio == 0:
        assert not zeros.any(), name
    elif pruning.method == "wanda":
        assert_count = zeros.sum(1) == int(zeros.shape[1] * sparsity.ratio)
        # ADMM chooses the mask over the whole matrix, if its error is smaller
        whole = int(zeros.sum()) == int(zeros.numel() * sparsity.ratio)
        assert assert_count.all() or whole, name
    else:
        # a matrix, or a block of columns, loses int(weights · ratio) weights
        width = pruning.block_size if pruning.method == "sparsegpt" else zeros.shape[1]
        blocks = [int(block.numel() * sparsity.ratio) for block in zeros.split(width, 1)]
        assert int(zeros.sum()) in (sum(blocks), int(zeros.numel() * sparsity.ratio)), name


@given(settings=settings_of_models(), recipe=recipes(["2:4", "0.3", "1:4", "1:2", "0.57"]))
def test_every_weight_has_the_sparsity_of_its_linear(settings, recipe):
    result = prune(settings, recipe)
    for name, linear in named_linears(result.model).items():
        check_pattern(name, linear.weight == 0, recipe.pruning, recipe.pruning.sparsity_for(name))
        assert torch.isfinite(linear.weight).all()


@given(settings=settings_of_models(), rotation=rotations_of(), keep=st.sampled_from(KEEP))
def test_linears_to_keep_are_rotated_and_not_changed(settings, rotation, keep):
    """They are those of a run that prunes nothing and has the same rotations."""
    settings = settings | {"dtype": torch.float32}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rotations.safetensors"
        options = {} if rotation.mode == "none" else {"rotations": file}
        if options:
            prune(settings, Recipe(rotation=rotation), save_rotations_to=file)
        nothing = Recipe(rotation=rotation, pruning=PruningConfig(sparsity="0"))
        dense = named_linears(prune(settings, nothing, **options).model)
        kept = Recipe(rotation=rotation, pruning=PruningConfig(sparsity="2:4", keep=keep))
        for name, linear in named_linears(prune(settings, kept, **options).model).items():
            if kept.pruning.keeps(name):
                assert torch.equal(linear.weight, dense[name].weight), name


@given(settings=settings_of_models(), rotation=rotations_of())
def test_a_run_that_prunes_nothing_changes_no_logits(settings, rotation):
    tokens = tokens_for(settings)
    before = build(settings)(tokens).logits
    recipe = Recipe(rotation=rotation, pruning=PruningConfig(sparsity="0"))
    error = relative_error(prune(settings, recipe).model(tokens).logits, before)
    assert error < (1e-4 if settings["dtype"] == torch.float32 else 0.15)


def same_logits(a, b, tokens):
    return torch.equal(a(tokens).logits, b(tokens).logits)


@given(settings=settings_of_models(), recipe=recipes(["2:4", "0.5"]))
def test_a_dense_checkpoint_is_the_model_in_memory(settings, recipe):
    tokens = tokens_for(settings)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        model = prune(settings, recipe, out=out).model
        loaded = drot.load(out, device="cpu")
        assert loaded.dtype == settings["dtype"]
        assert same_logits(loaded, model, tokens)
        assert same_logits(AutoModelForCausalLM.from_pretrained(out, dtype="auto"), model, tokens)


@given(settings=settings_of_models(multiple=8), recipe=recipes(["2:4"]))
def test_a_packed_checkpoint_is_the_model_in_memory(settings, recipe):
    """The packed product rounds in another order than the dense product. So does the fused product."""
    tokens = tokens_for(settings)
    exact = settings["dtype"] == torch.float32
    # `keep` and `sparsity_of` together may leave nothing to pack, which is refused
    assume(any(recipe.pruning.sparsity_for(name) == PACKABLE for name in named_linears(build(settings))))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = prune(settings, recipe, out=folder / "packed", format="packed").model
        fused = drot.load(folder / "packed", device="cpu")
        opened = AutoModelForCausalLM.from_pretrained(folder / "packed", dtype="auto")
        assert same_logits(opened, fused, tokens)
        assert relative_error(fused(tokens).logits, model(tokens).logits) < (1e-5 if exact else 0.05)
        convert(folder / "packed", folder / "dense", "dense")
        convert(folder / "dense", folder / "again", "packed")
        unpack_model(model)
        assert same_logits(drot.load(folder / "dense", device="cpu"), model, tokens)
        assert saved_bytes(folder / "again") == saved_bytes(folder / "packed")
        one, two = ((folder / name / "config.json").read_bytes() for name in ("again", "packed"))
        assert one == two
