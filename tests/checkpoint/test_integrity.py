"""The hashes of a checkpoint: recorded when it is written, compared when it is loaded or verified."""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from made_manifests import made_evaluation
from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from small_models import random_tokens, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.checkpoint import load, opening
from drot.checkpoint.convert import convert
from drot.checkpoint.manifest import accept_files, read_manifest, update_manifest
from drot.checkpoint.records import EvaluationRecord
from drot.checkpoint.verify import verify_folder
from drot.cli import app as cli
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig
from drot.core import hashes
from drot.core.errors import UserError

TOKENS = random_tokens(2, 40)


def unchanged(manifest):
    """A change for `update_manifest`."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A packed and rotated checkpoint in several shards. Tests must not change it."""
    out = tmp_path_factory.mktemp("checkpoint") / "out"
    recipe = Recipe(
        rotation=RotationConfig(steps=1),
        pruning=PruningConfig(method="magnitude"),
        calibration=CalibrationConfig(seqlen=40),
    )
    model = small_model("llama", head_dim=16)
    drot.prune(model, recipe, calibration=TOKENS, device="cpu", out=out, format="packed")
    (out / "README.md").write_text("a card")
    update_manifest(out, unchanged, rewritten=["README.md"])
    return out


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


def shards(folder):
    return sorted(file.name for file in folder.glob("model-*.safetensors"))


def flip(file, offset=-1):
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def flip_weight(folder):
    """Flips the lowest bit of the first weight of the first shard."""
    file = folder / shards(folder)[0]
    flip(file, 8 + int.from_bytes(file.read_bytes()[:8], "little"))


def verify(capsys, folder, *options):
    """The status, the lines on stdout and the line on stderr of drot info --verify."""
    capsys.readouterr()
    status = cli.run(["info", str(folder), "--verify", *options])
    captured = capsys.readouterr()
    assert captured.err.count("\n") <= 1
    return status, captured.out.splitlines(), captured.err


def test_a_manifest_without_its_digest_is_damaged(copy):
    file = copy / "drot.json"
    entries = json.loads(file.read_text())
    del entries["digest"]
    file.write_text(json.dumps(entries))
    assert verify_folder(file.parent).damaged == {"drot.json": "lacks its digest"}


def test_every_file_is_recorded(checkpoint, capsys):
    manifest = read_manifest(checkpoint)
    names = {file.name for file in checkpoint.iterdir()}
    assert set(manifest.files) == names - {"drot.json"} and len(shards(checkpoint)) > 2
    for name, record in manifest.files.items():
        content = (checkpoint / name).read_bytes()
        assert (record.sha256, record.bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    text = json.loads((checkpoint / "drot.json").read_text())
    digest = text.pop("digest")
    assert (
        digest == hashlib.sha256(json.dumps(text, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    )
    assert verify(capsys, checkpoint) == (
        0,
        [f"The record fits {len(names)} files in {checkpoint}"],
        "",
    )


#: damage of a copy, the file that is named, what is said about it
LOADED = {
    "flipped weight": (flip_weight, "model-00001", "has another SHA-256"),
    "flipped config": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("1e-06", "1e-05")),
        "config.json",
        "has another SHA-256",
    ),
}


@pytest.mark.parametrize("damage", LOADED)
def test_a_damaged_checkpoint_is_neither_loaded_nor_converted(damage, copy, tmp_path, capsys):
    """The damage leaves a checkpoint that transformers opens, with other values."""
    change, name, problem = LOADED[damage]
    change(copy)
    message = f"{name}.* is not the file that drot.json describes: it {problem}"
    with pytest.raises(UserError, match=message):
        drot.load(copy, device="cpu")
    with pytest.raises(UserError, match=message):
        convert(copy, tmp_path / "out", "dense")
    assert not (tmp_path / "out").exists()
    drot.load(copy, device="cpu", verify=False)
    status, lines, error = verify(capsys, copy)
    assert status == 2 and len(lines) == 1 and lines[0].startswith(name) and problem in lines[0]
    assert f"the record fits all files in {copy} but 1 of {len(list(copy.iterdir()))}: " in error
    assert cli.run(["info", str(copy), "--accept"]) == 0
    drot.load(copy, device="cpu")
    assert verify(capsys, copy)[0] == 0


def test_a_folder_without_a_shard_is_not_accepted(copy, capsys):
    (copy / (missing := shards(copy)[1])).unlink()
    assert cli.run(["info", str(copy), "--accept"]) == 2
    assert f"{missing} is missing: copy the model again" in capsys.readouterr().err


def test_evaluations_of_other_weights_are_dropped(copy, caplog, capsys):
    def add(manifest):
        manifest.evaluations = [EvaluationRecord.model_validate(made_evaluation({"text": 5.0}))]

    update_manifest(copy, add)
    (copy / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert cli.run(["info", str(copy), "--accept", "--json"]) == 0
    assert "notes.txt" in json.loads(capsys.readouterr().out)["accepted"]
    assert len(read_manifest(copy).evaluations) == 1
    shard = copy / shards(copy)[0]
    tensors = {name: tensor + 1 for name, tensor in load_file(shard).items()}
    save_file(tensors, shard, metadata={"format": "pt"})
    accept_files(copy)
    assert not read_manifest(copy).evaluations and "the evaluations in drot.json were dropped" in caplog.text


def test_a_file_from_which_transformers_would_load_instead(copy, capsys):
    """transformers prefers model.safetensors to the shards."""
    tensors = {name: t.clone() for shard in shards(copy) for name, t in load_file(copy / shard).items()}
    tensors["model.norm.weight"] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    drot.load(copy, device="cpu", verify=False)
    with pytest.raises(UserError, match="copy/model.safetensors is not the file .*: it is not in the list"):
        drot.load(copy, device="cpu")
    status, lines, error = verify(capsys, copy)
    assert (status, lines) == (2, ["model.safetensors is extra"])
    assert "remove the extra files" in error and "copy them again" not in error


def test_verify_names_every_file(copy, capsys):
    first, second, third = shards(copy)[:3]
    flip(copy / first)
    (copy / second).unlink()
    (copy / third).write_bytes((copy / third).read_bytes()[:50])
    (copy / "README.md").write_text("my card")
    (copy / "notes.txt").write_text("mine")
    (copy / "report.html").write_text("as drot report writes it")
    status, lines, error = verify(capsys, copy)
    assert status == 2 and "but 4 of" in error and "record a change of your own with --accept" in error
    assert lines[0] == "README.md has 7 bytes, not 6"
    assert lines[1] == f"{first} has another SHA-256"
    assert lines[2] == f"{second} is missing"
    assert lines[3].startswith(f"{third} has 50 bytes, not ")
    assert lines[4:] == ["notes.txt is not listed in drot.json, and no model is loaded from it"]
    status, lines, _ = verify(capsys, copy, "--json")
    found = json.loads(lines[0])
    assert status == 2 and found["unknown"] == ["notes.txt"] and found["damaged"][second] == "is missing"


def test_files_that_are_often_edited_are_reported_and_do_not_hinder_a_load(copy, capsys):
    for name in ("README.md", "generation_config.json"):
        (copy / name).write_text("{}")
    (copy / "tokenizer.json").write_text("{}")
    drot.load(copy, device="cpu")
    assert [line.split()[0] for line in verify(capsys, copy)[1]] == [
        "README.md",
        "generation_config.json",
        "tokenizer.json",
    ]


def test_the_report_and_hidden_folders_are_not_recorded(copy, capsys):
    """drot report writes its page anew, and git and the hub's cache change their own folders."""
    before = read_manifest(copy).files
    (copy / "report.html").write_text("as drot report writes it")
    for name in (".git/index", ".cache/huggingface/download/config.json.metadata", "figures/.state/a"):
        (copy / name).parent.mkdir(parents=True)
        (copy / name).write_text("1")
    for name in (".gitattributes", "figures/a.svg"):
        (copy / name).write_text("1")
    assert cli.run(["info", str(copy), "--accept"]) == 0
    assert read_manifest(copy).files.keys() == before.keys() | {".gitattributes", "figures/a.svg"}
    (copy / "report.html").write_text("of other linears")
    (copy / ".git" / "index").write_text("2")
    assert verify(capsys, copy)[::2] == (0, "")


def test_a_manifest_that_was_edited(copy, capsys, caplog):
    file = copy / "drot.json"
    text = file.read_text()
    file.write_text(text.replace('"magnitude"', '"wanda"'))
    assert read_manifest(copy).recipe.pruning.method == "wanda"
    assert "drot.json was edited or damaged: its content does not fit its digest" in caplog.text
    status, lines, _ = verify(capsys, copy)
    assert status == 2 and lines == ["drot.json does not fit its digest"]
    with pytest.raises(UserError, match="was edited or damaged: it is not updated"):
        update_manifest(copy, unchanged)
    drot.load(copy, device="cpu")  # its hashes are still right
    accept_files(copy)
    assert verify(capsys, copy)[0] == 0
    data = json.loads(text)
    for files, problem in (
        (None, "lacks files: it was edited"),
        ({}, "files: Dictionary should have at least 1 item"),
        ({"config.json": 3}, "files.config.json: .* got 3"),
        ({"../x": data["files"]["config.json"]}, "must be the path of a file below the folder"),
        ({"/x": {"sha256": "", "bytes": 0}}, "must be the path of a file below the folder"),
    ):
        edited = {key: data[key] for key in data if key != "files"} | (
            {} if files is None else {"files": files}
        )
        file.write_text(json.dumps(edited))
        for use in (lambda: drot.load(copy, device="cpu"), lambda: verify_folder(copy)):
            with pytest.raises(UserError, match=problem):
                use()


def test_every_entry_stands_in_the_class_and_comes_back(copy, capsys):
    """What drot writes has a field, and what another program adds to drot.json stays there."""
    manifest = read_manifest(copy)
    assert unknown_entries(manifest) == {"seconds": {*manifest.seconds.phases}}
    written = json.loads((copy / "drot.json").read_text())
    assert json.loads(json.dumps(manifest.to_dict())) == written
    (copy / "drot.json").write_text(json.dumps(hashes.with_digest(written | {"mine": [1]})))
    update_manifest(copy, unchanged)
    assert json.loads((copy / "drot.json").read_text())["mine"] == [1]


def unknown_entries(value, where=""):
    """Place → the names of the entries that have no field in their class."""
    found = {}
    if isinstance(value, BaseModel):
        if value.model_extra:
            found[where] = set(value.model_extra)
        value = {name: getattr(value, name) for name in type(value).model_fields}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        found |= unknown_entries(item, f"{where}.{name}".lstrip("."))
    return found


def test_programs_that_update_a_manifest_wait_for_each_other(copy, capsys):
    def append(number):
        def change(manifest):
            manifest.other_machines = [*manifest.other_machines, {"threads": number}]

        update_manifest(copy, change)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(12)))
    assert sorted(other["threads"] for other in read_manifest(copy).other_machines) == list(range(12))
    assert verify(capsys, copy)[0] == 0
    (copy / "README.md").write_text("a new card")
    update_manifest(copy, unchanged, rewritten=["README.md"])
    assert verify(capsys, copy)[0] == 0


def test_a_model_of_the_hub_is_compared_too(copy, monkeypatch):
    for module in (load, opening):
        monkeypatch.setattr(module, "model_folder", lambda name, weights=False: copy)
    drot.load("someone/some-model", device="cpu")
    flip_weight(copy)
    with pytest.raises(UserError, match=r"model-00001.* is not the file that drot.json describes"):
        drot.load("someone/some-model", device="cpu")
    drot.load("someone/some-model", device="cpu", verify=False)


def test_a_failed_load_does_not_wait_for_the_hashes(copy, monkeypatch):
    """The error of the loader is raised, and the hashing of large files ends early."""

    def fails(*args, **kwargs):
        raise ValueError("no such weights")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    stopped = []
    real = hashes.file_record

    def file_record(file, stop=None):
        stop.wait(20)
        stopped.append(stop.is_set())
        return real(file, stop)

    monkeypatch.setattr(hashes, "file_record", file_record)
    with pytest.raises(UserError, match="no such weights"):
        drot.load(copy, device="cpu")
    assert stopped and all(stopped)


def test_an_unfinished_run_is_verified(tmp_path, capsys):
    from drot.checkpoint.resume import RunState

    state = RunState(tmp_path / "out", {"a": 1})
    for number in (0, 1):
        state.save(f"layer_{number:05d}", {"x": torch.arange(9.0)}, {"seconds": number})
    assert verify(capsys, state.folder) == (0, [f"The record fits 4 files in {state.folder}"], "")
    flip(state.folder / "layer_00001.safetensors")
    flip(state.folder / "run.json", 10)
    status, lines, error = verify(capsys, state.folder)
    assert (status, lines) == (
        2,
        ["layer_00001.safetensors has another SHA-256", "run.json is missing or does not fit its digest"],
    )
    assert "no run goes on without run.json" in error and "--accept" not in error
    flip(state.folder / "run.json", 10)
    assert (
        "the run goes on with --resume, and computes damaged parts again" in verify(capsys, state.folder)[2]
    )


def test_verify_needs_a_folder(capsys):
    for option in ("--verify", "--accept"):
        assert cli.run(["info", option]) == 2
        assert f"{option} needs MODEL" in capsys.readouterr().err
    assert cli.run(["info", "folder", "--verify", "--accept"]) == 2
    assert "give --verify, or --accept" in capsys.readouterr().err
