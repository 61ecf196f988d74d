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
    saved_tensors,
)
from safetensors.torch import load_file, save_file
from small_models import (
    random_rotations,
    random_tokens,
    relative_error,
    rotate_model,
    save_small_model,
    small_model,
)
from small_multimodal import save_small_multimodal
from transformers import AutoModelForCausalLM

import drot
from drot.calibration.hessian import HessianAccumulator
from drot.calibration.stream import CalibrationStream
from drot.core.errors import UserError
from drot.model.decoder import DecoderModel
from drot.model.families import family_of
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


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "changes",
    [
        dict(attention_k_eq_v=True, layer_types=[FULL, SLIDING, FULL, SLIDING, FULL]),
        dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16),
    ],
)
def test_random_rotations_leave_the_logits(changes):
    """Also where lent keys are lent values too, and with experts beside the MLP."""
    changes |= dict(num_hidden_layers=len(changes.get("layer_types", "123")))
    model, tokens = small_model(FAMILY, **changes), random_tokens(2, 30, seed=5)
    logits = model(tokens).logits
    rotate_model(model, random_rotations(model, down_block=16))
    assert relative_error(model(tokens).logits, logits) < 1e-5


@pytest.mark.parametrize("count", [-1, 3, 4])
def test_layers_that_borrow_what_none_lends_are_refused(count):
    config = small_model(FAMILY).config
    config.num_kv_shared_layers = count
    with pytest.raises(UserError, match=f"that leaves one of each of its layer_types .* got {count}"):
        family_of(config)
    config.num_kv_shared_layers, config.hidden_size_per_layer_input = 1, 0
    with pytest.raises(UserError, match="must have a hidden_size_per_layer_input above 0; got 0"):
        family_of(config)


@pytest.mark.parametrize("multimodal", [False, True])
def test_files_may_hold_what_the_last_layers_do_not_read(multimodal, tmp_path):
    """As the published files: keys and values of their own of the layers that borrow them."""
    folder = tmp_path / "source"
    if multimodal:
        save_small_multimodal(folder, "gemma4-lends")
    else:
        save_small_model(small_model(FAMILY), folder)
    logits = drot.load(folder, device="cpu")(TOKENS).logits
    file = folder / "model.safetensors"
    tensors = load_file(file)
    unread = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1.self_attn.k_" in name or "layers.1.self_attn.v_proj" in name
    }
    assert len(unread) == 3 and not unread.keys() & tensors.keys()
    save_file(tensors | unread, file, {"format": "pt"})
    assert torch.equal(drot.load(folder, device="cpu")(TOKENS).logits, logits)
    prune(folder, one_shot(), out=tmp_path / "out", format="packed")
    assert not unread.keys() & saved_tensors(tmp_path / "out").keys()
    assert drot.load(tmp_path / "out", device="cpu")(TOKENS).logits.isfinite().all()


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
    keys = stream.lent.of(slice(None))[FULL][0].clone()
    model.layers[1].linears["k_proj"].weight.mul_(-1)
    copy.advance(model.layers[1])
    assert torch.equal(stream.lent.of(slice(None))[FULL][0], keys)
    assert not torch.equal(copy.lent.of(slice(None))[FULL][0], keys)
    assert torch.equal(*(one.lent.of(slice(3))[SLIDING][1] for one in (copy, stream)))


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
