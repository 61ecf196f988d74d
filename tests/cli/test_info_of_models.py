"""`drot info MODEL` of models that drot has not written, and the refusal of what is no dense model."""

import json

import pytest
from made_manifests import made_manifest
from small_checkpoints import change_json
from small_models import FAMILIES, save_small_model, small_model
from transformers import AutoConfig

import drot
from drot.checkpoint.manifest import write_manifest
from drot.checkpoint.opening import load_outer_config
from drot.checkpoint.stored_config import write_stored_form
from drot.cli import app as cli
from drot.config import Recipe
from drot.core.errors import UserError


def shown(capsys, folder) -> str:
    assert cli.run(["info", str(folder)]) == 0
    return " ".join(capsys.readouterr().out.split())


def refused(capsys, *arguments) -> str:
    assert cli.run([*arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def with_config(folder, model_type, **entries):
    AutoConfig.for_model(model_type, **entries).save_pretrained(folder)
    return folder


# ---- a model of a known family -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "granite", "phi3"])
def test_a_known_family(family, tmp_path, capsys):
    small_model(family).config.save_pretrained(tmp_path)
    text = shown(capsys, tmp_path)
    assert f"model type {family} supported yes" in text and "rotations R1, R2, R3" in text
    assert ("mlp.gate_up_proj: gate_proj, up_proj" in text) == (family == "phi3")
    assert cli.run(["info", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rotations"] == ["r1", "r2", "r3"]


# ---- a model of another family -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "facts"),
    [
        (
            "olmo",
            "nothing: compare the forward passes lacks input_layernorm, post_attention_layernorm",
        ),
        ("minimax", "cannot place self_attn.norm (RMSNorm), self_attn.qkv_proj (Linear)"),
        ("gpt2", "cannot place ln_1 (LayerNorm), attn.c_attn (Conv1D), attn.c_proj (Conv1D)"),
    ],
)
def test_an_unknown_family(model_type, facts, tmp_path, capsys):
    """The modules with weights that the nearest declaration lacks, and those that it has in addition."""
    text = shown(capsys, with_config(tmp_path, model_type, num_hidden_layers=2))
    assert "supported no" in text and "docs/architectures.md" in text
    nearest = {"minimax": "qwen3_moe"}
    assert f"nearest family {nearest.get(model_type, 'llama')}" in text
    assert facts in text


def test_a_family_whose_layers_have_widths_of_their_own(tmp_path, capsys):
    """Its intermediate_size is a list."""
    model_type = "gemma3n_text"
    folder = with_config(tmp_path, model_type, num_hidden_layers=2, intermediate_size=[8192, 8192])
    assert "supported no" in shown(capsys, folder)
    assert f"'{model_type}' is not supported" in refused(
        capsys, "prune", str(folder), "--out", str(tmp_path / "o")
    )


def test_a_model_that_reads_images_too(tmp_path, capsys):
    text = shown(capsys, with_config(tmp_path / "known", "mistral3"))
    assert "language model of type mistral; the rest is kept as it is supported yes, like Mistral" in text
    text = shown(capsys, with_config(tmp_path / "unknown", "llava_next"))
    assert "language model llama supported no" in text


def test_prune_names_the_command(tmp_path, capsys):
    line = refused(capsys, "prune", str(with_config(tmp_path, "olmo")), "--out", str(tmp_path / "out"))
    assert "model type 'olmo' is not supported" in line and "drot info MODEL" in line
    assert all(name.partition("-")[0] in line for name in FAMILIES)


# ---- what is no dense model --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (dict(quant_method="gptq", bits=4, group_size=128), "GPTQ"),
        (dict(quant_method="awq", bits=4), "AWQ"),
        (dict(quant_method="bitsandbytes", load_in_4bit=True), "bitsandbytes"),
        (dict(load_in_8bit=True), "bitsandbytes"),
        (dict(quant_method="compressed-tensors", format="int-quantized"), "compressed-tensors"),
        (dict(quant_method="fbgemm_fp8"), "fbgemm_fp8"),
    ],
)
@pytest.mark.parametrize("command", ["prune", "finetune"])
def test_a_quantised_checkpoint_is_refused_by_name(command, entry, name, tmp_path, capsys):
    folder = save_small_model(small_model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    capsys.readouterr()  # the progress of saving
    line = refused(capsys, command, str(folder), "--out", str(tmp_path / "out"))
    assert f"this model is quantised ({name}): name the model that it was made from" in line
    assert not (tmp_path / "out").exists()
    assert f"quantised {name}:" in shown(capsys, folder)


@pytest.mark.parametrize("entry", [dict(boundary="input"), dict(packed=True)])
def test_a_checkpoint_of_drot_without_its_manifest(entry, tmp_path, capsys, monkeypatch):
    small_model("llama").config.save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", quantization_config={"quant_method": "drot"} | entry)
    write_stored_form(tmp_path / "config.json")
    line = refused(capsys, "info", str(tmp_path))
    assert f"{tmp_path} is in a format of drot, and has no drot.json" in line
    config = load_outer_config(str(tmp_path))
    monkeypatch.setattr("drot.checkpoint.describe.load_outer_config", lambda name: config)
    monkeypatch.setattr("drot.checkpoint.source.model_folder", lambda name: tmp_path)
    assert "org/pruned is in a format of drot, and has no drot.json" in refused(capsys, "info", "org/pruned")


def test_a_checkpoint_of_drot_on_the_hub(tmp_path, capsys, monkeypatch):
    """Its manifest is one of the small files that are fetched."""
    write_manifest(tmp_path, made_manifest(Recipe(), base_model="someone/model"))
    monkeypatch.setattr("drot.checkpoint.source.model_folder", lambda name: tmp_path)
    assert cli.run(["info", "org/pruned"]) == 0
    assert "someone/model" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["prune", "info"])
def test_an_adapter_alone_is_refused_with_its_model(command, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    (tmp_path / "adapter_model.safetensors").touch()
    out = ["--out", str(tmp_path / "out")] * (command == "prune")
    line = refused(capsys, command, str(tmp_path), *out)
    assert "an adapter (LoRA) of 'Qwen/Qwen3-8B': merge it into its model" in line


def test_a_folder_of_gguf_names_the_option(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-Q4_K_M.gguf").touch()
    line = refused(capsys, "prune", str(folder), "--out", str(tmp_path / "out"))
    assert "holds no config.json but a GGUF file: add --gguf-file model-Q4_K_M.gguf to drot prune" in line
    small_model("llama").config.save_pretrained(folder)
    with pytest.raises(UserError, match="but a GGUF file: add --gguf-file model-Q4_K_M.gguf"):
        drot.load(folder)
