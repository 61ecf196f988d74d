"""The memory of a training step on a layer with LLaMA-3-70B's shapes, counted on tensors without storage."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from drot.config import Sparsity
from drot.model.families import LLAMA
from drot.model.sizes import HeadShape
from drot.rotation import importance
from drot.rotation.importance import Metric
from drot.rotation.objective import LayerObjective
from drot.rotation.optimizers import OPTIMIZERS

D, FF, KV = 8192, 28672, 1024
SHAPE = HeadShape(heads=64, kv_heads=8, head_dim=128)
SIZES = {
    "q_proj": (D, D),
    "k_proj": (KV, D),
    "v_proj": (KV, D),
    "o_proj": (D, D),
    "gate_proj": (FF, D),
    "up_proj": (FF, D),
    "down_proj": (D, FF),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("objective", ["entropy", "pruned"])
def test_a_70b_layer_trains_within_30_gb(objective, optimizer, monkeypatch):
    """Counts the weights, the metrics, the optimiser and all memory that a step allocates through torch.

    The internal memory of kernels and libraries is not counted.
    """
    monkeypatch.setattr(importance, "upper_factor", lambda matrix: matrix)  # it reads values
    with FakeTensorMode(), MemTracker() as tracker, torch.no_grad():

        def empty(*size):
            return torch.empty(*size, dtype=torch.bfloat16)

        metrics = {
            "attention": Metric(empty(D, D), True),
            "mlp": Metric(empty(D, D), True),
            "o": Metric(empty(SHAPE.heads, SHAPE.head_dim, SHAPE.head_dim), True),
            "down": Metric(empty(FF) if objective == "pruned" else None, True),
        }
        layer = LayerObjective(
            {name: empty(*size) for name, size in SIZES.items()},
            metrics,
            LLAMA.groups,
            SHAPE,
            objective=objective,
            sparsity=Sparsity.parse("2:4"),
            product_dtype=torch.bfloat16,
        )
        training = OPTIMIZERS[optimizer](list(layer.identity()), lr=0.01, steps=10, objective=objective)
        for _ in range(2):
            _, g1, g2 = layer.value_and_grad(*training.matrices)
            training.step([g1, g2])
    weights = 2 * sum(rows * columns for rows, columns in SIZES.values())
    (peak,) = (sum(kinds.values()) for kinds in tracker.get_tracker_snapshot("peak").values())
    assert weights < peak / 2 < 11e9  # a snapshot lists each kind and the total of all
