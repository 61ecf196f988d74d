"""Input that does not hold what it says: one line on stderr, status 2, and nothing is written."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoints import change_json, save_small

import drot
from drot.cli import app as cli
from drot.config import PruningConfig, Recipe, RotationConfig
from drot.core.errors import UserError
from drot.evaluation.evaluate import evaluate

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = save_small(tmp_path_factory.mktemp("hostile") / "model")
    (folder.parent / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return folder


@pytest.fixture
def model(original, tmp_path) -> Path:
    shutil.copytree(original, tmp_path / "model")
    shutil.copy(original.parent / "text.txt", tmp_path)
    return tmp_path / "model"


def refused(capfd, model, *options) -> str:
    """The message of `drot prune`, a line behind the lines of the progress. The run leaves nothing behind."""
    here = Path(model).parent
    before = set(here.iterdir()) if here.is_dir() else set()
    out = before and here / "out"
    text = here / "text.txt" if (here / "text.txt").exists() else "c4"
    capfd.readouterr()  # what the test itself has printed
    command = ["prune", str(model), "--out", str(out or "out"), "--calibration", str(text), "--nsamples", "2"]
    status = cli.run([*command, "--seqlen", "8", *options])
    shown = capfd.readouterr()
    assert status == 2, shown
    *progress, message = shown.err.splitlines()
    assert shown.out == "" and message.startswith("drot: "), shown
    assert all(
        re.fullmatch(r"(reading|tokenising|loading) the \w+.* \(\d+ s\)", line) for line in progress
    ), shown
    assert not here.is_dir() or set(here.iterdir()) == before
    return message + "\n"


def change_weights(model, change) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (dict(num_key_value_heads=4), "layers.0.self_attn.k_proj.weight must be [48, 32] .* got [24, 32]"),
        (dict(num_key_value_heads=3), "layers.0.self_attn.k_proj.weight must be [36, 32] .* got [24, 32]"),
        (dict(num_attention_heads=8), "layers.0.self_attn.q_proj.weight must be [96, 32] .* got [48, 32]"),
        (dict(head_dim=16), "layers.0.self_attn.q_proj.weight must be [64, 32] .* got [48, 32]"),
        (dict(vocab_size=80), "calibration token ids must be in [0, 80), the model's vocabulary, got"),
        (dict(vocab_size=10**9), "model.embed_tokens.weight must be [1000000000, 32] .* got [96, 32]"),
        (dict(hidden_size=64), "model.embed_tokens.weight must be [96, 64] .* got [96, 32]"),
        (dict(intermediate_size=64), "layers.0.mlp.gate_proj.weight must be [64, 32] .* got [48, 32]"),
        (dict(num_hidden_layers=2), "num_hidden_layers of config.json is 2, but the weights hold 3 layers"),
        (dict(num_hidden_layers=4), "num_hidden_layers of config.json is 4, but the weights hold 3 layers"),
        (dict(num_hidden_layers=2000), "is 2000, but the weights hold 3 layers"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers: .* less than or equal to 10000, got 1000000000"),
        (dict(attention_bias=True), "layers.0.self_attn.q_proj.bias is missing"),
        (dict(mlp_bias=True), "layers.0.mlp.gate_proj.bias is missing"),
        (dict(tie_word_embeddings=False), "the first is lm_head.weight"),
        (dict(hidden_act="nope"), "hidden_act is 'nope', which transformers does not have"),
        (dict(rope_parameters=dict(rope_type="nope", rope_theta=1e4)), "rope_parameters.rope_type is 'nope'"),
        (dict(layer_types=["full_attention"]), "layer_types must have a value for each of the 3 layers"),
        (dict(hidden_size="32"), "hidden_size: Input should be a valid integer, got '32'"),
        (dict(intermediate_size=None), "intermediate_size: Input should be a valid integer, got None"),
        (dict(num_attention_heads=0), "num_attention_heads: .* got 0"),
        (dict(vocab_size=-1), "vocab_size: .* got -1"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps must be a finite number, got nan"),
        (dict(rms_norm_eps=-1.0), "rms_norm_eps: .* got -1.0"),
        (dict(rope_parameters=dict(rope_theta=float("inf"))), "rope_parameters.rope_theta must be a finite"),
        (dict(rope_theta=0.0), "rope_theta: .* greater than 0, got 0.0"),
        (dict(quantization_config=3), "quantization_config: .* got 3"),
        (dict(quantization_config=dict(quant_method="drot", packed="yes")), "packed: .* got 'yes'"),
        (
            dict(quantization_config=dict(quant_method="drot", layers=3)),
            "quantization_config has layers, which this version of drot does not support: update",
        ),
        (dict(text_config={}), "text_config must be the config of a model, got {}"),
        (dict(sliding_window=0), "sliding_window must be at least 1, got 0"),
        (dict(attn_implementation="owner/kernel"), "the name of code on the hub, which drot does not run"),
        (dict(transformers_weights="../other.safetensors"), "reads weights only from model.safetensors"),
        (dict(dtype="float99"), "cannot load a causal language model .* no attribute 'float99'"),
        (dict(pad_token_id=1000), "Padding_idx must be within num_embeddings"),
    ],
)
def test_config_json_lies(model, capfd, entries, message):
    change_json(model / "config.json", **entries)
    before, _, after = message.partition(" .* ")
    error = refused(capfd, model)
    assert before in error and after in error.partition(before)[2], error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({UP: t[UP].T}), f"{UP} must be [48, 32] by the model's config, got [32, 48]"),
        (lambda t: t.update({UP: t[UP].to(torch.int8)}), f"{UP} must be of dtype BF16 or F16 or F32 or F64"),
        (lambda t: t.update({UP: t[UP][:0]}), f"{UP} must be [48, 32] by the model's config, got [0, 32]"),
        (lambda t: t.pop(UP), f"{UP} is missing from the checkpoint"),
        (lambda t: t.update({UP + "x": t[UP].clone()}), f"the first is {UP}x"),
        (lambda t: t[UP][3].fill_(float("nan")), f"{UP} must hold finite numbers"),
        (lambda t: t[UP][3, 1].fill_(float("inf")), f"{UP} must hold finite numbers"),
        (
            lambda t: t[UP].mul_(1e30),
            "layer 1: the model's outputs on the calibration text must have a finite",
        ),
    ],
)
def test_weights_lie(model, capfd, change, message):
    change_weights(model, change)
    assert message in refused(capfd, model)
    if "outputs" in message:  # a layer before it is pruned and saved first, if nothing is rotated
        assert message in refused(capfd, model, "--rotation", "none")


def test_the_index_of_the_weights_lies(model, capfd):
    weights, index = model / "model.safetensors", model / "model.safetensors.index.json"
    other = model.parent / "other.safetensors"
    shutil.copy(weights, other)
    names = list(load_file(weights))
    weights.unlink()
    for name in ("../other.safetensors", str(other), "a/../../other.safetensors", "..", ""):
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))
        assert "must be the name of a file in the same folder" in refused(capfd, model)
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "link.safetensors")}))
    assert "link.safetensors is missing" in refused(capfd, model)
    (model / "link.safetensors").symlink_to(other)
    assert f"is a link to {other.resolve()}, outside of the folder" in refused(capfd, model)
    (model / "link.safetensors").unlink()
    shutil.move(other, model / "link.safetensors")
    drot.load(model, device="cpu")


def test_links_inside_the_cache_of_the_hub_are_followed(model, tmp_path):
    cache = tmp_path / "models--owner--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    shutil.move(model, cache / "snapshots" / "0123")
    for file in list((cache / "snapshots" / "0123").iterdir()):
        shutil.move(file, cache / "blobs" / file.name)
        file.symlink_to(os.path.join("..", "..", "blobs", file.name))
    drot.load(cache / "snapshots" / "0123", device="cpu")


def test_pickles_are_not_opened(model, capfd, tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "was-run"), "w")

    (model / "model.safetensors").unlink()
    torch.save(Trap(), model / "pytorch_model.bin")
    assert "pytorch_model.bin, a pickle, which can run code" in refused(capfd, model)
    assert not (tmp_path / "was-run").exists()


def test_code_is_neither_asked_for_nor_run(model, capfd, tmp_path, monkeypatch):
    """`yes | drot prune` answers every question with y."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    for name in ("custom.py", "custom_generate/generate.py"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\ndef generate(*a, **k): pass\n")
    code = {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M", "AutoTokenizer": ["custom.T", None]}
    change_json(model / "config.json", auto_map=code)
    drot.load(model, device="cpu")  # the family of the model is known: its own code is not needed
    change_json(model / "tokenizer_config.json", auto_map=code, tokenizer_class="Custom")
    cli.run(["eval", str(model), "--ppl", str(model.parent / "text.txt"), "--seqlen", "8"])
    change_json(model / "config.json", model_type="custom")
    assert "its own code, which drot never runs" in refused(capfd, model)
    assert not asked and not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{\0}\0", b"[]", b'{"a":', b'{"a": ' + b"[" * 5000, None])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_hold_something_else(model, capfd, name, content):
    (model / name).unlink()
    if content is None:
        (model / name).mkdir()
    else:
        (model / name).write_bytes(content)
    assert name in refused(capfd, model)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_pipes_and_sparse_files_among_the_files_of_a_model(model, capfd, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert f"{name} must be a file, got a pipe" in refused(capfd, model)
    (model / name).unlink()
    with (model / name).open("wb") as handle:
        handle.truncate(20 * 10**9)
    assert f"{name} must have at most 1073741824 bytes" in refused(capfd, model)


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_a_folder_that_lost_its_tokenizer(model, capfd, kind):
    """transformers makes an empty tokenizer, or says that sentencepiece or tiktoken must be installed."""
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    assert "has no tokenizer.json: copy that of its base model into it" in refused(capfd, model)


def test_what_is_no_model(model, capfd):
    for name, message in (
        (model.parent / "nope", "there is no such folder"),
        ("./nope", "there is no such folder: './nope'"),
        ("a/b/c", "there is no such folder"),
        (model.parent / "text.txt", "is a file: name the folder"),
        (model.parent, "holds no config.json"),
        ("x" * 300, "there is no such folder: 'xxx"),
    ):
        assert message in refused(capfd, name)
    (model / "adapter_config.json").write_text("{}")
    assert "holds an adapter next to a model" in refused(capfd, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "1e308", "--optimizer", "paper"], "--lr must be a finite number above 0 and at most 100"),
        (["--damping", "1e308"], "--damping must be a finite number from 0 to 1e+06"),
        (["--nsamples", "1000000000"], "--nsamples times --seqlen must be at most"),
        (["--nsamples", "1000000"], "--nsamples must be at most"),
        (["--out", "x" * 300], "a name must have at most 240 bytes, got 300: shorten it"),
        (["--out", "x" * 250], "a name must have at most 240 bytes, got 250: shorten it"),
        (["--out", "x" * 300 + "/out"], "cannot write"),
        (["--save-rotations", "x" * 300], "cannot write"),
        (["--calibration", "x" * 300 + ".txt"], "is no such name and no file"),
        (["--recipe", "x" * 300], "is too long for a file: shorten it"),
    ],
)
def test_numbers_and_names_that_no_run_can_have(model, capfd, options, message, monkeypatch):
    monkeypatch.chdir(model)
    assert message in refused(capfd, model, *options)


@pytest.mark.parametrize("arguments", ["eval X", "export X --out a", "report X", "report . --out X"])
def test_names_that_no_file_can_have(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["x" * 300 if word == "X" else word for word in arguments.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "the quick brown fox".encode("utf-16"),
            "must be UTF-8, got byte 0xff at offset 0: .* iconv -f utf-16",
        ),
        ("the quick brown fox".encode("utf-16-le"), "got a zero byte: it is UTF-16 or no text"),
        (b"", "is empty"),
        (b"one", "must have more tokens than --seqlen, 8; .* has 3"),
    ],
)
def test_texts(model, capfd, content, message):
    (model.parent / "text.txt").write_bytes(content)
    before, _, after = message.partition(" .* ")
    error = refused(capfd, model)
    assert before in error and after in error.partition(before)[2], error


def test_names_with_markup_and_escape_sequences(model, capfd, monkeypatch):
    """`[/b]` is markup of rich, and the rest would make a terminal red and rename its window."""
    monkeypatch.chdir(model.parent)  # a long path is cut off in a narrow table
    named = model.parent / "m[/b]\x1b[31m:smile:\x1b]0;x\x07"
    shutil.move(model, named)
    out = named.parent / "out[/b]\x1b[31m"
    command = ["--calibration", str(model.parent / "text.txt"), "--nsamples", "2", "--seqlen", "8"]
    command += ["--steps", "1", "--quality", "fast"]
    assert cli.run(["prune", str(named.relative_to(model.parent)), "--out", str(out), *command]) == 0
    shown = capfd.readouterr()
    assert r"m[/b]\x1b[31m:smile:\x" in shown.out and r"out[/b]\x1b[31m" in shown.out
    assert "\x1b" not in shown.out and "\x07" not in shown.out
    change_json(out / "drot.json", device="\x1b[31m[bold]")
    assert cli.run(["info", str(out)]) == 0
    shown = capfd.readouterr()
    assert r"\x1b[31m[bold]" in shown.out and "\x1b" not in shown.out + shown.err
    change_json(out / "drot.json", seconds={"total": 1.0, "rotate": None})
    assert cli.run(["info", str(out)]) == 2
    shown = capfd.readouterr()
    assert shown.out == "" and "seconds.rotate: Input should be a valid number" in shown.err
    change_json(out / "drot.json", format_version="\x1b[31m")
    assert cli.run(["info", str(out)]) == 2
    shown = capfd.readouterr()
    assert shown.out == "" and "\x1b" not in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(model=None), "`model` must be a str or Path or PreTrainedModel; got None"),
        (dict(model=3), "`model` must be"),
        (dict(recipe={"steps": 3}), "`recipe` must be a Recipe or None"),
        (dict(out=3), "`out` must be a str or Path or None; got 3"),
        (dict(calibration=[[1, 2]]), "`calibration` must be a Tensor or None"),
        (dict(device=0), "`device` must be a str or device; got 0"),
        (dict(dtype=["float32"]), "`dtype` must be a str or dtype"),
        (dict(rotations=b"file"), "`rotations` must be"),
        (dict(resume="yes"), "`resume` must be a bool"),
        (dict(progress=True), "`progress` must be callable; got True, a bool"),
        (dict(tokenizer="name"), "`tokenizer` must be callable; got 'name', a str"),
        (dict(format=["dense"]), "`format` must be one of dense, packed"),
    ],
)
def test_wrong_types_from_python(arguments, message):
    with pytest.raises(UserError) as caught:
        drot.prune(**(dict(model="some-model") | arguments))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Recipe(rotation=PruningConfig()),
        lambda: RotationConfig(lr="much"),
        lambda: RotationConfig(steps=True),
        lambda: RotationConfig(reference_compat="no"),
        lambda: PruningConfig(damping="0.1"),
        lambda: drot.load(None),
        lambda: drot.load("model", dtype=3),
        lambda: drot.finetune(None),
        lambda: drot.finetune("model", progress=3),
        lambda: drot.finetune("model", tokenizer=3),
        lambda: drot.sensitivity("model", progress=3),
        lambda: evaluate(["model"], progress=3),
        lambda: Recipe.from_dict(None),
        lambda: Recipe.from_dict([("rotation", {})]),
    ],
)
def test_settings_of_wrong_types(made):
    with pytest.raises(UserError, match="must be"):
        made()


def test_the_config_of_qwen2_without_a_window(tmp_path):
    """As transformers saves it: the entry says 0, and another says that it does not count."""
    folder = save_small(tmp_path / "model", "qwen2")
    change_json(folder / "config.json", use_sliding_window=False, sliding_window=0)
    drot.load(folder, device="cpu")


def test_a_partial_folder_that_is_a_link(model, capfd, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")
    assert "out.partial is a link" in refused(capfd, model)
