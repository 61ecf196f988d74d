"""Models whose layers have one block each, as Nemotron-H: an attention, a Mamba, an MLP or experts."""

import pytest
import torch
from made_manifests import made_evaluation
from runs import TOKENS, assert_patterns, one_shot, prune, recipe, saved_tensors
from safetensors.torch import load_file, save_file
from small_checkpoints import change_json
from small_models import layer_outputs, random_tokens, relative_error, save_small_model, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.calibration.layer_pass import LayerPass, target_statistics
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.manifest import read_manifest, update_manifest
from drot.checkpoint.records import EvaluationRecord
from drot.core.errors import UserError
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


@torch.no_grad()
@pytest.mark.parametrize("family", [*NEMOTRONS, "glm4_moe", "gemma4_text", "gemma4_text-lends"])
def test_a_layer_that_is_not_pruned_needs_no_change(family):
    """Its targets are what it computes, and both streams pass each layer once."""
    handle = DecoderModel(small_model(family))
    stream = CalibrationStream.embed(handle, TOKENS, torch.device("cpu"))
    for layer in handle.layers:
        dense_stream, expected = stream.copy(), layer_outputs(stream, layer)
        pruned = LayerPass(layer, stream)
        dense = LayerPass(layer.copy(), dense_stream, fixed=True)
        for group in (group for group in layer.groups if group.expert is None):
            found = target_statistics(pruned, dense, group)
            change = found.input_change if found.output_change is None else found.output_change
            assert float(change.norm()) < 1e-5 * float(found.hessian.norm()), group.name
        for one in (pruned, dense):
            one.advance()
            assert relative_error(one.stream.hidden_states, expected) < 1e-6


def test_a_model_that_is_saved_again_keeps_its_evaluations(tmp_path, caplog):
    """drot reads the names of its files, also those of packed experts."""
    source = save_small_model(small_model("nemotron_h"), tmp_path / "source")
    out = tmp_path / "out"
    prune(source, one_shot(down_rotation="auto"), out=out, format="packed")
    record = EvaluationRecord.model_validate(made_evaluation({"text": 5.0}))
    update_manifest(out, lambda manifest: manifest.evaluations.append(record))
    opened = AutoModelForCausalLM.from_pretrained(out)
    opened.save_pretrained(tmp_path / "again")
    assert read_manifest(tmp_path / "again").evaluations == [record] and "holds other" not in caplog.text
    dense = drot.load(out, device="cpu").dequantize()
    dense.save_pretrained(tmp_path / "dense")
    assert read_manifest(tmp_path / "dense").sparsity == pytest.approx(0.5)


def test_an_open_limit_of_the_steps_of_a_mamba(tmp_path):
    """The published configs hold the bare literal Infinity."""
    source = save_small_model(small_model("nemotron_h"), tmp_path / "source")
    change_json(source / "config.json", time_step_limit=[0.0, float("inf")])
    assert "Infinity" in (source / "config.json").read_text()
    prune(source, one_shot("none"), out=tmp_path / "out")
    assert drot.load(tmp_path / "out", device="cpu").config.time_step_limit[1] == float("inf")


def test_files_with_other_names_are_refused_by_the_reason(tmp_path):
    source = save_small_model(small_model("nemotron_h"), tmp_path / "source")
    file = source / "model.safetensors"
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    with pytest.raises(UserError, match="other names than published, as model.*, and backbone.* is missing"):
        prune(source, one_shot("none"), out=tmp_path / "out")
