"""Packed checkpoints on disk: writing, opening and converting them, and the messages for damaged files."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import random_tokens, small_model
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import drot
from drot.checkpoint import load
from drot.checkpoint.convert import convert_checkpoint
from drot.checkpoint.manifest import accept_files, read_manifest
from drot.cli import app as cli
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig
from drot.demo.demo import HELD_OUT, MODEL
from drot.errors import UserError
from drot.sparse import linear
from drot.sparse.linear import SparseLinear, is_packed, packed_linears

pytestmark = pytest.mark.slow  # they prune and open the embedded model
CALIBRATION = ["--calibration", str(HELD_OUT), "--nsamples", "2", "--seqlen", "32"]
# the rotations lie in the same place in both formats
PRUNE = [
    "--method",
    "magnitude",
    "--hessians",
    "sequential",
    "--device",
    "cpu",
    "--dtype",
    "bfloat16",
    *CALIBRATION,
]
UP = "model.layers.3.mlp.up_proj"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A dense and a packed checkpoint of the embedded model, with rotations. Tests must not change them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for format in ("dense", "packed"):
        out = str(folder / format)
        assert cli.run(["prune", str(MODEL), "--out", out, "--format", format, "--steps", "1", *PRUNE]) == 0
    return folder


@pytest.fixture
def packed(checkpoints, tmp_path):
    """A packed checkpoint that a test may damage."""
    return shutil.copytree(checkpoints / "packed", tmp_path / "packed")


def refused(capsys, *arguments):
    """The error message of a command line that must fail as a mistake of the user, behind the progress."""
    capsys.readouterr()
    assert cli.run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    *progress, message = captured.err.splitlines()
    assert captured.out == "" and not any(line.startswith("drot: ") for line in progress), captured
    return message + "\n"


def tensors_of(folder):
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_files_of_a_packed_checkpoint(checkpoints):
    dense, packed = tensors_of(checkpoints / "dense"), tensors_of(checkpoints / "packed")
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
        "residual_rotation": True,
        "packed": True,
    }
    assert read_manifest(checkpoints / "packed")["format"] == "packed"
    assert read_manifest(checkpoints / "dense")["format"] == "dense"


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
    again, before = tensors_of(tmp_path / "again"), tensors_of(checkpoints / "packed")
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in again)
    assert torch.equal(drot.load(tmp_path / "again", device="cpu")(tokens).logits, model(tokens).logits)


def test_dtype_can_be_chosen_at_load(checkpoints):
    model = drot.load(checkpoints / "packed", device="cpu", dtype="float32")
    linear = model.model.layers[0].mlp.down_proj
    assert (linear.values.dtype, linear.positions.dtype) == (torch.float32, torch.uint8)
    assert model(random_tokens(1, 8)).logits.dtype == torch.float32


def test_convert_of_a_model_without_a_tokenizer(tmp_path):
    """drot.prune saves no tokenizer with a model that it pruned on token ids."""
    recipe = Recipe(rotation=RotationConfig(mode="none"), pruning=PruningConfig(block_size=16))
    model = small_model("llama", head_dim=16)
    drot.prune(model, recipe, calibration=random_tokens(4, 40), device="cpu", out=tmp_path / "dense")
    out = tmp_path / "packed"
    assert cli.run(["convert", str(tmp_path / "dense"), "--out", str(out), "--format", "packed"]) == 0
    assert is_packed(drot.load(out, device="cpu"))


def test_packed_with_the_boundary_rotation_on_the_residual(tmp_path):
    """A loaded model has the rotation in the same place."""
    recipe = Recipe(
        rotation=RotationConfig(steps=2, hessians="dense", boundary="residual"),
        pruning=PruningConfig(block_size=16),
    )
    tokens = random_tokens(4, 40)
    options = dict(calibration=tokens, device="cpu")
    dense = drot.prune(small_model("llama", head_dim=16), recipe, **options).model
    drot.prune(small_model("llama", head_dim=16), recipe, out=tmp_path / "out", format="packed", **options)
    packed = drot.load(tmp_path / "out", device="cpu")
    assert is_packed(packed) and packed.config.quantization_config.down_basis == "next"
    assert torch.allclose(packed(tokens).logits, dense(tokens).logits, atol=1e-5)


def test_convert_there_and_back(checkpoints, tmp_path, capsys):
    """Converting between dense and packed gives the tensors that prune writes in each format."""
    for source, format in (("packed", "dense"), ("dense", "packed")):
        out = tmp_path / format
        assert cli.run(["convert", str(checkpoints / source), "--out", str(out), "--format", format]) == 0
        before, after = ((f / "model.safetensors").stat().st_size for f in (checkpoints / source, out))
        sizes = f"{before / 1e6:.1f} MB -> {after / 1e6:.1f} MB, {after / before:.2f} of the bytes"
        assert f"Saved to {out}: {sizes}" in capsys.readouterr().out
        got, expected = tensors_of(out), tensors_of(checkpoints / format)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in got)
        manifest, config = read_manifest(out), json.loads((out / "config.json").read_text())
        original = read_manifest(checkpoints / source)
        own = {key: manifest[key] for key in ("files", "digest")}
        assert manifest == {**original, "format": format, "stock_architecture": False, **own}
        assert config["quantization_config"].get("packed", False) is (format == "packed")
        assert not list(tmp_path.glob("*.part"))
        assert (out / "tokenizer.json").exists()
    assert cli.run(["info", str(tmp_path / "packed")]) == 0
    assert "packed 2:4 weights, boundary rotations; needs drot, bfloat16" in capsys.readouterr().out


def test_convert_a_model_without_a_manifest(tmp_path, capsys):
    """A 2:4 model with tied embeddings and no rotation is unchanged after conversion to packed and back."""
    model = small_model("llama")
    recipe = Recipe(rotation=RotationConfig(mode="none"), calibration=CalibrationConfig(seqlen=40))
    pruned = drot.prune(model, recipe, calibration=random_tokens(4, 40), device="cpu").model
    pruned.save_pretrained(tmp_path / "stock")
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "stock")
    for source, format in (("stock", "packed"), ("packed", "dense")):
        arguments = ["convert", str(tmp_path / source), "--out", str(tmp_path / format), "--format", format]
        assert cli.run([*arguments, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told.keys() == {"out", "weight_bytes"} and told["out"] == str(tmp_path / format)
        assert not (tmp_path / format / "drot.json").exists()
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert is_packed(packed) and packed.lm_head.weight is packed.model.embed_tokens.weight
    before, after = tensors_of(tmp_path / "stock"), tensors_of(tmp_path / "dense")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "dense")]
    assert configs[0] == configs[1]


def test_convert_refuses(checkpoints, tmp_path, capsys):
    dense, out = checkpoints / "dense", tmp_path / "out"
    convert = ("convert", dense, "--out", out, "--format")
    assert f"{dense} is dense already: name the other --format" in refused(capsys, *convert, "dense")
    assert "--format must be one of dense, packed; got 'zip'" in refused(capsys, *convert, "zip")
    line = refused(capsys, "convert", MODEL, "--out", out, "--format", "packed")
    assert "layer 0, q_proj: w must hold at most 2 non-zeros in each 4 neighbours, row 0 has more" in line
    line = refused(capsys, "convert", dense, "--out", checkpoints / "packed", "--format", "packed")
    assert "is not an empty folder" in line
    assert not list(tmp_path.iterdir())


def test_a_link_or_mount_point_as_output_is_refused_at_once(checkpoints, tmp_path, capsys, monkeypatch):
    (tmp_path / "real").mkdir()
    for name, target in (("link", "real"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        line = refused(
            capsys, "convert", checkpoints / "packed", "--out", tmp_path / name, "--format", "dense"
        )
        assert f"{tmp_path / name} is a link or a mount point: name a folder inside it" in line
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "real")
    with pytest.raises(UserError, match="is a link or a mount point"):
        convert_checkpoint(checkpoints / "packed", tmp_path / "real", "dense")


def test_a_full_disk(checkpoints, tmp_path, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    line = refused(capsys, "convert", checkpoints / "packed", "--out", tmp_path / "out", "--format", "dense")
    assert f"cannot write {tmp_path / 'out'}: " in line and "No space left on device" in line
    assert list(tmp_path.iterdir()) == []


def test_prune_refuses_before_it_works(checkpoints, tmp_path, capsys):
    prune = ("prune", tmp_path / "no-model", "--out", tmp_path / "out", "--format")
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


@pytest.mark.slow
def test_eval_and_generate(checkpoints, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(HELD_OUT.read_text(encoding="utf-8")[:8000], encoding="utf-8")
    options = ["--ppl", str(text), "--seqlen", "64", "--device", "cpu", "--dtype", "float32", "--json"]
    figures = []
    for format in ("dense", "packed"):
        assert cli.run(["eval", str(checkpoints / format), *options]) == 0
        figures.append(json.loads(capsys.readouterr().out)["perplexity"][str(text)])
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def rewrite(folder, change):
    """Applies `change` to the dict of tensors of a checkpoint in one file, and records the new file."""
    file = folder / "model.safetensors"
    tensors = {
        name: tensor.clone() for name, tensor in load_file(file).items()
    }  # the loaded tensors are mapped from the file that is overwritten
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    accept_files(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{UP}.values"), f"{UP}.values is missing from the checkpoint"),
        (lambda t: t.pop(f"{UP}.positions"), f"{UP}.positions is missing from the checkpoint"),
        (
            lambda t: t.update({f"{UP}.positions": t[f"{UP}.positions"][:, :-1].contiguous()}),
            f"{UP}.positions must be [704, 32] by the model's config, got [704, 31]",
        ),
        (
            lambda t: t.update({f"{UP}.values": t[f"{UP}.values"][:-1].contiguous()}),
            f"{UP}.values must be [704, 128] by the model's config, got [703, 128]",
        ),
        (
            lambda t: t.update({f"{UP}.positions": t[f"{UP}.positions"].long()}),
            f"{UP}.positions must be of dtype U8, got I64",
        ),
        (
            lambda t: t.update({f"{UP}.values": t[f"{UP}.values"].to(torch.uint8)}),
            f"{UP}.values must be of dtype BF16 or F16 or F32, got U8",
        ),
        (
            lambda t: t[f"{UP}.positions"][11].fill_(0b0100_0101),
            f"{UP}.positions: two positions of a group of 4 are equal or out of order in row 11",
        ),
        (
            lambda t: t.update({f"{UP}.values": t[f"{UP}.values"].to(torch.int8)}),
            f"{UP}.values must be of dtype BF16 or F16 or F32, got I8",
        ),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing from the checkpoint"),
        (
            lambda t: t.pop("model.layers.3.residual_rotation.weight"),
            "model.layers.3.residual_rotation.weight is missing from the checkpoint",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(8)}),
            "model.norm.weight must be [256] by the model's config, got [8]",
        ),
    ],
)
def test_damaged_tensors(packed, change, message, capsys):
    rewrite(packed, change)
    for opening in (AutoModelForCausalLM.from_pretrained, drot.load):
        with pytest.raises(UserError) as caught:
            opening(packed)
        assert str(caught.value).startswith(message)
    assert refused(capsys, "eval", packed, "--ppl", HELD_OUT).startswith(f"drot: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 4},
            "num_hidden_layers of config.json is 4, but the weights hold 8 layers: config.json was edited",
        ),
        (
            {"quantization_config": {"quant_method": "drot", "packed": True}},
            "model.layers.1.input_layernorm.weight is missing from the checkpoint",
        ),
    ],
)
def test_a_config_with_fewer_modules_is_refused(packed, change, message, tmp_path, capsys):
    """transformers would ignore the other tensors and load another model."""
    edit_config(packed, change)
    for arguments in (["eval", packed, "--ppl", HELD_OUT], ["convert", packed, "--out", tmp_path / "out"]):
        line = refused(capsys, *arguments, *(["--format", "dense"] if arguments[0] == "convert" else []))
        assert message in line
    assert not (tmp_path / "out").exists()


def edit_config(folder, change):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "config.json: num_attention_heads: Input should be greater than"),
        (
            {"num_hidden_layers": "8"},
            "config.json: num_hidden_layers: Input should be a valid integer, got '8'",
        ),
        ({"dtype": "float23"}, "cannot load a causal language model"),
    ],
)
def test_a_faulty_config(packed, change, message, capsys):
    edit_config(packed, change)
    assert message in refused(capsys, "eval", packed, "--ppl", HELD_OUT)


def test_a_faulty_manifest(packed, capsys):
    file = packed / "drot.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layers": [{}]}))
    assert cli.run(["info", str(packed)]) == 2
    assert f"{file} lacks layers.0.layer: it was edited" in capsys.readouterr().err


def test_a_warning_for_a_dtype_that_is_not_kept(checkpoints, tmp_path, caplog):
    folder = shutil.copytree(checkpoints / "packed", tmp_path / "wide")
    rewrite(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}))
    convert_checkpoint(folder, tmp_path / "out", "dense")
    assert "holds tensors of F32, but the dtype in its config.json is bfloat16" in caplog.text
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}


def test_a_broken_tokenizer_is_refused_and_a_missing_one_is_not_invented(packed, tmp_path, caplog):
    (packed / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load a tokenizer"):
        convert_checkpoint(packed, tmp_path / "out", "dense")
    for file in packed.glob("*token*"):
        file.unlink()
    convert_checkpoint(packed, tmp_path / "out", "dense")
    assert "holds no tokenizer, so" in caplog.text
    assert not list((tmp_path / "out").glob("*token*"))


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


def test_truncated_file(packed, capsys):
    file = packed / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} is not a complete safetensors file" in refused(capsys, "eval", packed, "--ppl", HELD_OUT)


def test_a_key_of_a_later_version(packed, capsys):
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["packed_3bit"] = True
    (packed / "config.json").write_text(json.dumps(config))
    line = refused(capsys, "eval", packed, "--ppl", HELD_OUT)
    assert "quantization_config has packed_3bit, which this version of drot does not support: update" in line


def test_a_shard_that_is_missing(checkpoints, tmp_path, capsys):
    folder = tmp_path / "sharded"
    shutil.copytree(checkpoints / "packed", folder)
    drot.load(folder, device="cpu").save_pretrained(folder, max_shard_size="1MB")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="is not the file that drot.json describes: it "):
        drot.load(folder, device="cpu")
    accept_files(folder)
    tokens = random_tokens(1, 8)
    expected = drot.load(checkpoints / "packed", device="cpu")(tokens).logits
    assert torch.equal(drot.load(folder, device="cpu")(tokens).logits, expected)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][f"{UP}.values"]
    shard.unlink()
    assert shard.name in refused(capsys, "eval", folder, "--ppl", HELD_OUT)


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
    compressed = linear.sparse24_compress

    def compress(values, positions):
        on_gpu = values.device.type == "meta"
        return values.new_empty(7, dtype=torch.uint8) if on_gpu else compressed(values, positions)

    monkeypatch.setattr(linear, "sparse24_compress", compress)


def forms(model):
    return {module.compressed is not None for _, module in packed_linears(model)}


def test_from_pretrained_compresses_where_the_weights_are(checkpoints, compressing):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "packed")
    assert forms(model) == {False}  # on a CPU there is no such form
    assert forms(model.to("meta")) == {True}


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
