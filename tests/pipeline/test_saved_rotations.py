"""Rotations that are trained before the pruning: each is written once, in a thread, and read once."""

import tempfile
import threading
from collections import Counter

import pytest
import torch
from runs import TOKENS, one_shot, prune, saved_bytes, saved_tensors
from safetensors import safe_open
from small_models import save_small_model, small_model

import drot
from drot.checkpoint import rotations
from drot.checkpoint.resume import RunState
from drot.core.errors import UserError
from drot.model.rotation import RotationsOfLayers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of five layers, which a run reads from its files."""
    model = small_model("llama", num_hidden_layers=5)
    return str(save_small_model(model, tmp_path_factory.mktemp("dense") / "model"))


@pytest.mark.parametrize("boundary", ["input", "residual"])
def test_a_rotation_is_written_once_and_read_once(boundary, files, tmp_path, monkeypatch):
    """The first and the last are read again for the embedding and the head."""
    chosen = one_shot(hessians="dense", boundary=boundary)
    read, in_parts, real = Counter(), [], RunState._read

    def see(self, name):
        read[name] += 1
        return real(self, name)

    def at_the_end(event):
        if event.phase == "save":
            for file in sorted((tmp_path / "out.partial").glob("*.safetensors")):
                with safe_open(file, framework="pt") as handle:
                    in_parts.extend((file.stem, key) for key in handle.keys() if key.endswith("r1"))  # noqa: SIM118

    monkeypatch.setattr(RunState, "_read", see)
    result = prune(files, chosen, out=tmp_path / "out", progress=at_the_end)
    assert in_parts == [(f"rotation_{index:05d}", "layers.0.r1") for index in range(5)]
    rotations = [read[f"rotation_{index:05d}"] for index in range(5)]
    # a layer that writes in the basis of the next one needs the R3 of that one
    assert rotations == ([2, 1, 1, 1, 2] if boundary == "input" else [2, 2, 1, 1, 2])
    monkeypatch.setattr(RunState, "read_ahead", lambda self, name, device: None)
    prune(small_model("llama", num_hidden_layers=5), chosen, out=tmp_path / "loaded")
    assert saved_bytes(tmp_path / "loaded") == saved_bytes(result.out)


def test_a_rotation_is_written_while_the_next_one_is_trained(tmp_path, monkeypatch):
    began, names, real = threading.Event(), [], RunState._write

    def write(self, name, tensors):
        if name == "rotation_00000":
            assert began.wait(60)
        real(self, name, tensors)
        names.append(name)

    def see(event):
        if (event.phase, event.layer) == ("rotate", 1):
            began.set()

    monkeypatch.setattr(RunState, "_write", write)
    prune(chosen=one_shot(hessians="dense"), out=tmp_path / "out", progress=see)
    assert names[:3] == [f"rotation_{index:05d}" for index in range(3)]


def test_the_next_rotation_is_read_before_it_is_asked_for(files, tmp_path, monkeypatch):
    """In a thread; a file that was damaged after it was written is refused as ever."""
    threads, real = {}, RunState._read

    def see(self, name):
        threads.setdefault(name, threading.current_thread().name)
        return real(self, name)

    def damage(event):
        if (event.phase, event.layer) == ("prune", 0):  # up to the third, they are read
            file = tmp_path / "out.partial" / "rotation_00004.safetensors"
            file.write_bytes(file.read_bytes()[:-1])

    monkeypatch.setattr(RunState, "_read", see)
    with pytest.raises(UserError, match="rotation_00004.* was lost or damaged while the run went on"):
        prune(files, one_shot(hessians="dense"), out=tmp_path / "out", progress=damage)
    of_rotations = [threads[f"rotation_{index:05d}"] for index in range(5)]
    assert ["drot-read" in name for name in of_rotations] == [False, True, True, True, True]


@pytest.mark.parametrize("mode", ["none", "layer", "shared"])
def test_a_measurement_keeps_no_more_than_two_rotations(mode, files, tmp_path, monkeypatch):
    """They lie in temporary files, which go. The figures are those of a model that lies in memory."""
    chosen, held, keep = one_shot(mode, token_weights="gradient"), [], RotationsOfLayers.keep
    options = dict(calibration=TOKENS, device="cpu")
    expected = drot.sensitivity(small_model("llama", num_hidden_layers=5), chosen, **options)

    def count(self, layer, rotation):
        keep(self, layer, rotation)
        held.append(len(self._in_memory))

    monkeypatch.setattr(RotationsOfLayers, "keep", count)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written, real = [], RunState._write

    def see(self, name, tensors):
        real(self, name, tensors)
        written.append(self.file(name).relative_to(tmp_path).name)

    monkeypatch.setattr(RunState, "_write", see)
    found = drot.sensitivity(files, chosen, **options)
    parts = {"none": [], "shared": ["rotations"], "layer": [f"rotation_{index:05d}" for index in range(5)]}
    assert sorted(written) == sorted(f"{name}.safetensors" for name in ["token_weights", *parts[mode]])
    assert found.errors == expected.errors and not list(tmp_path.iterdir())
    assert max(held, default=0) == (2 if mode == "layer" else 0)


@pytest.mark.parametrize("mode", ["layer", "shared"])
def test_given_rotations_lie_on_the_disk(mode, files, tmp_path, monkeypatch):
    """A layer reads its rotation once, and the embedding and the head read two again; two are in memory."""
    file, read, held = tmp_path / "rotations.safetensors", Counter(), []
    chosen = one_shot(hessians="dense", mode=mode)
    trained = prune(files, chosen, out=tmp_path / "trained", save_rotations_to=file)
    real, keep = rotations._read_layer, RotationsOfLayers.keep

    def see(path, index):
        read[index] += 1
        return real(path, index)

    def count(self, layer, rotation):
        keep(self, layer, rotation)
        held.append(len(self._in_memory))

    monkeypatch.setattr(rotations, "_read_layer", see)
    monkeypatch.setattr(RotationsOfLayers, "keep", count)
    given = prune(files, chosen, out=tmp_path / "given", rotations=file)
    assert dict(read) == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}
    assert max(held) == 2
    expected, found = saved_tensors(trained.out), saved_tensors(given.out)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
