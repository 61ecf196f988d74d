"""The pruning of a batch of weights is that of each weight alone."""

import itertools

import pytest
import torch
from torch import Tensor

from drot.calibration.hessian import InputHessian
from drot.config import PruningConfig
from drot.pruning import PruneOutcome, prune_once, solve_weights

BATCH, COLUMNS, ROWS = 4, 96, (24, 16)


def problem() -> tuple[Tensor, list[Tensor]]:
    """Hessians of different scales: one with dead columns, one of a few tokens, and one of none."""
    x = torch.randn(BATCH, 200, COLUMNS) * torch.tensor([1.0, 0.1, 10.0, 1.0])[:, None, None]
    x[1, :, 5] = 0
    x[2, 30:] = 0
    x[3] = 0
    return x.mT @ x, [torch.randn(BATCH, rows, COLUMNS) for rows in ROWS]


def pruned(hessian: Tensor, weights: list[Tensor], config: PruningConfig, solver: str) -> list[PruneOutcome]:
    of_input = InputHessian(hessian, 0.1, "median")
    outcomes = [prune_once(weight, of_input, config) for weight in weights]
    return solve_weights(outcomes, weights, of_input, [config] * len(weights), solver)


@pytest.mark.parametrize(
    ("method", "sparsity", "solver"),
    [
        *itertools.product(("magnitude", "wanda", "sparsegpt"), ("2:4", "0.5"), ("none",)),
        *itertools.product(("sparsegpt",), ("2:4", "0.5"), ("pcg", "admm")),
        ("wanda", "2:4", "sparsegpt"),
    ],
)
def test_a_batch_is_pruned_as_each_weight(method, sparsity, solver):
    torch.manual_seed(0)
    hessian, weights = problem()
    config = PruningConfig(method=method, sparsity=sparsity, block_size=32)
    together = pruned(hessian.double(), [weight.double() for weight in weights], config, solver)
    for i in range(BATCH):
        alone = pruned(hessian[i].double(), [weight[i].double() for weight in weights], config, solver)
        for batch, one in zip(together, alone, strict=True):
            assert torch.equal(batch.removed[i], one.removed)
            torch.testing.assert_close(batch.weight[i], one.weight, rtol=1e-6, atol=1e-9)
            for name in ("damping", "output_error", "energy", "admm_iterations"):
                of_batch, of_one = getattr(batch, name), getattr(one, name)
                if isinstance(of_batch, Tensor):
                    of_batch = of_batch.tolist()[i]
                assert of_batch == (None if of_one is None else pytest.approx(of_one, rel=1e-6)), name


def test_the_matrices_of_a_batch_end_at_different_iterations():
    """So the test above compares matrices that have ended with others that go on."""
    torch.manual_seed(0)
    hessian, weights = problem()
    config = PruningConfig(sparsity="2:4", block_size=32)
    outcome, _ = pruned(hessian.double(), [weight.double() for weight in weights], config, "admm")
    assert len(set(outcome.admm_iterations.tolist())) > 1
