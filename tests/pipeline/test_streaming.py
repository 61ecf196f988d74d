"""Runs that read the layers from files: how much lies in memory, and the bytes of a run on a loaded model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import prune, recipe, saved_bytes
from small_models import save_small_model, small_model
from streamed import write_model

import drot
from drot.checkpoint.load import load_model
from drot.checkpoint.offload import DiskWeights, open_skeleton
from drot.core import hashes
from drot.core.hashes import weights_record
from drot.model.decoder import DecoderModel
from drot.model.rotation import LayerRotation, RotationsOfLayers
from drot.pipeline import prune as pipeline

pytestmark = pytest.mark.slow

CASES = [
    ("llama", dict(mode="layer", solve="none", target="self"), {}),
    ("qwen3_moe", dict(mode="layer", down_rotation="none"), {}),
    ("phi3", dict(mode="layer", hessians="dense", boundary="residual"), dict(save_dtype="bfloat16")),
    (
        "llama-biased",
        dict(mode="shared", quality="best", recover="block", recover_epochs=1),
        dict(format="packed"),
    ),
    ("qwen2", dict(mode="none"), dict(save_dtype="float16")),
]


@pytest.mark.parametrize(("family", "fields", "options"), CASES, ids=lambda value: str(value)[:20])
def test_the_bytes_are_those_of_a_run_on_a_loaded_model(family, fields, options, tmp_path):
    folder, chosen = save_small_model(small_model(family), tmp_path / "dense"), recipe(**fields)
    streamed = prune(str(folder), chosen, out=tmp_path / "streamed", **options)
    loaded = prune(load_model(folder), chosen, out=tmp_path / "loaded", **options)
    assert saved_bytes(streamed.out) == saved_bytes(loaded.out)
    assert (streamed.out / "config.json").read_bytes() == (loaded.out / "config.json").read_bytes()
    assert streamed.manifest.identity == loaded.manifest.identity
    assert streamed.manifest.sparsity == loaded.manifest.sparsity
    assert streamed.in_memory is None and loaded.in_memory is not None
    found, expected = streamed.model.state_dict(), loaded.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("hessians", ["sequential", "dense"])
def test_a_layer_is_in_memory_from_the_work_on_the_layer_before_until_its_own_ends(
    hessians, tmp_path, monkeypatch
):
    folder = save_small_model(small_model("llama", num_hidden_layers=5), tmp_path / "dense")
    layers, most = [], []
    read_layer = DiskWeights.read_layer

    def read(weights, layer, device):
        layers.append(layer.module)
        read_layer(weights, layer, device)
        held = {id(each) for each in layers if not next(each.parameters()).is_meta}
        most.append(len(held))

    monkeypatch.setattr(DiskWeights, "read_layer", read)
    prune(str(folder), recipe(hessians=hessians), out=tmp_path / "out")
    # for the hash, twice for the weights of the tokens, for a training of dense Hessians, and for the pruning
    assert max(most) == 2 and len(layers) == (4 if hessians == "sequential" else 5) * 5
    assert all(next(each.parameters()).is_meta for each in layers)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize(
    ("family", "fields"), [("llama", {}), ("qwen2", dict(tie_word_embeddings=True)), ("qwen3_moe", {})]
)
def test_of_a_large_model_only_the_ends_of_the_tensors_are_read(family, fields, tmp_path, monkeypatch):
    monkeypatch.setattr(hashes, "SAMPLE_BYTES", 40)
    folder, layers = save_small_model(small_model(family, **fields), tmp_path / "dense"), []
    expected = weights_record(load_model(folder).state_dict(), bound=100)
    read_layer = DiskWeights.read_layer

    def read(weights, layer, device):
        layers.append(layer.index)
        read_layer(weights, layer, device)

    monkeypatch.setattr(DiskWeights, "read_layer", read)
    model, weights, _ = open_skeleton(folder)
    decoder = DecoderModel(model, weights=weights)
    assert weights_record(model.state_dict(), bound=100, parts=decoder.parts_of_state) == expected
    assert bool(layers) == (family == "qwen3_moe")  # whose files hold each expert by itself


def test_memory_is_a_few_layers(tmp_path):
    """120 MB of weights, 240 in float32, under a limit of 180 MB, in layers of 6 MB, 13 in float32."""
    here = Path(__file__)
    environment = os.environ | {"PYTHONPATH": str(here.parents[1]), "OMP_NUM_THREADS": "1"}
    write_model(tmp_path / "dense", megabytes=120, hidden=512)
    command = [sys.executable, here.with_name("streamed.py"), "--mode", "none", "--limit", "180"]
    command += ["--run", tmp_path / "dense", tmp_path / "limited"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    grew = [int(megabytes) for megabytes in re.findall(r"grew by (\d+) MB", done.stdout)]
    assert len(grew) == 3 and max(grew) < 150


def test_a_finished_run_loads_no_weights(tmp_path, monkeypatch):
    folder = str(save_small_model(small_model("llama"), tmp_path / "dense"))
    first = prune(folder, out=tmp_path / "out")
    monkeypatch.setattr(pipeline, "load_model", lambda path: pytest.fail("the weights were read"))
    again = prune(folder, out=tmp_path / "out", resume=True)
    assert again.finished_before and again.manifest == first.manifest and "llama" not in repr(again)


def test_the_sensitivity_is_that_of_a_loaded_model(tmp_path):
    folder = save_small_model(small_model("llama"), tmp_path)
    tokens = torch.randint(0, 96, (4, 40), generator=torch.Generator().manual_seed(0))
    options = dict(calibration=tokens, device="cpu")
    streamed = drot.sensitivity(str(folder), recipe(), **options)
    assert streamed.errors == drot.sensitivity(load_model(folder), recipe(), **options).errors


def test_two_rotations_lie_in_memory():
    saved = {layer: LayerRotation(torch.eye(2) * layer, torch.eye(2)[None]) for layer in range(4)}
    loads = []

    def load(layer):
        loads.append(layer)
        return saved[layer]

    rotations = RotationsOfLayers(load)
    for layer, rotation in saved.items():
        rotations.keep(layer, rotation)
    assert rotations[3] is saved[3] and rotations[2] is saved[2] and not loads
    assert rotations[0] is saved[0] and loads == [0]
    assert list(rotations) == [0, 1, 2, 3] and 4 not in rotations
    assert len(rotations._in_memory) == 2
