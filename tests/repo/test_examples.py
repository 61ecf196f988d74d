"""The scripts in examples/: a model of another family is trained for a moment, rotated and pruned."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from runs import one_shot
from small_models import random_tokens, small_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import drot
from drot.config import Recipe
from drot.sweep.demo import CALIBRATION

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


@pytest.mark.parametrize("tied", [False, True])
def test_the_language_model_of_ministral_3_is_pruned(tied, tmp_path):
    """Its published checkpoints read images too. Alone it computes the same, and drot knows it."""
    text = small_model("ministral3").config.to_dict()
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    config = AutoConfig.for_model(
        "mistral3",
        text_config=text,
        vision_config=dict(model_type="pixtral", image_size=28, patch_size=14, **vision),
        tie_word_embeddings=tied,
    )
    whole = AutoModelForImageTextToText.from_config(config).eval()
    script("language_model").language_model(whole).save_pretrained(tmp_path)
    model, tokens = drot.load(tmp_path, device="cpu"), random_tokens(2, 30)
    assert (model.config.model_type, model.config.tie_word_embeddings) == ("ministral3", tied)
    assert torch.equal(model(tokens).logits, whole(input_ids=tokens).logits)
    drot.prune(model, one_shot("none"), calibration=random_tokens(4, 40), device="cpu")
