"""`drot.load` never runs code that a checkpoint brings along."""

import json

import pytest
from small_models import small_model

import drot
from drot.checkpoint.manifest import read_any_manifest
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
