"""benchmarks/counting.py: what it counts on tensors without storage is what a run on a CPU computes."""

import runpy
from pathlib import Path

import pytest
import torch
from runs import recipe
from small_models import random_tokens, small_model
from transformers import AutoConfig, AutoModelForCausalLM

from drot.calibration import cholesky, hessian, stream
from drot.config import resolve
from drot.evaluation.variants import SHAPES
from drot.model import inputs
from drot.pipeline.work import USUAL_ADMM_ITERATIONS
from drot.pruning import solve

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("quality", ["fast", "best"])
def test_the_operations_are_those_of_a_run(quality, monkeypatch):
    """In all steps but the training, whose steps in so(n) are others on a GPU (tests/rotation)."""
    counting = runpy.run_path(str(ROOT / "benchmarks/counting.py"))
    monkeypatch.setattr(solve, "ADMM_SETTLED", -1.0)  # so that ADMM takes all iterations
    monkeypatch.setattr(solve, "ADMM_GROWTH", ((-1.0, 1.1),))
    monkeypatch.setattr(solve, "ADMM_ITERATIONS", USUAL_ADMM_ITERATIONS)
    monkeypatch.setattr(solve, "products_on", lambda device: torch.bfloat16)
    monkeypatch.setattr(cholesky, "GPU_BLOCK", cholesky.CPU_BLOCK)
    for table in (stream.TOKENS_PER_BATCH, hessian.PANEL_COLUMNS):
        monkeypatch.setitem(table, "cuda", table["cpu"])
    recover = {"recover": "block", "recover_epochs": 1, "distill_nsamples": 4} if quality == "best" else {}
    chosen = resolve(recipe(quality=quality, sparsity="2:4", steps=2, **recover), device="cpu", down_width=48)
    found = [
        counting["counted_run"](
            small_model("llama", num_hidden_layers=1).to(device), chosen, random_tokens(4, 40)
        )
        for device in ("cpu", "meta")
    ]
    by_step = []
    for costs, _ in found:
        sums: dict[str, float] = {}
        for (step, _), operations in costs.operations.items():
            sums[step] = sums.get(step, 0) + operations
        by_step.append({step: value for step, value in sums.items() if step != "rotate" and value})
    assert by_step[1] == pytest.approx(by_step[0], rel=1e-9)
    assert by_step[0].keys() >= {"check", "calibrate", "merge", "prune", "save"}


@pytest.mark.slow
def test_a_layer_of_qwen3_30b_a3b_takes_less_than_30_gb():
    """128 small experts. No token reaches an expert on `meta`. So the inputs of the experts are not counted:
    five tensors of at most ROUTED_BYTES, the products of a batch of Hessians, and a copy of weights."""
    counting = runpy.run_path(str(ROOT / "benchmarks/counting.py"))
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=1024,
        hidden_size=2048,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        max_position_embeddings=2048,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    equal = {
        "token_weights": "equal",
        "output_weights": "equal",
    }  # whose gradients take less than the Hessians
    asked = recipe(quality="balanced", steps=2, down_rotation="none", seqlen=2048, block_size=128, **equal)
    chosen = resolve(asked, device="cuda", positions=2048)
    tokens = torch.zeros(32, 2048, dtype=torch.long)
    costs, _ = counting["counted_run"](model.eval().requires_grad_(False), chosen, tokens)
    routed = 5 * inputs.ROUTED_BYTES + 128 * (4 * 2048**2 + 2 * 2 * 768 * 2048)
    assert 10e9 < max(costs.peak.values()) < 30e9 - routed


@pytest.mark.slow
def test_ranks_share_the_work(monkeypatch):
    """Those of four machines send. Each trains the rotations of other layers, and prunes other rows."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    minutes_of = runpy.run_path(str(ROOT / "benchmarks/minutes.py"))["minutes_of"]
    half = dict(hidden_size=2048, intermediate_size=7168, num_attention_heads=16, num_key_value_heads=4)
    monkeypatch.setitem(SHAPES, "half as wide", SHAPES["llama-3-8b"] | half)
    alone, of_32 = (minutes_of("half as wide", "fast", 32, 64, ranks, steps=2)[0] for ranks in (1, 32))
    assert alone["send"] == 0 < of_32["send"]
    assert of_32["rotate"] < alone["rotate"] / 8 and of_32["prune"] < alone["prune"]
    assert of_32["calibrate"] < alone["calibrate"]
