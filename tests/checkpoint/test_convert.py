"""`drot convert`: from dense to packed and back, and the messages for what cannot be converted."""

import json
import shutil

import pytest
import torch
from packed_checkpoints import refused, rewrite
from runs import saved_bytes, saved_tensors
from small_models import random_tokens, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.checkpoint.convert import convert
from drot.checkpoint.manifest import read_manifest
from drot.cli import app as cli
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig
from drot.core.errors import UserError
from drot.reporting.demo import MODEL
from drot.sparse.linear import is_packed

pytestmark = pytest.mark.slow  # they prune and open the embedded model


def test_convert_of_a_model_without_a_tokenizer(tmp_path):
    """drot.prune saves no tokenizer with a model that it pruned on token ids."""
    recipe = Recipe(rotation=RotationConfig(mode="none"), pruning=PruningConfig(block_size=16))
    model = small_model("llama", head_dim=16)
    drot.prune(model, recipe, calibration=random_tokens(4, 40), device="cpu", out=tmp_path / "dense")
    out = tmp_path / "packed"
    assert cli.run(["convert", str(tmp_path / "dense"), "--out", str(out), "--format", "packed"]) == 0
    assert is_packed(drot.load(out, device="cpu"))


def test_a_checkpoint_on_the_hub_has_its_manifest(tmp_path, monkeypatch):
    """drot.json, here in the cache, says which linears are dense, and that the model was pruned."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "cache" / "models--me--keep"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(revision := 40 * "a")
    chosen = Recipe().replace(mode="none", method="magnitude", solve="none", target="self", keep="down_proj")
    model, calibration = small_model("llama", head_dim=16), random_tokens(4, 40)
    drot.prune(model, chosen, calibration=calibration, device="cpu", out=cached / "snapshots" / revision)
    convert("me/keep", tmp_path / "packed", "packed")
    assert read_manifest(tmp_path / "packed").recipe.pruning.keep == ("down_proj",)
    assert is_packed(drot.load(tmp_path / "packed", device="cpu"))
    with pytest.raises(UserError, match="me/keep was pruned already"):
        drot.prune("me/keep", chosen, calibration=calibration, device="cpu")


def test_the_rotations_of_the_run_are_copied(tmp_path):
    """Other weights in the folder, as Mistral publishes, are not."""
    recipe, out = Recipe().replace(steps=2, method="wanda", solve="none", target="self"), tmp_path / "out"
    rotations = out / "rotations.safetensors"
    model, calibration = small_model("llama", head_dim=16), random_tokens(4, 40)
    drot.prune(model, recipe, calibration=calibration, device="cpu", out=out, save_rotations_to=rotations)
    (out / "consolidated.safetensors").write_bytes(bytes(100))
    manifest = convert(out, tmp_path / "packed", "packed")
    copied = tmp_path / "packed" / rotations.name
    assert copied.read_bytes() == rotations.read_bytes() and rotations.name in manifest.files
    assert not (tmp_path / "packed" / "consolidated.safetensors").exists()
    rotations.write_bytes(rotations.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="rotations.safetensors is not the file that drot.json describes"):
        convert(out, tmp_path / "again", "packed")
    assert not (tmp_path / "again").exists()


def test_convert_there_and_back(checkpoints, tmp_path, capsys):
    """Converting between dense and packed gives the tensors that prune writes in each format."""
    for source, format in (("packed", "dense"), ("dense", "packed")):
        out = tmp_path / format
        assert cli.run(["convert", str(checkpoints / source), "--out", str(out), "--format", format]) == 0
        before, after = (sum(map(len, saved_bytes(f))) for f in (checkpoints / source, out))
        sizes = f"{before / 1e6:.1f} MB -> {after / 1e6:.1f} MB, {after / before:.2f} of the bytes"
        assert f"Saved to {out}: {sizes}" in capsys.readouterr().out
        got, expected = saved_tensors(out), saved_tensors(checkpoints / format)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in got)
        manifest, config = read_manifest(out), json.loads((out / "config.json").read_text())
        original = read_manifest(checkpoints / source)
        own = {"files", "digest", "format"}
        assert manifest.model_dump(exclude=own) == original.model_dump(exclude=own)
        assert manifest.format == format and not manifest.stock_architecture
        assert config["quantization_config"].get("packed", False) is (format == "packed")
        assert not list(tmp_path.glob("*.part"))
        assert (out / "tokenizer.json").exists()
    assert cli.run(["info", str(tmp_path / "packed")]) == 0
    needs = (
        "a model that needs drot (packed 2:4 weights, boundary rotations, R3 in front of down_proj), bfloat16"
    )
    assert needs in " ".join(capsys.readouterr().out.split())


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
    drot.convert(str(tmp_path / "packed"), str(tmp_path / "again"), "dense")
    assert (tmp_path / "again" / "config.json").exists()
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert is_packed(packed) and packed.lm_head.weight is packed.model.embed_tokens.weight
    before, after = saved_tensors(tmp_path / "stock"), saved_tensors(tmp_path / "dense")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "dense")]
    assert configs[0] == configs[1]


def test_convert_refuses(checkpoints, tmp_path, capsys):
    dense, out = checkpoints / "dense", tmp_path / "out"
    convert = ("convert", dense, "--out", out, "--format")
    assert f"{dense} is dense already: name the other --format" in refused(capsys, *convert, "dense")
    assert "--format must be one of dense, packed; got 'zip'" in refused(capsys, *convert, "zip")
    line = refused(capsys, "convert", MODEL, "--out", out, "--format", "packed")
    assert (
        "layer 0, q_proj: the weight must hold at most 2 non-zeros in each 4 neighbours, row 0 has more"
        in line
    )
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
        convert(checkpoints / "packed", tmp_path / "real", "dense")


def test_a_full_disk(checkpoints, tmp_path, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    line = refused(capsys, "convert", checkpoints / "packed", "--out", tmp_path / "out", "--format", "dense")
    assert f"cannot write {tmp_path / 'out'}: " in line and "No space left on device" in line
    assert list(tmp_path.iterdir()) == []


def test_a_warning_for_a_dtype_that_is_not_kept(checkpoints, tmp_path, caplog):
    folder = shutil.copytree(checkpoints / "packed", tmp_path / "wide")
    rewrite(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}))
    convert(folder, tmp_path / "out", "dense")
    assert "holds tensors of F32, but the dtype in its config.json is bfloat16" in caplog.text
    assert {tensor.dtype for tensor in saved_tensors(tmp_path / "out").values()} == {torch.bfloat16}


def test_a_broken_tokenizer_is_refused_and_a_missing_one_is_not_invented(packed, tmp_path, caplog):
    (packed / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load a tokenizer"):
        convert(packed, tmp_path / "out", "dense")
    for file in packed.glob("*token*"):
        file.unlink()
    convert(packed, tmp_path / "out", "dense")
    assert "holds no tokenizer, so" in caplog.text
    assert not list((tmp_path / "out").glob("*token*"))
