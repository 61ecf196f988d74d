"""nm_mask against a brute force in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drot.ops import nm_mask, nm_mask_ref

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PATTERNS = [(2, 4), (4, 8), (1, 2), (1, 3), (5, 7), (8, 16), (13, 31), (16, 32), (1, 1), (0, 4), (4, 4)]


def brute_force(score: Tensor, prune: int, group: int) -> Tensor:
    rows = []
    for row in score.double().tolist():
        removed = [False] * len(row)
        for start in range(0, len(row), group or len(row)):
            members = range(start, min(start + (group or len(row)), len(row)))
            order = sorted(members, key=lambda j: (math.isnan(row[j]), row[j] if row[j] == row[j] else 0, j))
            for j in order[:prune]:
                removed[j] = True
        rows.append(removed)
    return torch.tensor(rows, device=score.device)


def scores_with_ties(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """Few distinct values of both signs, with ±0, ±inf and NaN."""
    score = torch.randint(-3, 4, (rows, columns)).to(dtype)
    score[0] = 0.0
    score[1, ::2] = -0.0
    score[2, ::3] = math.nan
    score[3, 1::3] = math.inf
    score[3, ::5] = -math.inf
    score[4] = math.nan
    return score.to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("prune", "group"), PATTERNS)
def test_groups(prune: int, group: int, dtype: torch.dtype, device: str) -> None:
    # 37 groups a row and 7 rows are not multiples of any tile
    score = scores_with_ties(7, 37 * group, dtype, device)
    removed = nm_mask(score, prune, group)
    assert removed.dtype == torch.bool
    assert torch.equal(removed, brute_force(score, prune, group))
    assert torch.equal(nm_mask_ref(score, prune, group), removed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prune", [0, 1, 500, 1032, 1033])
def test_whole_rows(prune: int, dtype: torch.dtype, device: str) -> None:
    score = torch.cat([scores_with_ties(7, 1033, dtype, "cpu"), torch.randn(5, 1033).to(dtype)]).to(device)
    assert torch.equal(nm_mask(score, prune, 0), brute_force(score, prune, 0))


def test_a_very_wide_row(device: str) -> None:
    score = torch.randint(-1000, 1000, (1, 70_001)).float()
    score[0, ::7] = -0.0
    score[0, 5::977] = math.nan
    score = score.to(device)
    assert torch.equal(nm_mask(score, 35_000, 0), brute_force(score, 35_000, 0))


@given(data=st.data(), group=st.integers(1, 32), groups=st.integers(1, 5), rows=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_any_pattern(data: st.DataObject, group: int, groups: int, rows: int) -> None:
    prune = data.draw(st.integers(0, group))
    values = st.lists(st.floats(width=32), min_size=rows * groups * group, max_size=rows * groups * group)
    score = torch.tensor(data.draw(values), dtype=torch.float32).reshape(rows, groups * group)
    removed = nm_mask(score, prune, group)
    assert torch.equal(removed, brute_force(score, prune, group))
    assert bool((removed.reshape(rows, groups, group).sum(-1) == prune).all())


def test_adjacent_numbers_are_distinguished(device: str) -> None:
    one = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    score = one.clone()
    score[2] = torch.nextafter(one[2], torch.tensor(0.0, dtype=torch.float64))
    assert nm_mask(score[None].to(device), 1, 4).tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("group", [4, 0])
def test_strided_input(group: int, device: str) -> None:
    score = torch.randn(24, 30, device=device)
    for view in (score.t()[:, :16], score[::2, 2:26:2], score[:1].expand(5, 30)[:, :12]):
        assert torch.equal(nm_mask(view, 2, group), brute_force(view, 2, group))


@pytest.mark.parametrize(("shape", "group"), [((0, 8), 4), ((5, 0), 4), ((5, 0), 0), ((0, 0), 0)])
def test_empty(shape: tuple[int, int], group: int, device: str) -> None:
    removed = nm_mask(torch.empty(shape, device=device), 0, group)
    assert removed.shape == shape
    assert removed.dtype == torch.bool


@pytest.mark.parametrize(
    ("score", "prune", "group", "message"),
    [
        (torch.ones(8), 2, 4, r"score must be \[rows, columns\], got \[8\]"),
        (torch.ones(2, 8, dtype=torch.int32), 2, 4, "score must be one of .*, got Int"),
        (torch.ones(2, 8), 2, 3, "group must divide the 8 columns, got 3"),
        (torch.ones(2, 8), 2, 33, "group must be 0 .* or 1 to 32, got 33"),
        (torch.ones(2, 8), 2, -4, "group must be 0 .* or 1 to 32, got -4"),
        (torch.ones(2, 8), 5, 4, "prune must be 0 to 4, .* got 5"),
        (torch.ones(2, 8), -1, 4, "prune must be 0 to 4, .* got -1"),
        (torch.ones(2, 8), 9, 0, "prune must be 0 to 8, .* got 9"),
    ],
)
def test_refusals(score: Tensor, prune: int, group: int, message: str, device: str) -> None:
    with pytest.raises(ValueError, match=message):
        nm_mask(score.to(device), prune, group)


def test_opcheck(device: str) -> None:
    for group in (4, 0):
        torch.library.opcheck(torch.ops.drot.nm_mask, (torch.randn(6, 8, device=device), 2, group))


@pytest.mark.slow
def test_in_a_compiled_function(device: str) -> None:
    def prune(weight: Tensor) -> Tensor:
        return torch.where(nm_mask(weight.abs(), 2, 4), 0, weight) * 2

    weight = torch.randn(16, 32, device=device)
    expected = torch.where(brute_force(weight.abs(), 2, 4), 0, weight) * 2
    torch.testing.assert_close(torch.compile(prune, fullgraph=True, backend="aot_eager")(weight), expected)


def test_the_mask_is_a_constant_to_autograd(device: str) -> None:
    weight = torch.randn(4, 8, device=device, requires_grad=True)
    torch.where(nm_mask(weight.abs(), 2, 4), 0, weight).sum().backward()
    expected = (~brute_force(weight.detach().abs(), 2, 4)).float()
    assert torch.equal(weight.grad, expected)
