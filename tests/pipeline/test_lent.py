"""Gemma 4 E2B and E4B: layers read the keys of an earlier layer, and an embedding of their own of a token."""

import pytest
import torch
from runs import (
    TOKENS,
    assert_patterns,
    interrupted,
    named_linears,
    one_shot,
    prune,
    recipe,
    saved_bytes,
)
from small_models import random_tokens, relative_error, save_small_model, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.calibration.hessian import HessianAccumulator
from drot.calibration.stream import CalibrationStream
from drot.model.decoder import DecoderModel
from drot.pipeline import distill

pytestmark = pytest.mark.slow
FAMILY = "gemma4_text-lends"
CPU = torch.device("cpu")


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("fields", [{}, {"mode": "stock"}, {"quality": "best", "recover": "block"}], ids=str)
def test_a_run_keeps_the_function_and_prunes(fields, format, tmp_path):
    """The run itself checks that the rotations change no outputs. The files open in transformers."""
    source = save_small_model(small_model(FAMILY), tmp_path / "source")
    chosen = recipe(**{"recover_epochs": 1, "down_rotation": "auto"} | fields)
    result = prune(source, chosen, out=tmp_path / "out", format=format)
    assert {linear.sparsity for layer in result.manifest.layers for linear in layer.linears.values()} == {0.5}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded, tokens = drot.load(tmp_path / "out", device="cpu"), random_tokens(2, 30, seed=5)
    assert torch.equal(opened(tokens).logits, loaded(tokens).logits)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    text = opened.generate(tokens, use_cache=False, **options)
    assert torch.equal(loaded.generate(tokens, **options), text)
    if format == "dense":
        assert_patterns(opened, chosen.pruning)


def test_nothing_removed_leaves_the_logits():
    model, tokens = small_model(FAMILY), random_tokens(2, 30, seed=5)
    logits = model(tokens).logits
    prune(model, one_shot(sparsity=0.0, down_rotation="auto"))
    assert relative_error(model(tokens).logits, logits) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_is_pruned_with_the_keys_of_the_pruned_layer_before_it(layer):
    """The error of o_proj is that on the inputs which the whole pruned model gives it.

    Layer 2 reads the keys and values of layer 1. Both are given by the model whose o_proj is still dense.
    """
    dense, pruned = small_model(FAMILY), small_model(FAMILY)
    result = prune(pruned, one_shot("none"))
    name, seen = f"layers.{layer}.self_attn.o_proj", HessianAccumulator(64, CPU)
    weight, before = named_linears(pruned)[name].weight.clone(), named_linears(dense)[name].weight
    hook = named_linears(pruned)[name].module.register_forward_pre_hook(lambda _, args: seen.add(args[0]))
    pruned(TOKENS)
    hook.remove()
    hessian = seen.hessian(len(TOKENS)).double()
    change = (weight - before).double()
    expected = ((change @ hessian) * change).sum() / ((before.double() @ hessian) * before).sum()
    found = result.manifest.layers[layer].linears["o_proj"].output_error
    assert found == pytest.approx(float(expected), rel=1e-3)


@torch.no_grad()
def test_streams_do_not_share_what_their_layers_lend():
    """A copy reads what was lent before it, and keeps what is lent to it."""
    model = DecoderModel(small_model(FAMILY))
    stream = CalibrationStream.embed(model, TOKENS, CPU)
    stream.advance(model.layers[0])
    copy = stream.copy()
    stream.advance(model.layers[1])
    keys = stream.lent.read("full_attention", slice(None))[0].clone()
    model.layers[1].linears["k_proj"].weight.mul_(-1)
    copy.advance(model.layers[1])
    assert torch.equal(stream.lent.read("full_attention", slice(None))[0], keys)
    assert not torch.equal(copy.lent.read("full_attention", slice(None))[0], keys)
    assert torch.equal(*(one.lent.read("sliding_attention", slice(3))[1] for one in (copy, stream)))


@pytest.mark.parametrize("at", [("prune", 2), ("distill",)], ids=str)
def test_a_resumed_run_and_one_with_little_memory_give_the_same_bytes(at, tmp_path, monkeypatch):
    source = save_small_model(small_model(FAMILY), tmp_path / "source")
    chosen = recipe(quality="best", distill_lr=3e-3)
    prune(source, chosen, out=tmp_path / "whole")
    interrupted(source, chosen, at=at, out=tmp_path / "out")
    prune(source, chosen, out=tmp_path / "out", resume=True)
    assert saved_bytes(tmp_path / "out") == saved_bytes(tmp_path / "whole")
    needed = distill._needed
    monkeypatch.setattr(
        distill, "_needed", lambda run, keeps=False: 1 << 60 if keeps else needed(run, keeps=keeps)
    )
    again = prune(source, chosen, out=tmp_path / "again")
    assert again.manifest.distillation.trained
    assert saved_bytes(tmp_path / "again") == saved_bytes(tmp_path / "whole")
