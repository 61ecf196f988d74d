"""The dtype of the computation and of the saved weights, and the head, which may be tied to the embedding."""

import json

import pytest
import torch
from runs import assert_same_weights, interrupted, one_shot, prune
from safetensors.torch import load_file
from small_checkpoints import save_small
from small_models import small_model

import drot
from drot.checkpoint.dtypes import cast_weights
from drot.core.errors import UserError
from drot.demo.demo import MODEL
from drot.machine.devices import computing_dtype
from drot.manifest.manifest import read_manifest


def recipe(mode="none"):
    return one_shot(mode, method="wanda", steps=2)


@pytest.fixture
def source(tmp_path):
    """A small bfloat16 checkpoint with a tied head."""
    return save_small(tmp_path / "source", dtype=torch.bfloat16)


def bytes_of(folder):
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("mode", ["none", "layer", "shared"])
def test_computed_in_float32_and_saved_in_the_checkpoints_own_dtype(source, tmp_path, mode, format):
    out, wide = tmp_path / "out", tmp_path / "wide"
    result = prune(source, recipe(mode), out=out, format=format)
    assert result.manifest.dtype == "bfloat16" and result.manifest.compute_dtype == "float32"
    assert result.model.dtype == torch.bfloat16 and str(result.model.config.dtype).endswith("bfloat16")
    saved = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} <= {torch.bfloat16, torch.uint8}
    loaded = drot.load(out, device="cpu")
    state = result.model.state_dict()
    assert all(torch.equal(saved[name], state[name]) for name in saved)
    assert loaded.dtype == torch.bfloat16
    unrounded = prune(source, recipe(mode), out=wide, save_dtype="float32", format=format)
    assert unrounded.manifest.dtype == "float32" and bytes_of(wide) > 1.6 * bytes_of(out)
    for name, tensor in load_file(wide / "model.safetensors").items():
        assert torch.equal(tensor.to(saved[name].dtype), saved[name])  # rounded once, from the float32 result


def test_figures_of_the_manifest_are_those_of_the_computation(source):
    rounded, wide = (prune(source, recipe("layer"), save_dtype=name).manifest for name in ("auto", "float32"))
    for left, right in zip(rounded.layers, wide.layers, strict=True):
        assert left.linears == right.linears
        assert left.rotation.loss_curve == right.rotation.loss_curve


def test_a_resumed_run_rounds_the_parts_of_the_computing_dtype(source, tmp_path):
    prune(source, recipe("layer"), out=tmp_path / "whole")
    interrupted(source, recipe("layer"), out=tmp_path / "out", at=("prune", 2))
    part = load_file(tmp_path / "out.partial" / "layer_00000.safetensors")
    assert part["mlp.up_proj.weight"].dtype == torch.float32
    prune(source, recipe("layer"), out=tmp_path / "out", resume=True)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("mode", ["none", "layer"])
def test_the_head_stays_tied_unless_the_model_is_rotated(source, tmp_path, mode):
    """The rotation folds the final norm into lm_head, and not into the embedding."""
    result = prune(source, recipe(mode), out=tmp_path / "out")
    rotated = mode == "layer"
    assert result.model.config.tie_word_embeddings is not rotated
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) is rotated
    assert read_manifest(tmp_path / "out").untied_lm_head is rotated


def test_a_loaded_model_keeps_its_dtype():
    result = prune(small_model("llama", dtype=torch.float16), recipe())
    assert result.model.dtype == torch.float16 and result.manifest.compute_dtype == "float16"
    other = prune(chosen=recipe(), save_dtype=torch.bfloat16)
    assert other.model.dtype == torch.bfloat16 and other.manifest.compute_dtype == "float32"


def test_a_config_without_a_dtype(source):
    """The dtype is then that of the tensors in the file."""
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    manifest = prune(source, recipe()).manifest
    assert (manifest.dtype, manifest.compute_dtype) == ("bfloat16", "float32")


def test_a_value_that_the_dtype_cannot_hold():
    model = small_model("llama")
    model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight has values above .* 65504"):
        cast_weights(model, torch.float16, "save_dtype")


def test_an_unknown_dtype():
    with pytest.raises(UserError, match="`save_dtype`"):
        prune(chosen=recipe(), save_dtype="int8")


def test_auto_is_float32_on_a_cpu_for_prune_and_eval():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert computing_dtype("auto", cpu) == "float32" and computing_dtype("auto", gpu) == "auto"
    assert computing_dtype("bfloat16", cpu) == "bfloat16"
    assert computing_dtype(torch.float16, gpu) == torch.float16


def test_eval_computes_in_float32_on_a_cpu(monkeypatch, tmp_path):
    from drot.evaluation import evaluate

    seen = []

    def load(path, **options):
        seen.append(options["dtype"])
        raise UserError("enough")

    monkeypatch.setattr(evaluate, "load", load)
    (tmp_path / "text.txt").write_text("some words, again and again, " * 40)
    for dtype in ("auto", "bfloat16"):
        with pytest.raises(UserError, match="enough"):
            evaluate.evaluate(
                [str(MODEL)], ppl=[str(tmp_path / "text.txt")], seqlen=8, device="cpu", dtype=dtype
            )
    assert seen == ["float32", "bfloat16"]


def test_a_wrong_dtype_is_found_before_the_text_is_read(source, tmp_path):
    missing = drot.CalibrationConfig(source=str(tmp_path / "missing.txt"))
    with pytest.raises(UserError, match="`dtype`"):
        drot.prune(source, drot.Recipe(calibration=missing), device="cpu", dtype="half")
