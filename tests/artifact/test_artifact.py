"""Artifacts: the same bytes, on another machine too, from the right model only, without dense weights."""

import json
import os
import shutil
import zipfile

import numpy as np
import pytest
import torch
from runs import saved_tensors
from safetensors.torch import load_file
from small_models import random_tokens, small_model
from together import started

import drot
from drot.checkpoint.artifact import apply as applying
from drot.checkpoint.artifact import container
from drot.checkpoint.artifact import export as exporting
from drot.checkpoint.artifact import prediction as predicting
from drot.checkpoint.artifact.apply import apply_artifact
from drot.checkpoint.artifact.coding import ZERO
from drot.checkpoint.artifact.export import export_artifact
from drot.checkpoint.load import load_model
from drot.checkpoint.manifest import accept_files
from drot.cli import app as cli
from drot.config import PruningConfig, Recipe, RotationConfig
from drot.core.errors import UserError
from drot.core.hashes import parts_digest

pytestmark = pytest.mark.slow

#: of the checkpoints of models with three layers
SHARD = "model-00001-of-00004.safetensors"
WANDA = PruningConfig(method="wanda", solve="none", target="self")
#: the record of a file in an artifact
EMPTY = {"sha256": "", "bytes": 0}


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Made:
    """A dense model, its pruned checkpoint and the checkpoint's artifact, in folders below `path`."""

    def __init__(self, path, family="llama", dtype=torch.bfloat16, format="dense", **sections):
        self.dense, self.pruned, self.file = path / "dense", path / "pruned", path / "a.drot"
        small_model(family, dtype=dtype, hidden_size=64, intermediate_size=96).save_pretrained(self.dense)
        rotation = sections.setdefault("rotation", RotationConfig(steps=5))
        self.rotations = None if rotation.mode == "none" else path / "rotations.safetensors"
        drot.prune(
            load_model(self.dense),
            Recipe(**sections),
            out=self.pruned,
            calibration=random_tokens(4, 16),
            format=format,
            save_rotations_to=self.rotations,
            device="cpu",
        )
        self.summary = export_artifact(self.pruned, self.file, model=self.dense, rotations=self.rotations)

    def apply(self, out, model=None):
        return apply_artifact(self.file, out, model=model or self.dense)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of the default recipe. Tests leave its files as they are."""
    return Made(tmp_path_factory.mktemp("made"))


CASES = {
    "not rotated": dict(rotation=RotationConfig(mode="none"), pruning=WANDA),
    "wanda": dict(pruning=WANDA),
    "balanced": dict(),
    "packed beside dense": dict(format="packed", pruning=PruningConfig(keep=("layers.0.*",))),
    "ratio": dict(pruning=PruningConfig(sparsity=0.3)),
    "shared": dict(rotation=RotationConfig(mode="shared", steps=5)),
    "light": dict(rotation=RotationConfig(mode="shared", steps=5, down_rotation=32), format="packed"),
    "without R3": dict(rotation=RotationConfig(steps=5, down_rotation="none")),
    "residual": dict(rotation=RotationConfig(steps=5, hessians="dense", boundary="residual")),
    "layers that share": dict(rotation=RotationConfig(steps=5, layers_per_rotation=2), format="packed"),
    "recovered": dict(recovery=drot.RecoveryConfig(recover="block", recover_epochs=1)),
    "biased": dict(family="llama-biased"),
    "qwen3": dict(family="qwen3", pruning=WANDA),
    "phi3": dict(family="phi3", pruning=WANDA),
    "lfm3": dict(family="lfm3", pruning=WANDA),
    "gemma4": dict(family="gemma4_text-lends", pruning=WANDA),
    "nemotron_h": dict(family="nemotron_h-dense", pruning=WANDA),
    "apertus": dict(family="apertus", pruning=WANDA),
    "float16": dict(dtype=torch.float16, pruning=WANDA),
    "float32": dict(dtype=torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes(tmp_path, case, monkeypatch):
    """Also with pieces of a few rows, as a large model has."""
    monkeypatch.setattr(predicting, "PIECE", 1000)
    made = Made(tmp_path, **CASES[case])
    made.apply(tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(made.pruned)


def test_an_embedding_in_fp32_is_not_stored_whole(tmp_path, monkeypatch):
    """The bound grew with the vocabulary, and what it covers is stored as it is, to be exact elsewhere."""
    dense = small_model("llama", hidden_size=64, intermediate_size=96, vocab_size=20_000)
    dense.save_pretrained(tmp_path / "dense")
    encoded, shares = exporting.encode, []

    def counting(actual, rows, tolerance):
        parts = encoded(actual, rows, tolerance)
        if len(actual) > 1000:
            kinds = np.frombuffer(parts.get("unsure", b""), "<i8").reshape(2, -1)[1]
            shares.append((kinds == ZERO).sum() / actual.numel())
        return parts

    monkeypatch.setattr(exporting, "encode", counting)
    drot.prune(
        load_model(tmp_path / "dense"), Recipe(rotation=RotationConfig(steps=2), pruning=WANDA),
        out=tmp_path / "pruned", calibration=random_tokens(4, 16), device="cpu",
        save_rotations_to=tmp_path / "rotations.safetensors",
    )  # fmt: skip
    export_artifact(
        tmp_path / "pruned", tmp_path / "a.drot", model=tmp_path / "dense",
        rotations=tmp_path / "rotations.safetensors",
    )  # fmt: skip
    assert len(shares) == 2 and max(shares) < 0.005  # embedding and head


def test_files_that_may_hold_dense_weights_stay_outside(made, tmp_path, caplog):
    """The checkpoints of a training, and weights in other formats, also after `drot info --accept`."""
    folder = tmp_path / "pruned"
    shutil.copytree(made.pruned, folder)
    (folder / "checkpoint-5").mkdir()
    for name in ("checkpoint-5/pytorch_model.bin", "checkpoint-5/model.safetensors", "consolidated.pth"):
        (folder / name).write_bytes(b"dense")
    shutil.copyfile(made.rotations, folder / "rotations.safetensors")
    accept_files(folder)
    export_artifact(folder, tmp_path / "a.drot", model=made.dense, rotations=made.rotations)
    with zipfile.ZipFile(tmp_path / "a.drot") as archive:
        names = {name.removeprefix("files/") for name in archive.namelist()}
    assert "rotations.safetensors" in str(names) and "config.json" in names
    assert not any("checkpoint-5" in name or "pth" in name for name in names)
    assert caplog.text.count("is left out of the artifact") == 3


def disturbed(prediction, generator):
    """The same prediction on a machine that rounds differently: each element moves by a part of 1e-14."""
    for rows in prediction.pieces:
        noise = torch.rand(rows.shape, generator=generator, dtype=torch.float64) - 0.5
        yield rows + noise * 1e-14 * (prediction.tolerance > 0)


@pytest.mark.parametrize("case", ["float32", "wanda"])
def test_another_machine_gives_the_same_bytes(tmp_path, case, monkeypatch):
    made = Made(tmp_path, **CASES[case])
    generator = torch.Generator().manual_seed(0)

    def on_another_machine(*args):
        for prediction in predicting.predictions(*args):
            pieces = disturbed(prediction, generator)
            yield predicting.Prediction(prediction.name, pieces, prediction.tolerance)

    monkeypatch.setattr(applying, "predictions", on_another_machine)
    made.apply(tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(made.pruned)
    if case == "float32":  # in which 1e-14 moves some weights to their neighbours, unless they are listed
        monkeypatch.setattr(applying, "decode", without_unsure(applying.decode))
        with pytest.raises(UserError, match="came out different .* nothing was written"):
            made.apply(tmp_path / "third")
        assert not (tmp_path / "third").exists()


def without_unsure(decode):
    return lambda parts, *args: decode({k: v for k, v in parts.items() if k != "unsure"}, *args)


def test_sizes(tmp_path):
    """Masks and rotations alone, where the method leaves kept weights as they are."""
    made = Made(tmp_path, pruning=WANDA, rotation=RotationConfig(mode="none"))
    with zipfile.ZipFile(made.file) as file:
        members = file.infolist()
    masks = [member.compress_size for member in members if member.filename.endswith("/mask")]
    assert made.summary["bytes"] == made.file.stat().st_size
    assert not [m for m in members if m.filename.endswith("difference") or m.filename.startswith("rotat")]
    weights = sum(t.numel() for name, t in saved_tensors(made.pruned).items() if "proj" in name)
    assert 0 < sum(masks) < weights / 8  # fewer bytes than one bit a weight
    rotated = Made(tmp_path / "rotated", pruning=WANDA)
    whole = sum(file.stat().st_size for file in (tmp_path / "rotated" / "pruned").iterdir())
    assert rotated.summary["checkpoint_bytes"] == whole


@pytest.mark.parametrize("case", ["packed beside dense", "light", "residual", "layers that share", "float32"])
def test_without_the_file_of_the_rotations(tmp_path, case):
    """They are computed from the checkpoint, to its rounding, and the artifact gives the same bytes."""
    made = Made(tmp_path, **CASES[case])
    found, rotations_in = [], exporting.rotations_in

    def keep(*args, **options):
        found.extend(rotations_in(*args, **options))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "rotations_in", keep)
        summary = export_artifact(made.pruned, tmp_path / "b.drot", model=made.dense)
    saved, r2_errors = load_file(made.rotations), []
    for layer, rotation in enumerate(found):
        for name, matrix in rotation.matrices.items():
            error = float((matrix - saved[f"layers.{layer}.{name}"].double()).norm() / matrix.norm())
            if name == "r2":
                r2_errors.append(error)
            else:
                assert error < 0.01, (layer, name)
    # kept weights that pruning has changed say less about R2
    assert max(r2_errors) < (0.02 if CASES[case].get("pruning") == WANDA else 0.5)
    assert {name for rotation in found for name in rotation.matrices} == {k.split(".")[-1] for k in saved}
    assert made.summary["bytes"] * 0.9 < summary["bytes"] < made.summary["bytes"] * 1.5
    apply_artifact(tmp_path / "b.drot", tmp_path / "again", model=made.dense)
    assert files_of(tmp_path / "again") == files_of(made.pruned)


def test_another_model_is_refused(made, tmp_path):
    other = tmp_path / "other"
    small_model("llama", 1, torch.bfloat16, hidden_size=64, intermediate_size=96).save_pretrained(other)
    with pytest.raises(UserError, match="has other weights than"):
        made.apply(tmp_path / "again", model=other)
    assert not (tmp_path / "again").exists()
    for path, rotations in ((other, made.rotations), (made.dense, tmp_path / "wrong")):
        if not rotations.exists():
            Made(tmp_path / "b", pruning=WANDA, rotation=RotationConfig(steps=9))
            rotations = tmp_path / "b" / "rotations.safetensors"
        with pytest.raises(UserError, match="does not fit: name the dense `model`"):
            export_artifact(made.pruned, tmp_path / "b.drot", model=path, rotations=rotations)
        assert not list(tmp_path.glob("b.drot*"))


def test_what_cannot_be_exported(made, tmp_path):
    with pytest.raises(UserError, match="is quantised, packed or rotated"):
        export_artifact(made.pruned, tmp_path / "b.drot", model=made.pruned, rotations=made.rotations)
    with pytest.raises(UserError, match="a.drot exists: name another `out`"):
        export_artifact(made.pruned, made.file, model=made.dense, rotations=made.rotations)
    with pytest.raises(UserError, match="holds no drot.json"):
        export_artifact(made.dense, tmp_path / "b.drot")


def rewrite(file, change):
    """Copies an artifact with its members changed: `change` takes and returns name → content."""
    with zipfile.ZipFile(file) as old:
        members = change({name: old.read(name) for name in old.namelist()})
    with zipfile.ZipFile(file, "w") as new:
        for name, data in members.items():
            new.writestr(name, data)


def changed_index(**entries):
    return lambda members: (
        members | {"artifact.json": json.dumps(json.loads(members["artifact.json"]) | entries).encode()}
    )


def cut(part):
    def change(members):
        name = next(name for name in members if name.endswith(part))
        return members | {name: members[name][:-3]}

    return change


def offsets(first):
    """Moves the first tensor of the header."""
    name = f"headers/{SHARD}"
    return lambda members: (
        members | {name: members[name].replace(b'"data_offsets":[0,', b'"data_offsets":' + first)}
    )


def longer(name, size):
    """A larger size of a file: one that takes hours to hash."""

    def change(members):
        index = json.loads(members["artifact.json"])
        index["files"][name]["bytes"] = size
        return members | {"artifact.json": json.dumps(index).encode()}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut("/mask"), "is damaged"),
        (cut("/difference"), "is damaged"),
        (cut(".r1"), "is damaged"),
        (cut(".r3"), "is damaged"),
        (changed_index(down_rotation=32), "is damaged"),
        (changed_index(down_rotation=None), "came out different|is damaged"),
        (changed_index(down_rotation=1), "down_rotation: .* got 1"),
        (cut("drot.json"), "drot.json came out different"),
        (lambda members: {n: d for n, d in members.items() if not n.endswith(".r2")}, "is damaged"),
        (changed_index(format_version=2), "must be of format_version 1, got 2"),
        (changed_index(files={"../evil": EMPTY}), "must be the path of a file below the folder"),
        (changed_index(files={"/evil": EMPTY}), "must be the path of a file below the folder"),
        (lambda members: {"other.json": b"{}"}, "is no artifact of drot"),
        (lambda members: {"artifact.json": b"["}, "artifact.json is not valid JSON"),
        (lambda members: {"artifact.json": b"[" * 100_000}, "artifact.json is nested too deeply"),
        (lambda members: {"artifact.json": b'{"format_version": 1}'}, "artifact.json lacks model"),
        (changed_index(files={}), "files: .* at least 1 item"),
        (changed_index(files={"a": {"sha256": "0", "bytes": -1}}), "files.a.bytes: .* greater than or equal"),
        (changed_index(rotated=3), "rotated: Input should be a valid boolean, got 3"),
        (changed_index(boundary="nope"), "boundary: .* got 'nope'"),
        (changed_index(tolerances={"a": "x"}), "tolerances.a: Input should be a valid number, got 'x'"),
        (longer(SHARD, 10**6), "the tensors end at byte .* of 1000000"),
        (offsets(b"[9,"), "header of model-00001"),
        (offsets(b"[-8,"), "header of model-00001"),
        (
            longer(SHARD, 10**15),
            r"its weights have 1000000000\d+ bytes, more than any checkpoint of this model",
        ),
    ],
)
def test_a_damaged_artifact_is_refused(made, tmp_path, change, message):
    file = shutil.copy(made.file, tmp_path)
    rewrite(file, change)
    with pytest.raises(UserError, match=message) as caught:
        apply_artifact(file, tmp_path / "again", model=made.dense)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("again*")) and not list(tmp_path.parent.glob("evil"))


@pytest.mark.parametrize("part", ["artifact.json", "config.json", f"headers/{SHARD}", ".r1", ".r2", "/mask"])
def test_a_member_that_inflates_beyond_measure_is_not_read(made, tmp_path, monkeypatch, part):
    """20 MB of zeros in 20 kB: far more than the text, the rotation or the mask that belongs there."""
    file, read = shutil.copy(made.file, tmp_path), []
    with zipfile.ZipFile(file) as old:
        members = {name: old.read(name) for name in old.namelist()}
    bomb = next(name for name in members if name.endswith(part))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in (members | {bomb: bytes(20_000_000)}).items():
            new.writestr(name, data)
    real = zipfile.ZipFile.read
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda self, name: read.append(name) or real(self, name))
    with pytest.raises(UserError, match=rf"is damaged \({bomb} has 20000000 bytes\)"):
        apply_artifact(file, tmp_path / "again", model=made.dense)
    assert bomb not in read


def test_every_damage_of_the_archive_is_a_mistake_of_one_line(made, tmp_path):
    """Bytes of the beginning and of the end of the file, where the directory lies: no other exception."""
    content = made.file.read_bytes()
    refused = []
    for place in [*range(60), *range(len(content) - 300, len(content), 3)]:
        for bits in (0x01, 0xFF):
            changed = bytearray(content)
            changed[place] ^= bits
            (tmp_path / "b.drot").write_bytes(changed)
            try:
                with container.Reader(tmp_path / "b.drot") as reader:
                    for name in sorted(reader._names):
                        reader.content(name, 10**7)
            except UserError as error:
                refused.append(str(error))
    assert len(refused) > 150 and not any("\n" in message for message in refused)


def test_an_encrypted_member_and_one_that_stands_twice(made, tmp_path):
    content = made.file.read_bytes()
    start = content.index(b"PK\x01\x02")
    (tmp_path / "b.drot").write_bytes(content[: start + 8] + b"\x01" + content[start + 9 :])
    with pytest.raises(UserError, match="is damaged .*encrypted"):
        apply_artifact(tmp_path / "b.drot", tmp_path / "out", model=made.dense)
    shutil.copy(made.file, tmp_path)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "a.drot", "a") as file:
        file.writestr("artifact.json", "{}")
    with pytest.raises(UserError, match="a member stands twice"):
        apply_artifact(tmp_path / "a.drot", tmp_path / "out", model=made.dense)


def test_only_the_checkpoint_of_the_folder_is_exported(made, tmp_path, caplog):
    """A training beside it has left checkpoint-500, also in the list of files after `drot info --accept`."""
    folder = shutil.copytree(made.pruned, tmp_path / "pruned")
    (folder / "checkpoint-500").mkdir()
    shutil.copy(folder / SHARD, folder / "checkpoint-500" / "model-best.safetensors")
    for name in ("b.drot", "c.drot"):
        export_artifact(folder, tmp_path / name, model=made.dense, rotations=made.rotations)
        assert any("model-best.safetensors is left out" in message for message in caplog.messages)
        apply_artifact(tmp_path / name, tmp_path / f"{name}-out", model=made.dense)
        assert not (tmp_path / f"{name}-out" / "checkpoint-500").exists()
        caplog.clear()
        accept_files(folder)


def test_export_applies_to_itself_before_it_says_done(made, tmp_path, monkeypatch):
    """With an encoder that loses the changes of the kept weights."""
    monkeypatch.setattr(exporting, "encode", lambda actual, rows, tolerance: {})
    with pytest.raises(UserError, match="came out different"):
        export_artifact(made.pruned, tmp_path / "b.drot", model=made.dense, rotations=made.rotations)
    assert not list(tmp_path.iterdir())


def killed_export(pruned, out, dense):
    exporting.write_checkpoint = lambda reader, source, out, progress: (out.mkdir(), os._exit(9))
    export_artifact(pruned, out, model=dense)


def test_the_next_export_removes_what_a_killed_one_left(made, tmp_path, caplog):
    """A process that stops without any cleaning, while the checkpoint is made for the comparison."""
    out = tmp_path / "b.drot"
    killed = started(killed_export, made.pruned, out, made.dense)
    killed.join()
    assert killed.exitcode == 9
    (left,) = tmp_path.glob("b.drot.????????.part")
    assert (left / out.name).is_dir()
    export_artifact(made.pruned, out, model=made.dense, rotations=made.rotations)
    assert list(tmp_path.iterdir()) == [out]
    assert f"removed {left}, which a run to {out} left when it was killed" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: export_artifact(None, "a"), "`checkpoint` must be a str or Path; got None"),
        (lambda: export_artifact("a", None), "`out` must be a str or Path; got None"),
        (lambda: export_artifact("a", "b", model=3), "`model` must be a str or Path or None; got 3"),
        (lambda: export_artifact("a", "b", rotations=b"r"), "`rotations` must be a str or Path or None"),
        (lambda: export_artifact("a", "b", progress=True), "`progress` must be callable; got True, a bool"),
        (lambda: apply_artifact(None, "a"), "`artifact` must be a str or Path; got None"),
        (lambda: apply_artifact("a", 3), "`out` must be a str or Path; got 3"),
        (lambda: apply_artifact("a", "b", model=[]), "`model` must be a str or Path or None"),
        (lambda: apply_artifact("a", "b", progress="bar"), "`progress` must be callable; got 'bar', a str"),
    ],
)
def test_wrong_types(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_damaged_checkpoint_is_not_exported(made, tmp_path):
    folder = shutil.copytree(made.pruned, tmp_path / "pruned")
    file = folder / SHARD
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="is not the file that drot.json describes: it has another SHA-256"):
        export_artifact(folder, tmp_path / "b.drot", model=made.dense, rotations=made.rotations)
    config, events = folder / "config.json", []
    config.write_text(config.read_text().replace("{", "{ ", 1))
    with pytest.raises(UserError, match=rf"of your own with drot info {folder} --accept"):
        export_artifact(
            folder, tmp_path / "b.drot", model=made.dense, rotations=made.rotations, progress=events.append
        )
    assert not events and not list(tmp_path.glob("b.drot*"))


def test_what_is_no_artifact(tmp_path):
    with pytest.raises(UserError, match="there is no artifact"):
        apply_artifact(tmp_path / "none", tmp_path / "out")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="must be a file, got a pipe"):
        apply_artifact(tmp_path / "pipe", tmp_path / "out")
    (tmp_path / "text").write_text("text")
    with pytest.raises(UserError, match="is no artifact of drot"):
        apply_artifact(tmp_path / "text", tmp_path / "out")


def test_without_the_dense_model_the_weights_stay_unknown(made, tmp_path, monkeypatch):
    """Whoever forces another model through gets weights that say next to nothing about the checkpoint's.

    The correlation of two random vectors of n numbers is about 1 / √n, 0.02 to 0.03 here. A bound of 0.2
    means that a guess explains at most 4 % of the variance: the changes of the kept weights, which the file
    has, depend a little on the weights. The masks tell which weights are 0, so the kept weights are compared.
    """
    file, other = shutil.copy(made.file, tmp_path), tmp_path / "other"
    small_model("llama", 1, torch.bfloat16, hidden_size=64, intermediate_size=96).save_pretrained(other)
    rewrite(file, changed_index(model_sha256=parts_digest([load_model(other).state_dict()])))
    monkeypatch.setattr(applying, "damage", lambda path, record: None)
    apply_artifact(file, tmp_path / "guess", model=other)
    true, guess = (saved_tensors(path) for path in (made.pruned, tmp_path / "guess"))
    for name in (name for name in true if name.endswith("proj.weight")):
        kept = true[name] != 0
        a, b = true[name][kept].double(), guess[name][kept].double()
        b = b.where(b.isfinite(), 0).clamp(-1, 1)
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.2, name


def test_the_commands(made, tmp_path, capsys):
    file, again = tmp_path / "b.drot", tmp_path / "again"
    sources = ["--model", str(made.dense), "--rotations", str(made.rotations)]
    assert cli.run(["export", str(made.pruned), "--out", str(file), *sources]) == 0
    captured = capsys.readouterr()
    assert f"Saved to {file}: " in captured.out and "% of the checkpoint" in captured.out
    assert "layer 2 (3 of 3): exporting" in captured.err
    assert file.read_bytes() == made.file.read_bytes()  # nothing in it depends on the hour
    assert cli.run(["apply", str(file), "--out", str(again), "--model", str(made.dense), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["out"] == str(again) and "layer 2 (3 of 3): applying" in captured.err
    assert files_of(again) == files_of(made.pruned)
    assert cli.run(["export", str(made.pruned), "--out", str(tmp_path / "c.drot")]) == 0
    assert "% of the checkpoint" in capsys.readouterr().out  # the rotations are computed from the checkpoint
