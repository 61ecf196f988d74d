"""benchmarks/spectrum.py: the effective rank of weights whose spectrum is known."""

import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "spectrum.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout")


def effective_rank(weight: torch.Tensor) -> float:
    found = runpy.run_path(str(SCRIPT))["effective_rank"](weight)
    assert isinstance(found, float)
    return found


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_weights_that_use_some_directions_alike_have_so_many(rank: int) -> None:
    left, right = (torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0] for size in (12, 8))
    assert effective_rank(left[:, :rank] @ right[:rank]) == pytest.approx(rank)


def test_a_strong_direction_counts_more_and_the_scale_does_not() -> None:
    weight = torch.diag(torch.tensor([3.0, 1.0]))  # squares 0.9 and 0.1 of their sum
    found = effective_rank(weight)
    assert found == pytest.approx(0.9**-0.9 * 0.1**-0.1)
    assert effective_rank(1e-3 * weight) == pytest.approx(found)
