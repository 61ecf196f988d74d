"""Packed checkpoints on disk: writing, opening, compressing and running them."""

import json
import logging

import pytest
import torch
from packed_checkpoints import PRUNE, UP, refused
from runs import saved_tensors
from small_models import random_tokens, small_model
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import drot
from drot.checkpoint import load
from drot.checkpoint.manifest import read_manifest
from drot.cli import app as cli
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig
from drot.core.errors import UserError
from drot.reporting.demo import HELD_OUT, MODEL
from drot.sparse import linear
from drot.sparse.linear import SparseLinear, is_packed, packed_linears

pytestmark = pytest.mark.slow  # they prune and open the embedded model


def test_files_of_a_packed_checkpoint(checkpoints):
    dense, packed = saved_tensors(checkpoints / "dense"), saved_tensors(checkpoints / "packed")
    weight, values, positions = dense[f"{UP}.weight"], packed[f"{UP}.values"], packed[f"{UP}.positions"]
    assert (values.dtype, positions.dtype) == (torch.bfloat16, torch.uint8)
    assert (list(values.shape), list(positions.shape)) == ([704, 128], [704, 32])
    assert 16 * (values.nbytes + positions.nbytes) == 9 * weight.nbytes
    assert len([name for name in packed if name.endswith(".positions")]) == 7 * 8
    others = {name for name in dense if "_proj" not in name}
    assert others == {name for name in packed if "_proj" not in name}
    assert sum("residual_rotation" in name for name in others) == 7
    config = json.loads((checkpoints / "packed" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "drot",
        "boundary": "input",
        "down_rotation": 64,
        "packed": True,
    }
    assert read_manifest(checkpoints / "packed").format == "packed"
    assert read_manifest(checkpoints / "dense").format == "dense"


def test_opens_without_a_dense_weight_and_saves_again(checkpoints, tmp_path, monkeypatch):
    monkeypatch.delattr(SparseLinear, "from_linear")
    model, info = AutoModelForCausalLM.from_pretrained(checkpoints / "packed", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert isinstance(model.model.layers[0].mlp.down_proj, SparseLinear)
    assert not model.model.layers[0].mlp.down_proj.values.requires_grad
    tokens = random_tokens(2, 20)
    dense = drot.load(checkpoints / "dense", device="cpu")
    torch.testing.assert_close(model(tokens).logits, dense(tokens).logits, atol=0.1, rtol=0.02)
    model.save_pretrained(tmp_path / "again", max_shard_size="1MB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    again, before = saved_tensors(tmp_path / "again"), saved_tensors(checkpoints / "packed")
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in again)
    assert torch.equal(drot.load(tmp_path / "again", device="cpu")(tokens).logits, model(tokens).logits)


def test_dtype_can_be_chosen_at_load(checkpoints):
    model = drot.load(checkpoints / "packed", device="cpu", dtype="float32")
    linear = model.model.layers[0].mlp.down_proj
    assert (linear.values.dtype, linear.positions.dtype) == (torch.float32, torch.uint8)
    assert model(random_tokens(1, 8)).logits.dtype == torch.float32


def test_prune_refuses_before_it_works(checkpoints, tmp_path, capsys):
    prune = ("prune", "no-model", "--out", tmp_path / "out", "--format")
    assert "--format packed needs --sparsity 2:4; got 0.5" in refused(
        capsys, *prune, "packed", "--sparsity", 0.5
    )
    assert "needs --sparsity 2:4; got 4:8" in refused(capsys, *prune, "packed", "--sparsity", "4:8")
    assert "--format must be one of dense, packed; got 'zip'" in refused(capsys, *prune, "zip")
    for format in ("dense", "packed"):
        line = refused(capsys, "prune", checkpoints / format, "--out", tmp_path / "out", *PRUNE)
        assert f"was pruned already: prune its dense original, {MODEL}" in line
    loaded = drot.load(checkpoints / "packed", device="cpu")
    with pytest.raises(UserError, match="this model is packed, so it was pruned already"):
        drot.prune(loaded, calibration=random_tokens(2, 32))
    odd = small_model("llama", intermediate_size=44)
    with pytest.raises(UserError, match="down_proj: the packed format needs a multiple of 8 inputs, got 44"):
        drot.prune(odd, Recipe(), calibration=random_tokens(2, 32), format="packed", out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_eval_and_generate(checkpoints, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(HELD_OUT.read_text(encoding="utf-8")[:8000], encoding="utf-8")
    options = ["--ppl", str(text), "--seqlen", "64", "--device", "cpu", "--dtype", "float32", "--json"]
    figures = []
    for format in ("dense", "packed"):
        assert cli.run(["eval", str(checkpoints / format), *options]) == 0
        figures.append(json.loads(capsys.readouterr().out)["perplexity"][str(text)])
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_only_a_packed_model_counts_as_quantised(checkpoints, tmp_path):
    """transformers refuses to cast or train the packed model, but not the dense one with rotations."""
    dense, packed = (AutoModelForCausalLM.from_pretrained(checkpoints / name) for name in ("dense", "packed"))
    assert dense.half().dtype == torch.float16
    with pytest.raises(ValueError, match="not supported for quantized"):
        packed.half()
    assert dense.hf_quantizer.is_trainable and dense.hf_quantizer.is_qat_trainable  # read by the Trainer
    with pytest.raises(UserError, match=r"cannot be trained: call dequantize\(\)"):
        assert packed.hf_quantizer.is_trainable
    packed.requires_grad_(False)
    logits = packed(random_tokens(1, 8)).logits
    assert not is_packed(packed.dequantize())
    assert float((packed(random_tokens(1, 8)).logits - logits).abs().max()) < 0.05 * float(logits.abs().max())
    with pytest.raises(UserError, match="use AutoModelForCausalLM"):
        AutoModel.from_pretrained(checkpoints / "packed")


def test_packed_from_python(tmp_path):
    recipe = Recipe(
        rotation=RotationConfig(steps=2),
        pruning=PruningConfig(block_size=16),
        calibration=CalibrationConfig(seqlen=40),
    )
    model, tokens = small_model("qwen2"), random_tokens(4, 40)
    result = drot.prune(model, recipe, calibration=tokens, device="cpu", format="packed", out=tmp_path / "o")
    assert is_packed(result.model) and result.manifest == read_manifest(tmp_path / "o")
    loaded = drot.load(tmp_path / "o", device="cpu")
    # the loaded model is fused: q, k and v are one product, which may add up in another order
    torch.testing.assert_close(loaded(tokens).logits, result.model(tokens).logits)


@pytest.fixture
def compressing(monkeypatch):
    """Makes weights on the meta device have a compressed form, as on a GPU."""

    def compress(values, positions):
        return values.new_empty(7, dtype=torch.uint8)

    monkeypatch.setattr(linear, "is_gpu", lambda device: device.type == "meta")
    monkeypatch.setattr(linear, "check_gpu", lambda device, kernels: None)
    monkeypatch.setattr(linear, "sparse24_compress", compress)


def forms(model):
    return {module.compressed is not None for _, module in packed_linears(model)}


def test_from_pretrained_compresses_where_the_weights_are(checkpoints, compressing):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "packed")
    assert forms(model) == {False}  # on a CPU there is no such form
    assert forms(model.to("meta")) == {True}
    assert forms(model.double()) == {False}  # cuSPARSELt has no such product


def test_a_loaded_model_may_go_to_the_meta_device(checkpoints):
    model = drot.load(checkpoints / "packed", device="cpu").to("meta")
    assert all(parameter.is_meta for parameter in model.parameters()) and forms(model) == {False}


def test_the_environment_leaves_compressed_forms_out(checkpoints, compressing, monkeypatch):
    monkeypatch.setenv("DROT_COMPRESS", "0")
    assert forms(AutoModelForCausalLM.from_pretrained(checkpoints / "packed").to("meta")) == {False}
    monkeypatch.setenv("DROT_COMPRESS", "1")
    assert forms(AutoModelForCausalLM.from_pretrained(checkpoints / "packed").to("meta")) == {True}


@pytest.mark.parametrize(("compress", "kept"), [(None, True), (True, True), (False, False)])
def test_load_compresses_on_a_gpu_unless_memory_is_short(
    checkpoints, compressing, monkeypatch, caplog, compress, kept
):
    monkeypatch.setattr(load, "pick_device", lambda name: torch.device("cuda"))
    to = PreTrainedModel.to
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, target: to(model, "meta"))
    monkeypatch.setattr(
        load, "compress_model", lambda model: [m.compress() for _, m in packed_linears(model)]
    )
    with caplog.at_level(logging.WARNING, "drot"):
        model = drot.load(checkpoints / "packed", compress=compress)
    assert forms(model) == {kept}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (0 if kept else 1)
    assert all("unpack the weight at each call" in line for line in told)


def test_load_says_nothing_on_a_cpu(checkpoints, caplog):
    with caplog.at_level(logging.WARNING, "drot"):
        assert forms(drot.load(checkpoints / "packed", device="cpu", compress=False)) == {False}
        assert forms(drot.load(checkpoints / "packed", device="cpu")) == {False}
    assert not caplog.records


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_state_dict_that_the_caller_gives_is_saved(checkpoints, tmp_path, format):
    """As a Trainer gives it that gathers the weights of several processes."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints / format)
    state = model.state_dict() | {"model.norm.weight": model.model.norm.weight.detach() + 1}
    model.save_pretrained(tmp_path / "given", state_dict=dict(state))
    model.save_pretrained(tmp_path / "own")
    given, own = saved_tensors(tmp_path / "given"), saved_tensors(tmp_path / "own")
    assert torch.equal(given["model.norm.weight"], own["model.norm.weight"] + 1)
    assert given.keys() == own.keys()


def test_from_pretrained_fuses_as_load_does(checkpoints, tmp_path):
    """The modules are the same, and what is saved has the tensors of the files."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "packed")
    loaded = drot.load(checkpoints / "packed", device="cpu")
    kinds = {type(module).__name__ for module in model.modules()}
    assert {"FusedLinear", "FusedPart"} <= kinds
    assert [type(m) for m in model.modules()] == [type(m) for m in loaded.modules()]
    model.save_pretrained(tmp_path / "saved")
    before, after = saved_tensors(checkpoints / "packed"), saved_tensors(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
