"""What `drot.load` runs and refuses, and which attention it chooses."""

import json

import pytest
import torch
from small_models import random_tokens, small_model

import drot
from drot.checkpoint.manifest import read_any_manifest
from drot.checkpoint.stored_config import write_stored_form
from drot.core.errors import UserError


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    """A config.json that names Python code is refused, without asking the user and without running it."""
    folder = tmp_path / "model"
    small_model("llama").save_pretrained(folder)
    (folder / "custom.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "custom", "auto_map": code}))
    with pytest.raises(UserError, match="cannot load a causal language model"):
        drot.load(folder, device="cpu")
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_a_run_that_has_not_ended_is_named(name, tmp_path):
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(UserError, match=r"out\.partial is a run that has not ended: continue it"):
        read_any_manifest(tmp_path / name)


@pytest.mark.parametrize("stored", [False, True])
def test_the_attention_bounds_its_scores(stored, tmp_path):
    """PyTorch's attention has no such bound, and transformers took it for Gemma 2 until 5.20."""
    model, tokens = small_model("gemma2"), random_tokens(1, 20)
    model.set_attn_implementation("eager")
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    if stored:
        write_stored_form(tmp_path / "config.json")
    loaded = drot.load(tmp_path, device="cpu")
    torch.testing.assert_close(loaded(tokens).logits, expected)


def test_a_family_that_transformers_lacks_is_named(tmp_path, monkeypatch):
    small_model("llama").save_pretrained(tmp_path)
    write_stored_form(tmp_path / "config.json")
    monkeypatch.setattr("drot.checkpoint.stored_config.CONFIG_MAPPING", {})
    with pytest.raises(UserError, match="has no model of type 'llama': install a newer transformers"):
        drot.load(tmp_path, device="cpu")
