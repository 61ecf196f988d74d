"""The place of the hidden states of the calibration: the same bytes in each, and what says where it is."""

import dataclasses
import json

import pytest
import torch
from runs import interrupted, prune, recipe, saved_bytes
from small_models import save_small_model, small_model
from transformers import LlamaConfig

from drot.calibration.stream import CalibrationStream
from drot.cli import app as cli
from drot.config import resolve
from drot.machine.ranks import Ranks
from drot.machine.spool import Spool
from drot.model.decoder import DecoderModel
from drot.pipeline import states
from drot.pipeline.memory import device_memory, main_memory, state_bytes
from drot.pipeline.sizes import sizes_of, without_weights
from drot.pipeline.states import place_of_states

pytestmark = pytest.mark.slow

GPU = torch.device("cuda")
#: LLaMA-3-70B
LARGE = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(states, "available_memory", lambda: 1000)


@pytest.mark.parametrize(
    "fields",
    [
        dict(solve="none", target="self"),
        dict(quality="best", recover="block", recover_epochs=1),
        dict(hessians="dense"),
    ],
    ids=str,
)
def test_a_file_gives_the_same_bytes(fields, tmp_path, little_memory, monkeypatch):
    folder, chosen = str(save_small_model(small_model("llama"), tmp_path / "dense")), recipe(**fields)
    sizes, real = [], Spool.empty
    monkeypatch.setattr(Spool, "empty", lambda *args: sizes.append(args[1]) or real(*args))
    interrupted(folder, chosen, out=tmp_path / "file")
    spooled = prune(folder, chosen, out=tmp_path / "file", resume=True)
    assert spooled.manifest.hidden_states == "file" and len(sizes) > 2
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "file"}
    monkeypatch.undo()
    in_memory = prune(folder, chosen, out=tmp_path / "memory")
    assert in_memory.manifest.hidden_states == "main memory"
    assert saved_bytes(tmp_path / "file") == saved_bytes(tmp_path / "memory")


def test_a_run_without_out_has_no_file(little_memory, monkeypatch):
    monkeypatch.setattr(Spool, "empty", lambda *args: pytest.fail("a file was made"))
    assert prune(small_model("llama"), recipe()).manifest.hidden_states == "main memory"


def test_a_dry_run_says_where(tmp_path, capsys, monkeypatch):
    folder = str(save_small_model(small_model("llama"), tmp_path))
    command = ["prune", folder, "--dry-run", "--device", "cpu", "--nsamples", "2", "--seqlen", "16"]
    found = {}
    for free in (10**12, 1000):
        monkeypatch.setattr(states, "available_memory", lambda free=free: free)
        assert cli.run([*command, "--json"]) == 0
        found[free] = json.loads(capsys.readouterr().out)
    assert [needs["place_of_states"] for needs in found.values()] == ["main memory", "file"]
    of_states = found[1000]["states"]
    assert of_states == 2 * 2 * 16 * 32 * 4  # those of the dense model too, in float32
    assert found[10**12]["main_memory"] - found[1000]["main_memory"] == of_states
    assert cli.run(command) == 0
    assert "in a file on the disk of OUT" in capsys.readouterr().out


@pytest.fixture(scope="module")
def large():
    return sizes_of(DecoderModel(without_weights(LARGE)), 128, 2048)


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_the_place_by_the_memory(large, quality, monkeypatch):
    chosen = resolve(recipe(quality=quality))
    work, held = (of(large, chosen, torch.bfloat16) for of in (device_memory, state_bytes))
    own = held // (1 if quality == "fast" else 2)
    needed = main_memory(large, chosen, torch.bfloat16) + held
    for on_gpu, in_memory, place in (
        (work + 2 * own, 0, "device"),
        (work + 2 * own - 1, needed, "main memory"),
        (work, needed - 1, "file"),
    ):
        monkeypatch.setattr(states, "free_memory", lambda device, free=on_gpu: free)
        monkeypatch.setattr(states, "available_memory", lambda free=in_memory: free)
        assert place_of_states(large, chosen, torch.bfloat16, GPU) == place
    monkeypatch.setattr(states, "available_memory", lambda: needed + work)
    assert place_of_states(large, chosen, torch.bfloat16, torch.device("cpu")) == "main memory"


def test_a_pass_keeps_the_inputs_of_o_proj_beside_its_outputs(large, monkeypatch):
    """Where they are wider than the stream, as in Qwen3-32B: 64 heads of 128 and a stream of 5120."""
    config = LlamaConfig(**LARGE.to_diff_dict() | dict(hidden_size=5120, head_dim=128))
    sizes, chosen = sizes_of(DecoderModel(without_weights(config)), 128, 2048), resolve(recipe("none"))
    held = 2 * 128 * 2048 * (5120 + 5120 + 8192)
    needed = device_memory(sizes, chosen, torch.bfloat16) + held
    found = []
    for free in (needed, needed - 1):
        monkeypatch.setattr(states, "free_memory", lambda device, free=free: free)
        monkeypatch.setattr(states, "available_memory", lambda: 10**12)
        found.append(place_of_states(sizes, chosen, torch.bfloat16, GPU))
    assert found == ["device", "main memory"]


@pytest.mark.parametrize("mode", ["none", "layer"])
def test_the_main_memory_of_a_large_model_is_three_layers_and_the_hidden_states(large, mode):
    """That of a run on a GPU in bfloat16; beside them lie two rotations in fp64."""
    chosen = resolve(recipe(mode=mode))
    layer = 2 * large.layer_weights
    assert 1.7e9 < layer < 1.72e9
    needed = main_memory(large, chosen, torch.bfloat16) - state_bytes(large, chosen, torch.bfloat16)
    rotations = 2 * 8 * (8192**2 + 8 * 128**2 + 28672 * (chosen.rotation.down_block or 0))
    assert 2 * layer < needed - (rotations if mode == "layer" else 0) < 3 * layer


def test_layers_per_step_keeps_the_objectives_of_all_layers_in_main_memory(large):
    """Their weights, and H or its inverse: whole for R1, in blocks of a head for R2, and in blocks for R3."""
    together, offloaded = (
        resolve(recipe(mode="shared", down_rotation=64, layers_per_step=layers, product_dtype="float32"))
        for layers in (0, 4)
    )
    metrics = 2 * 8192**2 + 8192 * 128 + 28672 * 64
    needed = [main_memory(large, chosen, torch.bfloat16) for chosen in (together, offloaded)]
    linears = large.layer_weights - 2 * 8192  # two norms
    assert needed[1] - needed[0] == 4 * 80 * (linears + metrics)


def test_ranks_share_the_main_memory_of_their_machine(large, monkeypatch):
    """Rank 0 holds the rotations that all ranks have just trained, and those that it still writes."""
    chosen, ranks = resolve(recipe(quality="balanced", hessians="dense")), Ranks(size=8)
    of_rank = dataclasses.replace(large, nsamples=16)
    alone = main_memory(of_rank, chosen, torch.bfloat16)
    rotation = 8 * (8192**2 + 8 * 128**2 + (r3 := 28672 * 16))
    needed = main_memory(of_rank, chosen, torch.bfloat16, ranks=ranks)
    assert needed == 8 * alone + (16 - 2) * rotation
    sequential = resolve(recipe(quality="balanced", hessians="sequential"))
    assert main_memory(of_rank, sequential, torch.bfloat16, ranks=ranks) == 8 * alone

    monkeypatch.setattr(states, "free_memory", lambda device: 0)
    # for 8192 channels R1 and the hidden states take a power of two, and R3 is rounded up
    needed += 8 * state_bytes(of_rank, chosen, torch.bfloat16) + (16 - 2) * (2**22 - 8 * r3)
    for free, place in ((needed, "main memory"), (needed - 1, "file")):
        monkeypatch.setattr(states, "available_memory", lambda free=free: free)
        assert place_of_states(of_rank, chosen, torch.bfloat16, GPU, ranks=ranks) == place


def test_pinned_states_take_a_power_of_two(large):
    """torch takes that much for a pinned tensor (CachingHostAllocator.h)."""
    wide, chosen = dataclasses.replace(large, nsamples=100), resolve(recipe(quality="balanced"))
    states, pinned = (state_bytes(wide, chosen, torch.bfloat16, pinned=pinned) for pinned in (False, True))
    assert (states, pinned) == (2 * 100 * 2048 * 8192 * 2, 2 * 2**32)
    less, more = (main_memory(wide, chosen, torch.bfloat16, pinned=pinned) for pinned in (False, True))
    assert more - less == pinned - states


def test_a_dry_run_of_several_ranks(tmp_path, capsys):
    folder = str(save_small_model(small_model("llama"), tmp_path))
    command = ["prune", folder, "--dry-run", "--device", "cpu", "--nsamples", "6", "--seqlen", "16"]
    found = []
    for options in ([], ["--gpus", "3"]):
        assert cli.run([*command, *options, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    one, three = found
    assert (one["gpus"], three["gpus"]) == (1, 3)
    for same in ("states", "checkpoint", "partial", "work"):
        assert one[same] == three[same]
    assert three["device_memory"] == one["device_memory"]  # of each rank, whatever its sequences are
    layer_and_states = one["main_memory"] - one["states"]
    assert three["main_memory"] == 3 * layer_and_states + one["states"]
    assert cli.run([*command, "--gpus", "3"]) == 0
    assert capsys.readouterr().out.count("for all 3 ranks") == 2
    assert cli.run([*command, "--gpus", "0"]) == 2
    assert "--gpus must be at least 1, got 0" in capsys.readouterr().err
    assert cli.run([*command, "--seqlen", "9999"]) == 2
    assert "--seqlen must be at most" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_not_there_are_refused(tmp_path, capsys):
    folder = str(save_small_model(small_model("llama"), tmp_path / "dense"))
    assert cli.run(["prune", folder, "--out", str(tmp_path / "out"), "--gpus", "3"]) == 2
    assert "torch finds no GPU for --gpus 3: --device cpu shares the run" in capsys.readouterr().err


def test_streams_in_a_file_hand_it_on(tmp_path):
    model = DecoderModel(small_model("llama"))
    tokens, cpu = torch.zeros(3, 8, dtype=torch.long), torch.device("cpu")
    stream = CalibrationStream.embed(model, tokens, cpu, empty=Spool(tmp_path).empty)
    plain = CalibrationStream.embed(model, tokens, cpu)
    for each in (stream, stream.copy(), stream.first_samples(2)):
        assert not each.on_device and each.empty is stream.empty
        assert torch.equal(each.hidden_states, plain.hidden_states[: len(each.hidden_states)])
    assert plain.on_device and stream.buffer(8, torch.float32) is stream.buffer(8, torch.float32)
