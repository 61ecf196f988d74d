"""benchmarks/minutes.py: what it counts on tensors without storage is what a run on a CPU computes."""

import runpy
from pathlib import Path

import pytest
from runs import recipe
from small_models import random_tokens, small_model

from drot.calibration import cholesky, hessian, stream
from drot.config import resolve
from drot.pipeline.estimate import USUAL_ADMM_ITERATIONS
from drot.pruning import solve

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("quality", ["fast", pytest.param("best", marks=pytest.mark.slow)])
def test_the_operations_are_those_of_a_run(quality, monkeypatch):
    """In all steps but the training, whose steps in so(n) are others on a GPU (tests/rotation)."""
    minutes = runpy.run_path(str(ROOT / "benchmarks/minutes.py"))
    monkeypatch.setattr(solve, "ADMM_SETTLED", -1.0)  # so that ADMM takes all iterations
    monkeypatch.setattr(solve, "ADMM_GROWTH", ((-1.0, 1.1),))
    monkeypatch.setattr(solve, "ADMM_ITERATIONS", USUAL_ADMM_ITERATIONS)
    monkeypatch.setattr(cholesky, "GPU_BLOCK", cholesky.CPU_BLOCK)
    for table in (stream.TOKENS_PER_BATCH, hessian.PANEL_COLUMNS):
        monkeypatch.setitem(table, "cuda", table["cpu"])
    chosen = resolve(
        recipe(quality=quality, sparsity="2:4", steps=2, recover_epochs=1), device="cpu", down_width=48
    )
    found = [
        minutes["counted_run"](
            small_model("llama", num_hidden_layers=1).to(device), chosen, random_tokens(4, 40)
        )
        for device in ("cpu", "meta")
    ]
    by_step = []
    for costs in found:
        sums: dict[str, float] = {}
        for (step, _), operations in costs.operations.items():
            sums[step] = sums.get(step, 0) + operations
        by_step.append({step: value for step, value in sums.items() if step != "rotate" and value})
    assert by_step[1] == pytest.approx(by_step[0], rel=1e-9)
    assert by_step[0].keys() >= {"check", "calibrate", "merge", "prune", "save"}
