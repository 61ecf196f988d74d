"""The scripts in examples/: a model of another family is trained for a moment, rotated and pruned."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import drot
from drot.config import Recipe
from drot.reporting.demo import CALIBRATION

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "train_tiny_llama.py"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the checkout")


def script(name="train_tiny_llama"):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_default_texts_are_found():
    """The standard library, without the modules whose text drot keeps for evaluation."""
    names = {file.stem for file in script().standard_library()}
    assert len(names) > 100 and "argparse" in names


@pytest.mark.slow
def test_a_model_of_another_family_is_trained_and_pruned(tmp_path, monkeypatch):
    family, out = "granite", tmp_path / "granite"
    command = [SCRIPT, "--out", out, "--minutes", "0.02", "--family", family]
    sizes = ["--hidden", "64", "--layers", "1", CALIBRATION.source]
    monkeypatch.setattr(sys, "argv", [*map(str, command), *sizes])
    with torch.enable_grad():
        script().main()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == family and model.config.hidden_size == 64
    tokens = torch.randint(0, 4096, (4, 64))
    recipe = Recipe().with_quality("fast").replace(steps=5, seqlen=64)
    result = drot.prune(model, recipe, calibration=tokens, device="cpu")
    assert result.manifest.sparsity == pytest.approx(0.5, abs=0.01)
    assert result.manifest.relative_logit_error < 1e-5
