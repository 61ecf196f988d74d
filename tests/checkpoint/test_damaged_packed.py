"""The messages for packed checkpoints with damaged, edited or missing files."""

import json
import shutil

import pytest
import torch
from packed_checkpoints import UP, refused, rewrite
from small_models import random_tokens
from transformers import AutoModelForCausalLM

import drot
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.reporting.demo import HELD_OUT

pytestmark = pytest.mark.slow  # they prune and open the embedded model


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
def test_damaged_tensors(packed, change, message):
    rewrite(packed, change)
    for opening in (AutoModelForCausalLM.from_pretrained, drot.load):
        with pytest.raises(UserError) as caught:
            opening(packed)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 4},
            "num_hidden_layers of config.json is 4, but the weights hold 8 layers: config.json was edited",
        ),
        (
            {"quantization_config": {"quant_method": "drot", "packed": True}},
            "model.layers.0.post_attention_layernorm.weight is missing from the checkpoint",
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


def test_a_faulty_manifest(packed, capsys):
    file = packed / "drot.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layers": [{}]}))
    assert cli.run(["info", str(packed)]) == 2
    assert f"{file} lacks layers.0.layer: it was edited" in capsys.readouterr().err


def test_truncated_file(packed, capsys):
    file = next(packed.glob("model-00001-of-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} is not a complete safetensors file" in refused(capsys, "eval", packed, "--ppl", HELD_OUT)


def test_a_shard_that_is_missing(checkpoints, tmp_path, capsys):
    folder = tmp_path / "sharded"
    shutil.copytree(checkpoints / "packed", folder)
    for file in folder.glob("model*"):
        file.unlink()
    drot.load(checkpoints / "packed", device="cpu").save_pretrained(folder, max_shard_size="1MB")
    tokens = random_tokens(1, 8)
    expected = drot.load(checkpoints / "packed", device="cpu")(tokens).logits
    assert torch.equal(drot.load(folder, device="cpu")(tokens).logits, expected)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][f"{UP}.values"]
    shard.unlink()
    assert shard.name in refused(capsys, "eval", folder, "--ppl", HELD_OUT)
