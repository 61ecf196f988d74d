"""The scripts in examples/: a model of another family is trained for a moment, rotated and pruned."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from runs import one_shot, saved_tensors
from small_models import random_tokens, relative_error, small_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import drot
from drot.config import Recipe
from drot.model.decoder import DecoderModel
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


PIXTRAL = dict(model_type="pixtral", image_size=28, patch_size=14, hidden_size=16, intermediate_size=16)
PIXTRAL |= dict(num_hidden_layers=1, num_attention_heads=2, head_dim=8)
SIGLIP = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
QWEN = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4)
#: model that reads images → its language model in small_models, and the entries of its config
WHOLE = {
    "mistral3": ("ministral3", dict(vision_config=PIXTRAL, image_token_index=95)),
    "gemma3": (
        "gemma3_text",
        dict(vision_config=SIGLIP | dict(image_size=28, patch_size=14), mm_tokens_per_image=1),
    ),
    "qwen2_5_vl": ("qwen2", dict(vision_config=QWEN)),
    "qwen3_5": ("qwen3_5_text", dict(vision_config=QWEN | dict(num_position_embeddings=16))),
}


@torch.no_grad()
def logits_behind_an_image(model, projectors, tokens):
    """The logits of tokens behind an image that the last linear of the projector writes, if it is one."""
    found = [each for name, each in model.named_modules() if f"{name}.".endswith(projectors)]
    image = torch.randn(
        2, 3, found[0].in_features if found else 32, generator=torch.Generator().manual_seed(0)
    )
    embedded = torch.cat([found[0](image) if found else image, model.get_input_embeddings()(tokens)], 1)
    return model.lm_head(model.model.language_model(inputs_embeds=embedded).last_hidden_state)


@pytest.mark.parametrize("model_type", WHOLE)
def test_a_pruned_language_model_is_put_back(model_type, tmp_path):
    """What reads images is the same byte for byte, but for the projector where R1 rotates the stream."""
    text_type, entries = WHOLE[model_type]
    text = small_model(text_type).config.to_dict()
    text.pop("final_logit_softcapping", None)  # Gemma 3 with images has none
    if model_type == "qwen2_5_vl":
        text |= {"model_type": "qwen2_5_vl_text"}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = AutoConfig.for_model(model_type, text_config=text, **entries)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "preprocessor_config.json").write_text("{}\n")
    module, tokens = script("language_model"), random_tokens(2, 30, vocab=90)
    alone = module.language_model(whole)
    assert relative_error(alone(tokens).logits, whole(input_ids=tokens).logits) < 1e-6
    rotations = tmp_path / "rotations.safetensors"
    nothing = one_shot("shared", sparsity=0.0, method="wanda", objective="entropy", steps=20)
    result = drot.prune(
        alone, nothing, calibration=random_tokens(4, 40), device="cpu", out=tmp_path / "pruned",
        save_rotations_to=rotations,
    )  # fmt: skip
    module.put_back(tmp_path / "source", tmp_path / "pruned", tmp_path / "out", rotations)
    found, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert relative_error(found(input_ids=tokens).logits, result.model(tokens).logits) < 1e-6
    expected = AutoModelForImageTextToText.from_pretrained(tmp_path / "source")
    logits = [logits_behind_an_image(model, module.PROJECTORS, tokens) for model in (found, expected)]
    assert relative_error(*logits) < 1e-5
    before, after = saved_tensors(tmp_path / "source"), saved_tensors(tmp_path / "out")
    own = set(saved_tensors(tmp_path / "pruned"))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    beside = {name for name in changed if module.own_name(name, own) is None}
    assert all(any(part in name for part in module.PROJECTORS) for name in beside) and changed != beside
    assert bool(beside) == DecoderModel(result.model).family.rotates_stream
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == "{}\n"
