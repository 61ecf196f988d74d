"""The space on the disk: the estimate against what runs write, and the refusal before a run starts."""

import collections
import re
import shutil
from pathlib import Path

import pytest
import torch
from runs import TOKENS, interrupted, one_shot, prune
from safetensors.torch import save_file
from small_models import save_small_model, small_model
from small_multimodal import KINDS, rotations_of, save_small_multimodal

import drot
from drot.checkpoint import multimodal
from drot.checkpoint.disk_space import weight_file_bytes
from drot.checkpoint.source import header_bytes
from drot.core.errors import UserError
from drot.pipeline import prune as pipeline
from drot.pipeline.dry_run import run_needs

#: of a finished layer, which becomes a part of the checkpoint
SHARD = re.compile(r"layer_\d+\.safetensors")
#: the same of a run that trains all layers together
DISTILLED = re.compile(r"distilled_layer_\d+\.safetensors")
Usage = collections.namedtuple("Usage", "total used free")


def recipe(mode="layer", **fields):
    return one_shot(mode, method="wanda", steps=1, keep=("layers.0.*",), **fields)


@pytest.fixture
def needs(monkeypatch):
    """The arguments with which a run checks the space."""
    seen = []
    monkeypatch.setattr(pipeline, "check_space", lambda out, *needs: seen.append(needs))
    return seen


@pytest.mark.parametrize(
    ("family", "format", "mode", "rotation"),
    [
        ("llama", "packed", "none", {}),
        ("qwen3-biased", "dense", "layer", {}),
        ("phi3", "packed", "layer", {}),
        ("llama", "dense", "layer", dict(hessians="dense")),
        ("llama", "dense", "layer", dict(layers_per_rotation=2)),
        ("qwen3-biased", "packed", "layer", dict(hessians="dense", boundary="residual")),
        ("llama", "dense", "shared", {}),
        # layers that differ in their widths
        ("laguna", "packed", "none", {}),
        ("gemma4_text-values", "packed", "none", {}),
        ("kimi_linear", "packed", "none", {}),
        ("glm4_moe", "dense", "none", {}),  # whose routers stay in fp32
        ("llama", "packed", "layer", dict(distill_epochs=1)),
    ],
)
def test_the_estimate_is_what_a_run_writes(needs, tmp_path, family, format, mode, rotation):
    written, sizes = [], []

    def at_the_end(event):
        if event.phase == "save":
            written.extend((tmp_path / "out.partial").glob("*.safetensors"))
            shard = DISTILLED if "distill_epochs" in rotation else SHARD
            sizes.extend(file.stat().st_size for file in written if not shard.fullmatch(file.name))

    model, out = small_model(family, vocab_size=500, hidden_size=64), tmp_path / "out"
    options = dict(out=out, format=format, save_dtype="bfloat16", progress=at_the_end)
    prune(model, recipe(mode, **rotation), **options)
    ((checkpoint, beside, before),) = needs
    # a family has a few buffers too, and the files have headers, in which the records of the layers lie
    headers = sum(len(header_bytes(file)) for file in out.glob("*.safetensors"))
    assert 0 <= weight_file_bytes(out) - headers - checkpoint < 500
    assert 0 <= sum(sizes) - beside < 30_000 and before == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "mode"),
    [
        ("qwen3_vl", "none"),
        *((name, "layer") for name in KINDS),
    ],
)
def test_what_reads_images_counts_too(needs, tmp_path, model_type, mode):
    """In its own dtype, but for the linears that write images into the stream, which R1 rotates."""
    source, out = save_small_multimodal(tmp_path / "source", model_type), tmp_path / "out"
    chosen = recipe(mode, **rotations_of(model_type))
    prune(source, chosen, out=out, save_dtype="bfloat16")
    ((checkpoint, _, _),) = needs
    headers = sum(len(header_bytes(file)) for file in out.glob("*.safetensors"))
    assert 0 <= weight_file_bytes(out) - headers - checkpoint < 500
    assert run_needs(source, chosen, device="cpu", save_dtype="bfloat16").checkpoint == checkpoint


def test_the_peak_of_a_model_that_reads_images_too(needs, monkeypatch, tmp_path):
    """What lies outside of the language model's layers is written alone first, and then with the rest."""
    peak = []

    def save(tensors, file, *arguments):
        save_file(tensors, file, *arguments)
        files = [*file.parent.parent.glob("out*/**/*"), *file.parent.iterdir()]
        states = {
            each.stat().st_ino: each.stat() for each in files if ".safetensors" in each.name or each == file
        }
        peak.append(sum(state.st_size for state in states.values()))

    monkeypatch.setattr(multimodal, "save_file", save)
    source = save_small_multimodal(tmp_path / "source", "smolvlm", vocab_size=5000, tie_word_embeddings=False)
    prune(source, recipe("none"), out=tmp_path / "out", save_dtype="bfloat16")
    ((checkpoint, beside, _),) = needs
    ends = 2 * 5000 * 32 * 2
    assert checkpoint + 0.9 * ends < peak[0] < checkpoint + beside + 30_000


def test_a_resumed_run_needs_less(needs, tmp_path):
    out = tmp_path / "out"
    interrupted(chosen=recipe(), at=("prune", 2), out=out)
    prune(chosen=recipe(), resume=True, out=out)
    *first, before = needs[0]
    *again, written = needs[1]
    assert first == again and before == 0 and 0.5 * sum(first) < written < sum(first)


def test_hidden_states_in_a_file_count(needs, tmp_path, monkeypatch):
    folder = save_small_model(small_model("llama"), tmp_path / "dense")
    prune(str(folder), recipe(), out=tmp_path / "in memory")
    monkeypatch.setattr("drot.pipeline.states.available_memory", lambda: 1000)
    result = prune(str(folder), recipe(), out=tmp_path / "in a file")
    assert result.manifest.hidden_states == "file"
    (checkpoint, beside, _), (same, more, _) = needs
    tokens, hidden = TOKENS.numel(), small_model("llama").config.hidden_size
    assert (same, more) == (checkpoint, beside + 4 * tokens * hidden)


def test_a_disk_that_is_too_small_is_refused_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 50_000))
    events = []
    with pytest.raises(UserError, match=r"its disk has 50\.0 kB") as error:
        prune(chosen=recipe(), out=tmp_path / "out", progress=events.append)
    assert (
        "\n" not in str(error.value)
        and {e.phase for e in events} <= {"load"}
        and not list(tmp_path.iterdir())
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-biased", "cohere2"])
def test_a_file_of_rotations_on_the_same_disk_counts_twice(needs, family, tmp_path):
    """It is written from copies on its disk. Its estimate is its size."""
    folder, rotations = save_small_model(small_model(family), tmp_path / "dense"), tmp_path / "saved"
    for save_to in (None, rotations, tmp_path / "second" / "rotations.safetensors"):
        out = tmp_path / ("first" if save_to in (None, rotations) else "second")
        prune(str(folder), recipe(), out=out, save_rotations_to=save_to)
        shutil.rmtree(out)
    size = run_needs(folder, recipe(), device="cpu").rotations_file
    (_, alone, _), (_, outside, _), (_, inside, _) = needs
    assert outside == inside == alone + 2 * size
    assert 0 < rotations.stat().st_size - size < 10_000


def test_the_disk_is_that_of_the_output(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(Path(path)) or Usage(1, 0, 10**12))
    prune(chosen=recipe("none"), out=tmp_path / "a" / "b")
    assert asked == [tmp_path / "a"]


def test_a_name_on_the_hub_has_no_files():
    assert weight_file_bytes("some-org/some-model") is None


def test_files_beside_the_weights_are_no_part_of_their_size(tmp_path):
    """The rotations of `save_rotations_to` in the folder, and other weights, as Mistral publishes."""
    prune(chosen=recipe(), out=tmp_path / "out", save_rotations_to=tmp_path / "out" / "rotations.safetensors")
    (tmp_path / "out" / "consolidated.safetensors").write_bytes(bytes(1000))
    weights = sum(file.stat().st_size for file in (tmp_path / "out").glob("model-*.safetensors"))
    assert weight_file_bytes(tmp_path / "out") == weights > 0


def test_a_result_is_shown_in_one_line(tmp_path):
    result = prune(small_model("llama", dtype=torch.bfloat16), recipe(), out=tmp_path / "o")
    assert repr(result) == f"PruneResult(out={tmp_path / 'o'!r}, finished_before=False)"
    figures = drot.sensitivity(small_model("llama"), recipe(), calibration=TOKENS, device="cpu")
    assert repr(figures) == f"SensitivityResult(figures={figures.figures!r})"
