"""`drot tune`: what it runs, what it reads from the tuning cache, and its error messages, but no speed."""

import json

import pytest
import torch
from small_models import small_model

from drot import _C
from drot.checkpoint.quantization_config import DrotConfig
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.evaluation import tune as tuning
from drot.ops import nm_mask
from drot.sparse.fused import fuse
from drot.sparse.packed import pack_model


@pytest.fixture
def packed():
    model = small_model("llama")
    for name, weight in model.model.layers.named_parameters():
        if name.endswith("proj.weight"):
            weight.data.masked_fill_(nm_mask(weight.abs(), 2, 4), 0)
    pack_model(model)
    fuse(model)
    model.config.quantization_config = DrotConfig()
    return model


@pytest.fixture
def gpu(packed, monkeypatch, tmp_path):
    """A model on the CPU that writes lines as a GPU does, and the lengths of the sequences that it reads."""
    monkeypatch.setenv("DROT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "is_gpu", lambda device: True)
    monkeypatch.setattr(tuning, "load", lambda *args, **options: packed)
    monkeypatch.setattr(tuning, "load_config", lambda model: packed.config)
    read = []

    def write(module, args, output):
        read.append(args[0].shape[-1])
        _C.tuning_cache_store(f"{tuning.PRODUCT}1, bf16 8x8, up to {read[-1]} tokens:", "skinny")

    packed.register_forward_hook(write)
    return read


def test_each_number_of_tokens_is_run_and_what_was_measured_is_told(gpu, tmp_path):
    _C.tuning_cache_store("peaks of torch", "{}")
    found = tuning.tune("packed", tokens=[4, 8], device="cpu")
    assert gpu == [4, 8]
    assert found["products"] == {
        f"{tuning.PRODUCT}1, bf16 8x8, up to {size} tokens:": "skinny" for size in (4, 8)
    }
    assert found["tuning_cache"] == str(tmp_path / "cache" / "measured.txt")
    assert tuning.tune("packed", tokens=[4], device="cpu")["products"] == {}


def test_learned_positions_are_the_most_tokens(gpu, monkeypatch):
    """OPT has a row of a table for each position, and rotary positions are computed."""
    config = small_model("opt", max_position_embeddings=100).config
    assert max(tuning.TUNED_TOKENS) > 100
    monkeypatch.setattr(tuning, "load_config", lambda model: config)
    tuning.tune("packed", device="cpu")
    assert gpu == [32, 64, 100]
    with pytest.raises(UserError, match="at most 100, the positions that this model has learned; got 128"):
        tuning.tune("packed", tokens=[32, 128], device="cpu")
    monkeypatch.setattr(tuning, "load_config", lambda model: small_model("llama").config)
    tuning.tune("packed", tokens=[129], device="cpu")
    assert gpu[3:] == [129]


def test_the_command_shows_the_products(gpu, capsys):
    options = ["tune", "packed", "--tokens", "4", "--device", "cpu"]
    assert cli.run([*options, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["products"].values()) == ["skinny"]
    assert cli.run(options) == 0
    assert "Nothing was left to measure" in capsys.readouterr().out


def test_a_cpu_has_nothing_to_choose(capsys):
    assert cli.run(["tune", "no-such-model", "--device", "cpu"]) == 0
    assert "one algorithm for each product: there is nothing to choose" in capsys.readouterr().out


@torch.no_grad()
def test_mistakes(gpu, monkeypatch):
    for tokens, got in ((["a"], "'a'"), (5, "5")):
        with pytest.raises(UserError, match=f"`tokens` must be .*got {got}"):
            tuning.tune("packed", tokens=tokens, device="cpu")
    for tokens, got in (([], "none"), ([0], "0"), ([1 << 18], str(1 << 18))):
        with pytest.raises(UserError, match=f"`tokens` must be whole numbers from 1 to .*; got {got}$"):
            tuning.tune("packed", tokens=tokens, device="cpu")
    monkeypatch.setenv("DROT_CACHE", "")
    with pytest.raises(UserError, match="name one in DROT_CACHE"):
        tuning.tune("packed", device="cpu")
    monkeypatch.setenv("DROT_CACHE", "somewhere")
    monkeypatch.setattr(tuning, "load", lambda *args, **options: small_model("llama"))
    with pytest.raises(UserError, match="is not packed"):
        tuning.tune("packed", device="cpu")
