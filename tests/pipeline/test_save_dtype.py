"""The dtype of the computation and of the saved weights, and the head, which may be tied to the embedding."""

import copy
import json

import pytest
import torch
from runs import TOKENS, assert_same_weights, interrupted, one_shot, prune, saved_bytes, saved_tensors
from safetensors.torch import load_file
from small_checkpoints import save_small
from small_models import is_available, random_tokens, save_small_model, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.checkpoint.convert import convert
from drot.checkpoint.dtypes import cast_weights
from drot.checkpoint.manifest import read_manifest
from drot.core.errors import UserError
from drot.machine.devices import computing_dtype
from drot.reporting.demo import MODEL

pytestmark = pytest.mark.slow


def recipe(mode="none"):
    return one_shot(mode, method="wanda", steps=2)


@pytest.fixture
def source(tmp_path):
    """A small bfloat16 checkpoint with a tied head."""
    return save_small(tmp_path / "source", dtype=torch.bfloat16)


def bytes_of(folder):
    return sum(map(len, saved_bytes(folder)))


@pytest.mark.parametrize(("mode", "format"), [("none", "dense"), ("layer", "packed"), ("shared", "dense")])
def test_computed_in_float32_and_saved_in_the_checkpoints_own_dtype(source, tmp_path, mode, format):
    out, wide = tmp_path / "out", tmp_path / "wide"
    result = prune(source, recipe(mode), out=out, format=format)
    assert result.manifest.dtype == "bfloat16" and result.manifest.compute_dtype == "float32"
    assert result.model.dtype == torch.bfloat16 and str(result.model.config.dtype).endswith("bfloat16")
    saved = saved_tensors(out)
    assert {tensor.dtype for tensor in saved.values()} <= {torch.bfloat16, torch.uint8}
    loaded = drot.load(out, device="cpu")
    state = result.model.state_dict()
    assert all(torch.equal(saved[name], state[name]) for name in saved)
    assert loaded.dtype == torch.bfloat16
    unrounded = prune(source, recipe(mode), out=wide, save_dtype="float32", format=format)
    assert unrounded.manifest.dtype == "float32" and bytes_of(wide) > 1.6 * bytes_of(out)
    # what no rounding has reached before is rounded once, from the float32 result
    first = [name for name in saved if "layers.0.self_attn" in name and name.split(".")[4] in "q_proj v_proj"]
    assert first
    for name, tensor in saved_tensors(wide).items():
        if name in first:
            assert torch.equal(tensor.to(saved[name].dtype), saved[name])


WITH_BUFFERS = "gemma4_text", "minimax_m2", "lfm2_moe", "apertus"


@pytest.mark.parametrize("family", list(filter(is_available, WITH_BUFFERS)))
def test_buffers_have_the_dtype_in_which_transformers_loads_them(family, tmp_path, caplog):
    """A scalar, the bias of a router, the constants of an activation: a run on a CPU computes in float32."""
    source = tmp_path / "source"
    save_small_model(small_model(family, dtype=torch.bfloat16), source)
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    dtypes = {name.split(".")[-1]: buffer.dtype for name, buffer in stored_buffers(loaded)}
    assert dtypes
    prune(source, recipe("shared").replace(down_rotation="none"), out=tmp_path / "out")
    saved = saved_tensors(tmp_path / "out")
    found = {name: tensor.dtype for name, tensor in saved.items() if name.split(".")[-1] in dtypes}
    assert found and all(dtype == dtypes[name.split(".")[-1]] for name, dtype in found.items())
    convert(tmp_path / "out", tmp_path / "packed", "packed")
    convert(tmp_path / "packed", tmp_path / "again", "dense")
    again = saved_tensors(tmp_path / "again")
    assert {name: (t.dtype, t.tolist()) for name, t in again.items()} == {
        name: (t.dtype, t.tolist()) for name, t in saved.items()
    }
    assert "they are rounded" not in caplog.text


def stored_buffers(model):
    names = {id(parameter) for parameter in model.parameters()}
    state = model.state_dict(keep_vars=True)
    return [(name, tensor) for name, tensor in state.items() if id(tensor) not in names]


def test_figures_of_the_manifest_are_those_before_the_rounding(source):
    rounded, wide = (prune(source, recipe("layer"), save_dtype=name).manifest for name in ("auto", "float32"))
    one, two = rounded.layers[0], wide.layers[0]
    assert one.rotation.loss_curve == two.rotation.loss_curve
    assert one.linears["q_proj"] == two.linears["q_proj"]


def test_a_layer_is_pruned_for_the_outputs_of_the_rounded_layers_before_it(tmp_path):
    """The output error of a linear of layer 1, in fp64 from the saved weights of layer 0."""
    model = small_model("llama")
    before = copy.deepcopy(model)
    manifest = prune(model, recipe(), save_dtype=torch.bfloat16).manifest
    found = {}
    for save in ("rounded", "unrounded"):
        reference = copy.deepcopy(before)
        if save == "rounded":
            reference.model.layers[0].load_state_dict(model.model.layers[0].float().state_dict())
        else:
            wide = prune(copy.deepcopy(before), recipe()).model
            reference.model.layers[0].load_state_dict(wide.model.layers[0].state_dict())
        norm = reference.model.layers[1].input_layernorm
        norm.weight.data = model.model.layers[1].input_layernorm.weight.float()
        seen = []
        norm.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        reference(TOKENS)
        x = seen[0].flatten(0, 1).double()
        dense = before.model.layers[1].self_attn.q_proj.weight.double()
        removed = dense * (model.model.layers[1].self_attn.q_proj.weight == 0)
        found[save] = float((x @ removed.T).square().sum() / (x @ dense.T).square().sum())
    error = manifest.layers[1].linears["q_proj"].output_error
    assert error == pytest.approx(found["rounded"], rel=1e-6)
    assert error != pytest.approx(found["unrounded"], rel=1e-5)


@pytest.mark.parametrize(
    ("rotation", "format"),
    [({}, "dense"), (dict(hessians="dense", boundary="residual"), "packed")],
    ids=["input", "residual"],
)
def test_a_resumed_run_continues_from_the_rounded_shards(source, tmp_path, rotation, format):
    chosen = recipe("layer").replace(**rotation)
    prune(source, chosen, out=tmp_path / "whole", format=format)
    interrupted(source, chosen, out=tmp_path / "out", at=("prune", 2), format=format)
    part = load_file(tmp_path / "out.partial" / "layer_00001.safetensors")
    name = "model.layers.1.mlp.up_proj." + ("weight" if format == "dense" else "values")
    assert part[name].dtype == torch.bfloat16 and "model.layers.1.residual_rotation.weight" in part
    other = "format: {} in the unfinished run, {} now"
    formats = ("dense", "packed") if format == "dense" else ("packed", "dense")
    with pytest.raises(UserError, match=other.format(*formats)):
        prune(source, chosen, out=tmp_path / "out", resume=True, format=formats[1])
    with pytest.raises(UserError, match="save_dtype: bfloat16 in the unfinished run, float32 now"):
        prune(source, chosen, out=tmp_path / "out", resume=True, format=format, save_dtype="float32")
    result = prune(source, chosen, out=tmp_path / "out", resume=True, format=format)
    assert_same_weights(saved_tensors(tmp_path / "out"), result.model)
    whole, resumed = (saved_tensors(tmp_path / name) for name in ("whole", "out"))
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("mode", ["none", "layer"])
def test_the_head_stays_tied_unless_the_model_is_rotated(source, tmp_path, mode):
    """The rotation folds the final norm into lm_head, and not into the embedding."""
    result = prune(source, recipe(mode), out=tmp_path / "out")
    rotated = mode == "layer"
    assert result.model.config.tie_word_embeddings is not rotated
    assert ("lm_head.weight" in saved_tensors(tmp_path / "out")) is rotated
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
        prune(copy.deepcopy(model), recipe(), save_dtype="float16")
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

    def open_model(name, chosen, *others, **options):
        seen.append(chosen)
        raise UserError("enough")

    monkeypatch.setattr(evaluate, "open_model", open_model)
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


def kept_in_fp32(family, folder):
    """A checkpoint in bf16, but for what transformers keeps in fp32, whose values need it."""
    model = small_model(family, dtype=torch.bfloat16)
    kept = [*(model._keep_in_fp32_modules_strict or ()), "mlp.gate.wg."]  # Hunyuan's code makes this one so
    for name, parameter in model.named_parameters():
        if any(part in name for part in kept):
            parameter.data = parameter.data.float() + 1e-4 * torch.randn(parameter.shape)
    return save_small_model(model, folder)


@pytest.mark.parametrize("family", ["ernie4_5_moe", "glm4_moe", "flint", "hunyuan_v1_moe"])
def test_what_transformers_keeps_in_fp32_is_not_rounded(family, tmp_path):
    """The weights of a router, in a run in fp32 and in bf16, from files and in memory."""
    source = kept_in_fp32(family, tmp_path / "source")
    expected = saved_tensors(source)
    assert {tensor.dtype for tensor in expected.values()} == {torch.bfloat16, torch.float32}
    keep = one_shot("none", sparsity=0.0)
    for name, model, dtype in (
        ("streamed", source, "float32"),
        ("in bf16", source, "bfloat16"),
        ("in memory", drot.load(source, device="cpu"), "auto"),
    ):
        prune(model, keep, out=tmp_path / name, dtype=dtype)
        found = saved_tensors(tmp_path / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
        assert all(found[key].dtype == expected[key].dtype for key in expected), name


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("mode", ["layer", "shared"])
def test_a_layer_that_begins_with_a_tensor_in_fp32(mode, format, tmp_path):
    """Flint's sinks are the first parameter of its layers; rotations have the dtype of the others."""
    source = kept_in_fp32("flint", tmp_path / "source")
    chosen = one_shot(mode, steps=2, down_rotation=8)
    result = prune(source, chosen, out=tmp_path / "out", format=format, dtype="bfloat16")
    loaded = drot.load(tmp_path / "out", device="cpu")
    tokens = random_tokens(1, 40)
    with torch.no_grad():
        logits = loaded(tokens).logits
    assert loaded.dtype == torch.bfloat16 and logits.isfinite().all()
    torch.testing.assert_close(logits, result.model(tokens).logits, rtol=0.05, atol=0.05)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    torch.testing.assert_close(again, logits, rtol=0.05, atol=0.05)
