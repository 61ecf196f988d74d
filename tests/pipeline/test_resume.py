"""A resumed run believes only what fits its hashes, continues only the same run, and survives a full disk."""

import json
import shutil
import threading
from types import SimpleNamespace

import pytest
import runs
import torch
from made_manifests import made_manifest
from runs import saved_bytes
from safetensors.torch import load_file, save_file
from small_models import random_tokens, save_small_model, small_model

import drot
from drot.checkpoint import resume
from drot.checkpoint.integrity import folder_records
from drot.checkpoint.manifest import read_manifest
from drot.checkpoint.resume import RunState, identity_differences, read_journal
from drot.cli import app as cli
from drot.core import hashes
from drot.core.errors import UserError
from drot.core.files import WriteError
from drot.core.hashes import file_record, weights_record
from drot.core.lock import locked

pytestmark = pytest.mark.slow

TOKENS = random_tokens(4, 40)


def recipe(**fields):
    return runs.one_shot(**dict(steps=3, damping=0.01) | fields)


def run_of(run, out, chosen=None, model=None, **options):
    model = small_model("llama", head_dim=16) if model is None else model
    return run(model, chosen or recipe(), out=out, **{"calibration": TOKENS} | options)


def prune(out, chosen=None, **options):
    return run_of(runs.prune, out, chosen, **options)


def interrupted(out, chosen=None, before=2, **options):
    """The folder of a run that is cut off before layer `before` is pruned."""
    run_of(runs.interrupted, out, chosen, at=("prune", before), **options)
    return out.with_name(out.name + ".partial")


def resumed(out, chosen=None, **options):
    """The layers that a resumed run prunes, and the layers whose rotation it trains."""
    events = []
    prune(out, chosen, resume=True, progress=lambda e: events.append((e.phase, e.layer)), **options)
    return tuple(sorted({layer for name, layer in events if name == phase}) for phase in ("prune", "rotate"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs. hessians -> the weights."""
    folder = tmp_path_factory.mktemp("whole")
    for hessians in ("sequential", "dense"):
        prune(folder / hessians, recipe(hessians=hessians))
    return {name: saved_bytes(folder / name) for name in ("sequential", "dense")}


BLOCK = dict(hessians="dense", recover="block", recover_epochs=2, recover_lr=0.02, solve="admm")
DISTILL = runs.one_shot(distill_epochs=2, distill_lr=3e-3, distill_batch=2)
BEST = dict(quality="best", recover="block", recover_epochs=1)
RESIDUAL = dict(boundary="residual", hessians="dense")
MIXED = dict(keep=("layers.0.*", "layers.2.mlp.up_proj"), sparsity_of={"down_proj": "4:8", "o_proj": "0.25"})
#: family, recipe, where the run is cut off
CUT_OFF = {
    "recover, self": ("llama", runs.recipe(**BLOCK, target="self", boundary="residual"), ("recover", 1, 1)),
    "recover, dense": ("llama", runs.recipe(**BLOCK, target="dense", boundary="input"), ("recover", 1, 1)),
    "distill, first step": ("llama", DISTILL, ("distill", 0, 0)),
    "distill, later step": ("llama", DISTILL, ("distill", 0, 3)),
    "R3 alone": ("llama", runs.recipe("shared", down_rotation=16, **BEST), ("prune", 1)),
    "R3 and residual": ("llama", runs.recipe(**RESIDUAL, **BEST), ("prune", 2)),
    "mixed patterns": ("llama", runs.recipe(**MIXED, hessians="sequential"), ("prune", 1)),
    "inside, tied": ("gemma3_text", runs.recipe(), ("prune", 1)),
    "streamed": ("opt", runs.one_shot(down_rotation="auto", **RESIDUAL, target="dense"), ("prune", 1)),
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_a_resumed_run_gives_the_same_bytes(name, tmp_path):
    family, chosen, at = CUT_OFF[name]
    whole, out = runs.prune(small_model(family), chosen, out=tmp_path / "whole").model, tmp_path / "out"

    def model():
        return save_small_model(small_model(family), tmp_path) if name == "streamed" else small_model(family)

    runs.interrupted(model(), chosen, at=at, out=out)
    resumed = runs.prune(model(), chosen, out=out, resume=True).model
    assert saved_bytes(out) == saved_bytes(tmp_path / "whole")
    for found in (resumed, drot.load(out, device="cpu")):
        runs.assert_same_weights(found, whole)


def test_a_layer_is_written_while_the_next_one_is_pruned(tmp_path, monkeypatch):
    """The thread that saves layer 0 goes on when layer 1 has begun; the parts are in the order of layers."""
    began, names, real = threading.Event(), [], RunState._write

    def write(self, name, tensors):
        if name == "layer_00000":
            assert began.wait(60)
        real(self, name, tensors)
        names.append((name, threading.current_thread() is threading.main_thread()))

    def see(event):
        if (event.phase, event.layer) == ("prune", 1):
            began.set()

    monkeypatch.setattr(RunState, "_write", write)
    prune(tmp_path / "out", progress=see)
    parts = [f"layer_{index:05d}{beside}" for index in range(3) for beside in ("", "_run")]
    assert names == [(part, False) for part in parts]


def test_an_error_of_the_thread_ends_the_run(tmp_path, monkeypatch):
    """At the next layer, with what was saved before; an error of the run itself goes first."""

    def write(self, name, tensors):
        if name == "layer_00001":
            raise WriteError(f"cannot write {name}: No space left on device")
        real(self, name, tensors)

    real = RunState._write
    for error, progress in ((UserError, lambda e: None), (ZeroDivisionError, lambda e: 1 / (e.layer != 2))):
        out = tmp_path / error.__name__
        monkeypatch.setattr(RunState, "_write", write)
        with pytest.raises(error) as caught:
            prune(out, progress=progress)
        monkeypatch.setattr(RunState, "_write", real)
        if error is UserError:
            assert "cannot write layer_00001: No space left" in str(caught.value)
            assert "continue with `resume=True`" in str(caught.value)
        assert resumed(out)[0] == [1, 2]


def test_a_part_is_hashed_while_the_next_one_is_written(tmp_path, monkeypatch):
    """And never more than two are on their way: the third waits until the first is in the journal."""
    state, began, real = RunState(tmp_path / "out", {"model": "m"}), threading.Event(), RunState._enter

    def enter(self, name, hashed, record):
        if name == "a":
            assert began.wait(60)
        real(self, name, hashed, record)

    def write(self, name, tensors, real=RunState._write):
        real(self, name, tensors)
        if name == "b":
            began.set()
        if name == "c":
            assert "a" in self._parts

    monkeypatch.setattr(RunState, "_enter", enter)
    monkeypatch.setattr(RunState, "_write", write)
    with state.saving():
        for name in "abc":
            state.save_later({name: ({"x": torch.ones(2)}, name)})
    assert [state.load(name)[1] for name in "abc"] == ["a", "b", "c"]
    assert list(read_journal(state.folder / "parts.json")) == ["a", "b", "c"]


def test_parts_that_are_saved_together_are_hashed_at_the_same_time(tmp_path, monkeypatch):
    """The journal has them in their order: a run that ends between the two has none without the earlier."""
    state, hashed = RunState(tmp_path / "out", {"model": "m"}), threading.Event()

    def file_record(file, real=resume.file_record):
        if file.stem == "a":
            assert hashed.wait(60)
            assert not state._parts
        found = real(file)
        if file.stem == "b":
            hashed.set()
        return found

    monkeypatch.setattr(resume, "file_record", file_record)
    with state.saving():
        state.save_later({name: ({"x": torch.ones(2)}, name) for name in "ab"})
    assert list(read_journal(state.folder / "parts.json")) == ["a", "b"]


def test_an_error_of_the_hash_ends_the_run(tmp_path, monkeypatch):
    def enter(self, name, hashed, record):
        raise OSError(f"{name} cannot be read")

    monkeypatch.setattr(RunState, "_enter", enter)
    state = RunState(tmp_path / "out", {})
    with pytest.raises(OSError, match="a cannot be read"), state.saving():
        state.save_later({"a": ({"x": torch.ones(2)}, None)})


def flip(file, offset=-1):
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


LAYERS = [f"layer_{index:05d}.safetensors" for index in range(3)]
ROTATIONS = [f"rotation_{index:05d}.safetensors" for index in range(3)]
#: damage, the layers that are pruned again, the layers whose rotation is trained again, the warnings
DAMAGES = {
    "flipped": (
        lambda f: flip(f / LAYERS[0]),
        [0, 2],
        [0, 2],
        ["layer_00000.safetensors has another SHA-256"],
    ),
    "swapped": (
        lambda f: swap(f / LAYERS[0], f / LAYERS[1]),
        [0, 1, 2],
        [0, 1, 2],
        ["layer_00000.safetensors has ", "layer_00001.safetensors has "],
    ),
    "truncated": (
        lambda f: (f / LAYERS[1]).write_bytes((f / LAYERS[1]).read_bytes()[:100]),
        [1, 2],
        [1, 2],
        ["layer_00001.safetensors has 100 bytes, not"],
    ),
    "deleted": (lambda f: (f / LAYERS[0]).unlink(), [0, 2], [0, 2], ["layer_00000.safetensors is missing"]),
    "journal": (
        lambda f: flip(f / "parts.json", 30),
        [0, 1, 2],
        [0, 1, 2],
        ["parts.json is missing or damaged"],
    ),
    "no journal": (lambda f: (f / "parts.json").unlink(), [0, 1, 2], [0, 1, 2], ["parts.json is missing"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_layer_is_told_and_computed_again_and_the_rest_is_kept(damage, whole, tmp_path, caplog):
    change, pruned, trained, warnings = DAMAGES[damage]
    folder = interrupted(tmp_path / "out")
    change(folder)
    assert resumed(tmp_path / "out") == (pruned, trained)
    assert len(caplog.records) == len(warnings), caplog.text
    assert all(warning in caplog.text for warning in warnings)
    assert saved_bytes(tmp_path / "out") == whole["sequential"]


def test_a_damaged_rotation_is_trained_again(whole, tmp_path, caplog):
    """The other rotations and the pruned layers are kept: the new rotation is equal to the lost one."""
    chosen = recipe(hessians="dense")
    folder = interrupted(tmp_path / "out", chosen)
    flip(folder / ROTATIONS[1])
    assert resumed(tmp_path / "out", chosen) == ([2], [1])
    assert "rotation_00001.safetensors has another SHA-256: it is computed again" in caplog.text
    assert saved_bytes(tmp_path / "out") == whole["dense"]


@pytest.mark.parametrize(("lost", "again"), [("rotation_00001", [0, 1, 2]), ("layer_00000", [0, 1, 2])])
def test_what_depends_on_another_result_is_computed_again(lost, again, tmp_path, caplog, monkeypatch):
    """Another machine computes a lost part with other bytes: the parts after it do not fit any more."""
    chosen, out = recipe(hessians="dense"), tmp_path / "out"
    flip(interrupted(out, chosen) / f"{lost}.safetensors")
    write = RunState._write

    def write_other(self, name, tensors):
        if name == lost:
            # as another machine would round
            tensors = {k: t * (1 + 1e-6) if t.is_floating_point() else t for k, t in tensors.items()}
        write(self, name, tensors)

    monkeypatch.setattr(RunState, "_write", write_other)
    pruned, _ = resumed(out, chosen)
    assert pruned == again
    later = "layer_00000_run, layer_00001, layer_00001_run"
    later = f"layer_00000, {later}" if lost.startswith("rotation") else later
    assert f"{lost} was computed again with another result, as on another machine: {later}" in caplog.text


@pytest.mark.parametrize("content", [None, b'{"weights": ', b"[]", b"{}", "flip"])
def test_a_lost_or_damaged_identity_is_refused_before_the_model_is_loaded(content, tmp_path):
    out = tmp_path / "out"
    file = interrupted(out, before=1) / "run.json"
    if content is None:
        file.unlink()
    elif content == "flip":
        file.write_text(file.read_text().replace('"damping": 0.01', '"damping": 0.02'))
    else:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot resume .*out\.partial: its run\.json is (missing|broken)"):
        prune(out, model=tmp_path / "no-model", resume=True)
    assert (file.parent / LAYERS[0]).exists()


def test_files_of_others_in_the_folder_of_parts_are_kept(tmp_path):
    """The folder of the parts is deleted at the end of a run, so it must not hold anything else."""
    out, folder = tmp_path / "out", tmp_path / "out.partial"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"cannot resume .*out\.partial: its run\.json is missing"):
        prune(out, resume=True)
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").rename(folder / "run.json.part")  # of a run that was killed at its first file
    prune(out, resume=True)
    assert not folder.exists()


def test_another_recipe_names_its_fields_with_both_values(tmp_path):
    out = tmp_path / "out"
    interrupted(out, before=1)
    with pytest.raises(UserError) as caught:
        prune(out, recipe(damping=0.02, steps=4), resume=True)
    assert "rotation.steps: 3 in the unfinished run, 4 now" in str(caught.value)
    assert "pruning.damping: 0.01 in the unfinished run, 0.02 now" in str(caught.value)
    before = {"recipe": {"calibration": {"seqlen": 8}}, "calibration": "ab"}
    # other tokens follow from that, and their hashes say no more
    text = identity_differences(before, {"recipe": {"calibration": {"seqlen": 9}}, "calibration": "cd"}, "x")
    assert text == "calibration.seqlen: 8 in x, 9 now"
    text = identity_differences({"a": {"b": 1}, "gone": 2}, {"a": {"b": 1}, "new": [3]}, "x")
    assert text == "gone: 2 in x, no value now, new: no value in x, [3] now"


def test_a_run_is_known_by_its_weights_and_not_by_its_path(tmp_path, monkeypatch):
    """Another spelling, a copy and the loaded model resume; other weights and another config do not."""
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)  # stands for one that is not needed
    source, out = tmp_path / "source", tmp_path / "out"
    small_model("llama", head_dim=16).save_pretrained(source)
    interrupted(out, model=source, tokenizer=tokenizer)
    shutil.copytree(tmp_path / "out.partial", tmp_path / "kept")
    shutil.copytree(source, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    for model in ("./source/../source", tmp_path / "copy", None):
        assert resumed(out, model=model, tokenizer=tokenizer) == ([2], [2])
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "kept", tmp_path / "out.partial")
    tensors = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError,
        match="SHA-256 of the model's weights: ",
    ):
        prune(out, model=source, tokenizer=tokenizer, resume=True)
    file = tmp_path / "copy" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.5}))
    with pytest.raises(UserError, match="config.rms_norm_eps: 1e-06 in the unfinished run, 0.5 now"):
        prune(out, model=tmp_path / "copy", tokenizer=tokenizer, resume=True)


def test_large_weights_are_hashed_at_the_ends_of_each_tensor(monkeypatch):
    monkeypatch.setattr(hashes, "SAMPLE_BYTES", 40)
    tensors = {"a": torch.arange(100.0), "b": torch.zeros((), dtype=torch.bfloat16), "c": torch.empty(0)}
    whole, ends = weights_record(tensors), weights_record(tensors, bound=100)
    assert (whole["hashed"], ends["hashed"]) == ("all bytes", "40 bytes at both ends of each tensor")
    assert whole["bytes"] == ends["bytes"] == 402

    def changed(index):
        other = tensors | {"a": tensors["a"].clone()}
        other["a"][index] += 1
        return other

    for index in (0, 9, 90, 99):
        assert weights_record(changed(index), bound=100)["sha256"] != ends["sha256"]
    assert weights_record(changed(50), bound=100) == ends
    assert weights_record(changed(50))["sha256"] != whole["sha256"]
    for other in (
        tensors | {"a": tensors["a"].view(10, 10)},
        {"z" if n == "a" else n: t for n, t in tensors.items()},
    ):
        for bound in (100, 10**9):
            assert weights_record(other, bound)["sha256"] != weights_record(tensors, bound)["sha256"]


# ---- rotations and finished runs ---------------------------------------------------------------------


def test_rotations_inside_out_and_of_a_resumed_run(tmp_path):
    for name, file in (
        ("in", tmp_path / "in" / "sub" / "r.safetensors"),
        ("beside", tmp_path / "r.safetensors"),
    ):
        prune(tmp_path / f"whole-{name}", save_rotations_to=tmp_path / f"whole-{name}.safetensors")
        out = tmp_path / name
        interrupted(out, save_rotations_to=file)
        assert not file.exists() and not out.exists()
        prune(out, save_rotations_to=file, resume=True)
        assert file.read_bytes() == (tmp_path / f"whole-{name}.safetensors").read_bytes()
        if name == "in":
            assert read_manifest(out).files["sub/r.safetensors"] == file_record(file)
        drot.load(out, device="cpu")
    for wrong in ("model.safetensors", "drot.json", ""):
        with pytest.raises(UserError, match="inside `out` must be a .safetensors file"):
            prune(tmp_path / "new", save_rotations_to=tmp_path / "new" / wrong)
    with pytest.raises(UserError, match="lies in the folder of the unfinished run"):
        prune(tmp_path / "new", save_rotations_to=tmp_path / "new.partial" / "r.safetensors")


def test_rotations_that_a_killed_run_has_written_are_no_obstacle(tmp_path, monkeypatch):
    """The run was killed between the writing of the rotations and of the checkpoint."""
    out, file = tmp_path / "out", tmp_path / "r.safetensors"

    def killed(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("drot.pipeline.output.save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(out, save_rotations_to=file)
    assert file.exists()
    with pytest.raises(UserError, match=r"r\.safetensors exists"):
        prune(tmp_path / "other", save_rotations_to=file)
    other = tmp_path / "other.safetensors"
    prune(None, recipe(steps=4), save_rotations_to=other)
    with pytest.raises(UserError, match="holds the rotations of another run"):
        prune(out, save_rotations_to=other, resume=True)
    assert resumed(out, save_rotations_to=file) == ([], [])


def test_a_damaged_rotation_file_is_refused(tmp_path):
    file = tmp_path / "r.safetensors"
    prune(None, save_rotations_to=file)
    flip(file)
    with pytest.raises(UserError, match=r"r\.safetensors is damaged"):
        prune(None, rotations=file)


def test_a_finished_run_has_nothing_to_do(tmp_path):
    out, file = tmp_path / "out", tmp_path / "r.safetensors"
    first = prune(out, save_rotations_to=file, format="packed")
    before = folder_records(tmp_path)
    again = prune(out, save_rotations_to=file, format="packed", resume=True)
    assert folder_records(tmp_path) == before
    assert again.finished_before and again.out == out
    assert again.manifest.to_dict() == first.manifest.to_dict()
    assert not first.finished_before
    assert torch.equal(again.model(TOKENS).logits, first.model(TOKENS).logits)
    for options, message in (
        (dict(chosen=recipe(damping=0.5)), "pruning.damping: 0.01 in the finished run, 0.5 now"),
        (dict(), "format: packed in the finished run, dense now"),
        (
            dict(format="packed", model=small_model("llama", seed=1, head_dim=16)),
            "SHA-256 of the model's weights: ",
        ),
    ):
        with pytest.raises(UserError, match=f"out is the result of another run: .*{message}"):
            prune(out, resume=True, **options)
    with pytest.raises(UserError, match="is finished, and its rotations were not saved to"):
        prune(out, format="packed", resume=True, save_rotations_to=tmp_path / "other")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        prune(out, format="packed")


@pytest.mark.parametrize("inside", [".", ".."])
def test_a_finished_run_may_be_named_from_inside(tmp_path, monkeypatch, inside):
    """The lock and the unfinished run lie beside the folder, whose name does not stand in `.` and `..`."""
    out = tmp_path / "out"
    prune(out)
    (out / "sub").mkdir()
    monkeypatch.chdir(out if inside == "." else out / "sub")
    assert prune(inside, resume=True).finished_before
    with locked(out), pytest.raises(UserError, match="another run writes to"):
        prune(inside, resume=True)
    with pytest.raises(UserError, match="lies in the folder of the unfinished run"):
        prune(inside, resume=True, save_rotations_to=tmp_path / "out.partial" / "r.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_current_folder_is_refused_by_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["prune", "m", "--out", ".", "--resume"]) == 2
    assert capsys.readouterr().err.startswith("drot: --out must not be the current folder, got .: ")


def test_a_run_killed_after_its_last_step_is_finished(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RunState, "discard", lambda self: None)
        prune(out)
    assert (tmp_path / "out.partial").exists()
    assert prune(out, resume=True).finished_before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_command_says_that_there_is_nothing_to_do(tmp_path, capsys, monkeypatch):
    result = drot.PruneResult(None, made_manifest(), tmp_path, finished_before=True)
    monkeypatch.setattr("drot.pipeline.prune.prune", lambda *args, **options: result)
    monkeypatch.setattr("drot.cli.prune.print_manifest", lambda manifest: None)
    assert cli.run(["prune", "m", "--out", str(tmp_path), "--resume"]) == 0
    assert f"{tmp_path} was finished already: nothing to do" in capsys.readouterr().out.replace("\n", "")
