"""Layers of the demo's trained LLaMA as models of other families: the same function, in other modules."""

from pathlib import Path

import pytest
import torch
from small_models import random_tokens, relative_error
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import drot
from drot.config import Recipe
from drot.model.decoder import DecoderModel
from drot.reporting.demo import CALIBRATION, HELD_OUT, MODEL

#: what the modules of Granite multiply; the weights of LLaMA are divided by it
GRANITE = dict(embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0)


@torch.no_grad()
def as_family(family):
    """The first layers of the demo's model with the modules of `family`."""
    llama = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, num_hidden_layers=2)
    own = llama.config
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    )
    settings = {name: getattr(own, name) for name in names} | dict(
        pad_token_id=None, tie_word_embeddings=False
    )
    if family == "granite":
        settings |= GRANITE | dict(attention_multiplier=(own.hidden_size // own.num_attention_heads) ** -0.5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    for layer, dense in zip(DecoderModel(model).layers, DecoderModel(llama).layers, strict=True):
        for name, linear in layer.linears.items():
            scale = (
                GRANITE["residual_multiplier"] if family == "granite" and linear.spec.writes_residual else 1
            )
            linear.weight.copy_(dense.linears[name].weight / scale)
        for norm, of_dense in zip(layer.norms, dense.norms, strict=True):
            norm.weight.copy_(of_dense.weight)
    embedding, logits = (GRANITE["embedding_multiplier"], 8.0) if family == "granite" else (1, 1)
    model.model.embed_tokens.weight.copy_(llama.model.embed_tokens.weight / embedding)
    model.lm_head.weight.copy_(llama.lm_head.weight * logits)
    model.model.norm.weight.copy_(llama.model.norm.weight)
    tokens = random_tokens(1, 60, vocab=4096)
    assert relative_error(model(tokens).logits, llama(tokens).logits) < 1e-5
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("family", ["granite", "phi3"])
@pytest.mark.slow
def test_the_rotation_lowers_the_error(family):
    """Of the logits, on text that the model and the calibration have not seen."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [Path(CALIBRATION.source).read_text()[:40_000], HELD_OUT.read_text()[:10_000]]
    ids = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    calibration, held_out = (found[: rows * 256].view(rows, 256) for found, rows in zip(ids, (4, 2)))
    dense = as_family(family)(held_out).logits

    def error(chosen):
        pruned = drot.prune(as_family(family), chosen, calibration=calibration, device="cpu").model
        return relative_error(pruned(held_out).logits, dense)

    fast = Recipe().with_quality("fast").replace(seqlen=256, steps=8)
    assert error(fast) < 0.8 * error(fast.replace(mode="none"))
