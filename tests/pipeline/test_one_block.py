"""Models whose layers have one block each, as Nemotron-H: an attention, a Mamba, an MLP or experts."""

import pytest
import torch
from runs import TOKENS, assert_patterns, one_shot, prune, recipe, saved_tensors
from small_models import random_tokens, relative_error, save_small_model, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.model.decoder import DecoderModel
from drot.model.inputs import routed_inputs

pytestmark = pytest.mark.slow
NEMOTRONS = ("nemotron_h", "nemotron_h-latent", "nemotron_h-dense")


@pytest.mark.parametrize("sharing", [{}, {"layers_per_rotation": 2}, {"mode": "stock"}], ids=str)
@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("family", NEMOTRONS)
def test_a_run_keeps_the_function_and_prunes(family, format, sharing, tmp_path):
    """The run itself checks that the rotations change no outputs. The files open in transformers."""
    source = save_small_model(small_model(family), tmp_path / "source")
    chosen = recipe(**{"down_rotation": "auto"} | sharing)
    result = prune(source, chosen, out=tmp_path / "out", format=format)
    assert {linear.sparsity for layer in result.manifest.layers for linear in layer.linears.values()} == {0.5}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = random_tokens(2, 30, seed=5)
    assert torch.equal(opened(tokens).logits, drot.load(tmp_path / "out", device="cpu")(tokens).logits)
    if format == "dense":
        assert_patterns(opened, chosen.pruning)
    names = saved_tensors(tmp_path / "out").keys()
    assert all(name.startswith("backbone.") or name == "lm_head.weight" for name in names)
    assert any(name.endswith("residual_rotation.weight") for name in names) == ("mode" not in sharing)


@pytest.mark.parametrize("family", NEMOTRONS)
def test_nothing_removed_leaves_the_logits(family):
    """Nor the text that is generated with a cache. Matrices lie between blocks of every kind."""
    model, tokens = small_model(family), random_tokens(2, 30, seed=5)
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    logits, text = model(tokens).logits, model.generate(tokens, **options)
    prune(model, one_shot(sparsity=0.0, hessians="dense", boundary="residual", down_rotation="auto"))
    assert relative_error(model(tokens).logits, logits) < 1e-5
    assert torch.equal(model.generate(tokens, **options), text)


@pytest.mark.parametrize("family", ["nemotron_h", "nemotron_h-latent"])
def test_the_inputs_of_experts_without_a_gate(family):
    """By definition: x of the experts whose tokens the router sends there, and relu(x Wᵀ)² behind up_proj."""
    handle = DecoderModel(small_model(family))
    stream = CalibrationStream.embed(handle, TOKENS, torch.device("cpu"))
    index = next(i for i, layer in enumerate(handle.layers) if layer.family.experts)
    for layer in handle.layers[:index]:
        stream.advance(layer)
    layer = handle.layers[index]
    groups = {group.name: group for group in layer.groups}
    seen = LayerPass(layer, stream)
    args = next(iter(seen.inputs(groups["mlp.1"])))[0]
    hidden, chosen, *_ = args
    own = hidden[(chosen == 1).any(-1)]
    (first,) = routed_inputs(layer, [groups["mlp.1"]], args)
    assert torch.equal(first.input[0, : len(own)], own)
    (second,) = routed_inputs(layer, [groups["down.1"]], args)
    expected = (own.double() @ layer.linears["experts.1.up_proj"].weight.double().T).relu().square()
    assert relative_error(second.input[0, : len(own)], expected) < 1e-6
    assert bool((expected != 0).any())


@pytest.mark.parametrize("family", ["nemotron_h", "nemotron_h-latent"])
def test_the_dense_target_reaches_the_last_linear_of_each_block(family):
    """The logits of the pruned model are nearer to the dense ones than without it."""

    def error(**fields) -> float:
        model = small_model(family)
        dense = model(TOKENS).logits
        chosen = recipe("none", sparsity="2:4", solve="admm", target_weight=1.0, **fields)
        prune(model, chosen)
        return relative_error(model(TOKENS).logits, dense)

    assert error(target="dense") < error(target="self")
