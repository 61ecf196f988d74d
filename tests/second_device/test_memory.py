"""The memory that a run takes on the device: a layer of LLaMA-3-70B's shapes, 64 times as narrow."""

import device as second
import pytest
import torch
from runs import prune
from small_models import random_tokens, small_model

from drot.calibration import cholesky, hessian, layer_pass, stream
from drot.config import Recipe, resolve
from drot.model.decoder import DecoderModel
from drot.pipeline import distill, importance
from drot.pipeline.memory import device_memory, distillation_memory, training_memory
from drot.pipeline.sizes import sizes_of

#: as in tests/pipeline/test_prune_memory.py: all sizes are divided by it, and bytes by its square
NARROWER = 64
HIDDEN, INNER, SEQLEN = 8192 // NARROWER, 28672 // NARROWER, 2048 // NARROWER
#: the least and the largest share that a run takes of what `drot prune --dry-run` says
TOLERANCE = 0.6, 1.0


@pytest.mark.slow
@pytest.mark.parametrize("quality", ["fast", "best"])
def test_a_run_takes_what_its_estimate_says(quality, monkeypatch):
    for place, name in ((stream, "TOKENS_PER_BATCH"), (hessian, "PANEL_COLUMNS")):
        monkeypatch.setattr(place, name, {"cpu": (8192, 2048)[place is hessian] // NARROWER})
    monkeypatch.setattr(layer_pass, "KEPT_SHARE", 0)
    monkeypatch.setattr(importance, "CHUNK", importance.CHUNK // NARROWER**2)
    monkeypatch.setattr(cholesky, "GPU_BLOCK", cholesky.GPU_BLOCK // NARROWER)
    monkeypatch.setattr("drot.machine.graph.is_gpu", lambda device: False)
    sizes = dict(hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, head_dim=8)
    model = small_model("llama", **sizes, num_attention_heads=HIDDEN // 8, num_key_value_heads=HIDDEN // 64)
    model = model.to(torch.bfloat16)
    recover = {"recover": "block", "recover_epochs": 1} if quality == "best" else {}
    recipe = Recipe().with_quality(quality).replace(steps=2, **recover)
    tokens = random_tokens(128, SEQLEN)
    resolved = resolve(recipe, device="second")
    estimate = device_memory(sizes_of(DecoderModel(model), *tokens.shape), resolved, torch.bfloat16)
    with second.limited(0, int(TOLERANCE[1] * estimate)):  # no room for the states of the dense model
        result = prune(model, recipe, calibration=tokens, device="second:0")
    peak = max(found.gpu for found in result.manifest.peak_memory.values())
    low, high = TOLERANCE
    assert low < peak / estimate < high, (peak, estimate)


@pytest.mark.slow
@pytest.mark.parametrize("layers_per_step", [0, 4])
def test_a_shared_training_takes_what_its_estimate_says(layers_per_step, monkeypatch):
    """All layers lie on the device together, or one after the other."""
    monkeypatch.setattr("drot.machine.graph.is_gpu", lambda device: False)
    monkeypatch.setattr(stream, "TOKENS_PER_BATCH", {"cpu": 64})
    monkeypatch.setattr(hessian, "PANEL_COLUMNS", {"cpu": 64})
    sizes = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=6, head_dim=8)
    model = small_model("llama", **sizes, num_attention_heads=16, num_key_value_heads=4)
    model = model.to(torch.bfloat16)
    recipe = Recipe().with_quality("fast").replace(mode="shared", steps=2, layers_per_step=layers_per_step)
    tokens = random_tokens(4, 64)
    resolved, found = resolve(recipe, device="second"), sizes_of(DecoderModel(model), *tokens.shape)
    estimate = training_memory(found, resolved)
    result = prune(model, recipe, calibration=tokens, device="second:0")
    peak = result.manifest.peak_memory["rotate"].gpu
    assert 0.9 < peak / estimate < 1.1, (peak, estimate)


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_a_training_of_all_layers_takes_what_its_estimate_says(keeps, monkeypatch):
    sizes = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=6, head_dim=16, vocab_size=512)
    model = small_model("llama", **sizes, num_attention_heads=8, num_key_value_heads=2).to(torch.bfloat16)
    if not keeps:
        needed = distill._needed
        monkeypatch.setattr(distill, "_needed", lambda run, keeps=False: needed(run) + 2**60 * keeps)
    recipe = Recipe().replace(mode="none", solve="none", target="self", distill_epochs=1, sparsity="2:4")
    tokens = random_tokens(8, 64)
    resolved = resolve(recipe, device="second", tokens=(8, 64), distillation=8)
    found = sizes_of(DecoderModel(model), *tokens.shape)
    estimate = distillation_memory(found, resolved, torch.bfloat16, keeps=keeps)
    given = dict(calibration=tokens, distillation=random_tokens(8, 64, seed=1))
    result = prune(model, recipe, device="second:0", **given)
    assert result.manifest.distillation.kl_before is not None
    peak = result.manifest.peak_memory["distill"].gpu
    assert 0.5 < peak / estimate < 1.1, (peak, estimate)
