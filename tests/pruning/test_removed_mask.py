"""Masks against brute force in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drot.config import Sparsity
from drot.core.errors import UserError
from drot.pruning import prune_magnitude, prune_wanda, removed_mask


def smallest(values: list[float], count: int) -> list[bool]:
    """True for the `count` smallest values; of equal values for the first."""
    first = sorted(range(len(values)), key=lambda j: (values[j], j))[:count]
    return [j in first for j in range(len(values))]


def brute_force(score: Tensor, sparsity: Sparsity, scope: str) -> list[list[bool]]:
    rows, columns = score.shape
    table = score.double().tolist()
    if sparsity.structured:
        n, m = sparsity.n, sparsity.m
        starts = range(0, columns, m)
        return [[bit for i in starts for bit in smallest(row[i : i + m], m - n)] for row in table]
    if scope == "row":
        return [smallest(row, int(columns * sparsity.ratio)) for row in table]
    flat = smallest([value for row in table for value in row], int(rows * columns * sparsity.ratio))
    return [flat[i * columns : (i + 1) * columns] for i in range(rows)]


@pytest.mark.parametrize("scope", ["row", "matrix"])
@pytest.mark.parametrize("sparsity", ["0", "0.3", "0.5", "0.99", "2:4", "4:8", "1:3", "31:32"])
def test_mask(sparsity: str, scope: str, device: str) -> None:
    parsed = Sparsity.parse(sparsity)
    score = torch.randint(0, 50, (13, 3 * (parsed.m or 31))).float().to(device)  # many equal scores
    assert removed_mask(score, parsed, scope=scope).tolist() == brute_force(score, parsed, scope)


@given(
    rows=st.integers(1, 6),
    groups=st.integers(1, 4),
    pattern=st.integers(2, 32).flatmap(lambda m: st.tuples(st.integers(1, m - 1), st.just(m))),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=50, deadline=None)
def test_every_pattern(rows: int, groups: int, pattern: tuple[int, int], seed: int) -> None:
    n, m = pattern
    sparsity = Sparsity.parse(f"{n}:{m}")
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(0, 5, (rows, groups * m), generator=generator).float()
    removed = removed_mask(score, sparsity, scope="row")
    assert removed.tolist() == brute_force(score, sparsity, "row")
    assert bool(((~removed).reshape(rows, groups, m).sum(-1) == n).all())


@given(ratio=st.floats(0, 0.999), rows=st.integers(1, 9), columns=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_every_ratio(ratio: float, rows: int, columns: int) -> None:
    score = torch.rand(rows, columns)
    whole = removed_mask(score, Sparsity(ratio=ratio), scope="matrix")
    assert int(whole.sum()) == int(rows * columns * ratio)
    by_row = removed_mask(score, Sparsity(ratio=ratio), scope="row")
    assert bool((by_row.sum(1) == int(columns * ratio)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sparsity", ["0.5", "2:4"])
def test_magnitude(sparsity: str, dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(24, 32).to(device, dtype)
    outcome = prune_magnitude(weight, Sparsity.parse(sparsity))
    expected = torch.tensor(brute_force(weight.abs(), Sparsity.parse(sparsity), "matrix"), device=device)
    assert torch.equal(outcome.removed, expected)
    assert torch.equal(outcome.weight, weight.masked_fill(expected, 0))
    assert (outcome.damping, outcome.output_error) == (None, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sparsity", ["0.5", "2:4"])
def test_wanda(sparsity: str, dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(24, 32).to(device, dtype)
    inputs = torch.randn(50, 32, device=device) * torch.logspace(-1, 1, 32, device=device)
    inputs[:, 5] = 0
    diagonal = (inputs**2).sum(0)
    outcome = prune_wanda(weight, diagonal, Sparsity.parse(sparsity))
    score = weight.double().abs() * inputs.double().norm(dim=0)
    expected = torch.tensor(brute_force(score, Sparsity.parse(sparsity), "row"), device=device)
    # rounding to fp32 reorders scores that are almost equal
    assert (outcome.removed == expected).double().mean() > 0.995
    assert bool(outcome.removed[:, 5].all())
    assert torch.equal(outcome.weight, weight.masked_fill(outcome.removed, 0))


def test_wanda_refuses_values_that_are_not_finite() -> None:
    weight, half = torch.randn(4, 8), Sparsity.parse("0.5")
    with pytest.raises(UserError, match="hessian_diag must be finite"):
        prune_wanda(weight, torch.full((8,), torch.inf), half)
    with pytest.raises(UserError, match="weight must be finite"):
        prune_wanda(weight * torch.nan, torch.ones(8), half)


def test_magnitude_refuses_nan() -> None:
    with pytest.raises(UserError, match="weight must be finite"):
        prune_magnitude(torch.full((4, 8), torch.nan), Sparsity.parse("2:4"))
