"""SparseGPT against Optimal Brain Surgeon in fp64, which inverts the Hessian again for each column."""

from collections.abc import Iterator

import pytest
import torch
from counted_flops import counted_flops
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drot.calibration.hessian import InputHessian, factorize
from drot.config import Sparsity
from drot.core.errors import UserError
from drot.pruning import output_error, prune_sparsegpt

DAMPING = 0.01


def problem(rows: int, columns: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Weight [rows, columns], calibration inputs X and H = XᵀX / samples, fp64."""
    x = torch.randn(2 * columns, columns, dtype=torch.float64)
    x = x @ torch.randn(columns, columns, dtype=torch.float64) / columns**0.5
    weight = torch.randn(rows, columns, dtype=torch.float64)
    return weight.to(device), x.to(device), (x.T @ x / len(x)).to(device)


def damped(hessian: Tensor, share: float) -> Tensor:
    return hessian + share * hessian.diagonal().mean() * torch.eye(
        len(hessian), dtype=hessian.dtype, device=hessian.device
    )


def optimal_brain_surgeon(weight: Tensor, hessian: Tensor, removed: Tensor) -> Tensor:
    """Removes weights column by column; each time the columns to the right compensate the error optimally."""
    w = weight.clone()
    for j in range(w.shape[1]):
        inverse = torch.linalg.inv(hessian[j:, j:])
        gone = torch.where(removed[:, j], w[:, j], 0)
        w[:, j:] -= torch.outer(gone / inverse[0, 0], inverse[0])
        w[:, j][removed[:, j]] = 0
    return w


def prune(weight: Tensor, hessian: Tensor, sparsity: str, block_size: int = 128, damping: float = DAMPING):
    of_input = InputHessian(hessian, damping)
    return prune_sparsegpt(weight, of_input, Sparsity.parse(sparsity), block_size=block_size)


@pytest.mark.parametrize("block_size", [12, 24, 60, 128])
@pytest.mark.parametrize("sparsity", ["0.5", "0.8", "2:4", "4:6", "1:3"])
def test_weights_are_those_of_optimal_brain_surgeon(sparsity: str, block_size: int, device: str) -> None:
    weight, _, hessian = problem(20, 60, device)
    outcome = prune(weight, hessian, sparsity, block_size)
    expected = optimal_brain_surgeon(weight, damped(hessian, DAMPING), outcome.removed)
    torch.testing.assert_close(outcome.weight, expected, rtol=1e-9, atol=1e-9)
    assert bool((outcome.weight[outcome.removed] == 0).all())
    assert outcome.damping == DAMPING


def test_ratio_removes_the_smallest_scores_of_each_block(device: str) -> None:
    weight, _, hessian = problem(20, 60, device)
    outcome = prune(weight, hessian, "0.3", block_size=24)
    # 0.3 · 20 · 24 = 144 weights of each full block, 0.3 · 20 · 12 = 72 of the last block
    assert [int(part.sum()) for part in outcome.removed.split(24, dim=1)] == [144, 144, 72]
    full = damped(hessian, DAMPING)
    for start in range(0, 60, 24):
        stop = min(start + 24, 60)
        removed_earlier = torch.zeros_like(outcome.removed)
        removed_earlier[:, :start] = outcome.removed[:, :start]
        updated = optimal_brain_surgeon(weight, full, removed_earlier)[:, start:stop]
        inverse_diagonal = torch.stack([torch.linalg.inv(full[j:, j:])[0, 0] for j in range(start, stop)])
        score = updated**2 / inverse_diagonal
        removed = outcome.removed[:, start:stop]
        assert score[removed].max() < score[~removed].min()


@pytest.mark.parametrize("sparsity", ["2:4", "3:5"])
def test_pattern_is_chosen_from_updated_weights(sparsity: str) -> None:
    weight, _, hessian = problem(16, 40)
    parsed, full = Sparsity.parse(sparsity), damped(hessian, DAMPING)
    removed = prune(weight, hessian, sparsity, block_size=20).removed
    for start in range(0, 40, parsed.m):
        removed_earlier = torch.zeros_like(removed)
        removed_earlier[:, :start] = removed[:, :start]
        updated = optimal_brain_surgeon(weight, full, removed_earlier)
        columns = range(start, start + parsed.m)
        inverse_diagonal = torch.stack([torch.linalg.inv(full[j:, j:])[0, 0] for j in columns])
        score = updated[:, start : start + parsed.m] ** 2 / inverse_diagonal
        order = score.argsort(dim=1)[:, : parsed.m - parsed.n]
        expected = torch.zeros_like(score, dtype=torch.bool).scatter_(1, order, True)
        assert torch.equal(removed[:, start : start + parsed.m], expected)


def test_pattern_does_not_depend_on_the_block() -> None:
    weight, _, hessian = problem(24, 96)
    single_block = prune(weight, hessian, "2:4", block_size=1000)
    for block_size in (4, 32, 96):
        outcome = prune(weight, hessian, "2:4", block_size=block_size)
        assert torch.equal(outcome.removed, single_block.removed)
        torch.testing.assert_close(outcome.weight, single_block.weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sparsity", ["0.5", "2:4"])
def test_fp32_is_close_to_fp64(sparsity: str, dtype: torch.dtype, device: str) -> None:
    weight, _, hessian = problem(48, 160, device)
    weight = weight.to(dtype)
    outcome = prune(weight, hessian.float(), sparsity)
    exact = prune(weight.double(), hessian, sparsity)
    assert outcome.weight.dtype == dtype
    assert (outcome.removed == exact.removed).double().mean() > 0.995
    assert outcome.output_error == pytest.approx(exact.output_error, rel=0.02)
    expected = optimal_brain_surgeon(weight.double(), damped(hessian, DAMPING), outcome.removed)
    rounding = 2 * torch.finfo(dtype).eps
    update = 5e-3 if device == "cuda" else 1e-3  # factors in TF32
    torch.testing.assert_close(outcome.weight.double(), expected, rtol=max(rounding, update), atol=update)


@pytest.mark.parametrize("sparsity", ["2:4", "4:8", "1:4", "0.5", "0.25", "0.9"])
def test_the_update_lowers_the_output_error(sparsity: str) -> None:
    weight, _, hessian = problem(64, 64)
    outcome = prune(weight, hessian, sparsity)
    without = output_error(weight, weight.masked_fill(outcome.removed, 0), hessian)
    assert outcome.output_error < without


@given(
    sparsity=st.sampled_from(["2:4", "4:8", "1:4", "0.5", "0.25", "0.9"]),
    rows=st.integers(1, 12),
    groups=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_output_error_is_not_below_least_squares(sparsity: str, rows: int, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight, _, hessian = problem(rows, 8 * groups)
    full = damped(hessian, DAMPING)
    outcome = prune(weight, hessian, sparsity, block_size=16)
    best = torch.zeros_like(weight)
    for i, kept in enumerate(~outcome.removed):
        best[i, kept] = torch.linalg.solve(full[kept][:, kept], full[kept] @ weight[i])
    assert output_error(weight, outcome.weight, full) >= output_error(weight, best, full) - 1e-12


def test_output_error_is_measured_on_the_outputs(device: str) -> None:
    weight, x, hessian = problem(12, 32, device)
    outcome = prune(weight, hessian, "2:4")
    dense, pruned = x @ weight.T, x @ outcome.weight.T
    expected = float((dense - pruned).norm() ** 2 / dense.norm() ** 2)
    assert outcome.output_error == pytest.approx(expected, rel=1e-9)
    assert output_error(weight, weight, hessian) == 0.0
    assert output_error(0 * weight, 0 * weight, hessian) == 0.0


@pytest.mark.parametrize("sparsity", ["0.25", "2:4"])
def test_dead_columns_become_zero_and_do_not_affect_the_others(sparsity: str) -> None:
    weight, x, _ = problem(12, 32)
    dead_columns = [3, 8, 9, 10, 11, 31]
    x[:, dead_columns] = 0
    hessian = x.T @ x
    before = hessian.clone()
    outcome = prune(weight, hessian, sparsity)
    assert torch.equal(hessian, before)
    assert bool((outcome.weight[:, dead_columns] == 0).all())
    assert bool(torch.isfinite(outcome.weight).all())
    fixed = hessian.clone()
    fixed[dead_columns, dead_columns] = 1
    start = weight.clone()
    start[:, dead_columns] = 0
    expected = optimal_brain_surgeon(start, damped(fixed, DAMPING), outcome.removed)
    torch.testing.assert_close(outcome.weight, expected, rtol=1e-9, atol=1e-9)


def test_hinv_is_the_cholesky_factor_of_the_inverse() -> None:
    _, _, hessian = problem(1, 40)
    factor = factorize(hessian, 0.02)
    hinv = factor.hinv
    assert factor.damping == 0.02 and not factor.dead_columns.any()
    torch.testing.assert_close(factor.inverse_diagonal, torch.linalg.inv(damped(hessian, 0.02)).diagonal())
    assert bool((hinv.tril(-1) == 0).all())
    assert bool((hinv.diagonal() > 0).all())
    expected = torch.linalg.inv(damped(hessian, 0.02))
    torch.testing.assert_close(hinv.T @ hinv, expected, rtol=1e-9, atol=1e-12)


def test_a_failed_factorisation_raises_the_damping_in_the_result() -> None:
    weight, _, _ = problem(8, 32)
    x = torch.randn(4, 32)  # rank 4 of 32: singular
    hessian = x.T @ x
    outcome = prune(weight.float(), hessian, "2:4", damping=0.0)
    assert outcome.damping is not None
    assert outcome.damping > 0
    assert bool(torch.isfinite(outcome.weight).all())
    asked = prune(weight.float(), hessian, "2:4", damping=outcome.damping)
    assert asked.damping == outcome.damping
    assert torch.equal(asked.weight, outcome.weight)


def test_an_indefinite_hessian_needs_more_damping_up_to_the_bound() -> None:
    weight, _, hessian = problem(8, 32)
    values, vectors = torch.linalg.eigh(hessian)
    mean = hessian.diagonal().mean()
    values[0] = -0.05 * mean  # the first damping, 0.01, leaves it below 0; the second, 0.1, does not
    slightly = (vectors * values) @ vectors.T
    assert prune(weight, slightly, "2:4").damping == pytest.approx(0.1)
    values[0] = -50 * mean
    values[-1] += 60 * mean  # keeps the mean diagonal above 0
    with pytest.raises(UserError, match="no Cholesky factor even with a damping of 1"):
        prune(weight, (vectors * values) @ vectors.T, "2:4")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_refuses_values_that_are_not_finite(bad: float) -> None:
    weight, _, hessian = problem(4, 8)
    broken = hessian.clone()
    broken[2, 2] = bad
    with pytest.raises(UserError, match="hessian must be finite"):
        prune(weight, broken, "2:4")
    weight[1, 1] = bad
    with pytest.raises(UserError, match="weight must be finite"):
        prune(weight, hessian, "2:4")


@pytest.mark.parametrize("sparsity", ["2:4", "0.5"])
@pytest.mark.parametrize("damping", [0.0, 0.01, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_the_output_error_of_the_sweep_is_without_damping(sparsity, damping, dtype, tolerance, device):
    """With dead columns, whose weights become 0 without an error, against products with X in fp64."""
    weight, x, _ = problem(24, 64)
    x[:, [0, 5, 40]] = 0
    hessian = (x.T @ x).to(device, dtype)
    outcome = prune(weight.to(device, dtype), hessian, sparsity, 16, damping)
    dense, pruned = x @ weight.T, x @ outcome.weight.cpu().double().T
    assert outcome.output_error == pytest.approx(
        float((dense - pruned).norm() ** 2 / dense.norm() ** 2), rel=tolerance
    )
    assert outcome.energy == pytest.approx(float(dense.norm() ** 2), rel=tolerance)


def test_a_given_factor_and_energy_change_nothing() -> None:
    """And save their products: what remains is the update of the columns right of each block."""
    weight, _, hessian = problem(24, 64)
    alone = prune(weight, hessian, "2:4", 16)
    of_input, shared = InputHessian(hessian, DAMPING), []
    _ = of_input.factor

    def work() -> None:
        pattern = Sparsity.parse("2:4")
        shared.append(prune_sparsegpt(weight, of_input, pattern, block_size=16, total=alone.energy))

    assert counted_flops(work) == sum(2 * 24 * 16 * right for right in (48, 32, 16))
    assert torch.equal(shared[0].weight, alone.weight) and shared[0].damping == DAMPING
    assert shared[0].output_error == alone.output_error


@pytest.fixture
def exact_products() -> Iterator[None]:
    """The caller's setting of fp32 products: no rounding of their factors."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "ieee"
    yield
    products.fp32_precision = before


def test_the_update_is_in_tf32_and_the_callers_setting_comes_back(exact_products, monkeypatch) -> None:
    products, seen = torch.backends.cuda.matmul, []
    weight, _, hessian = problem(8, 32)
    of_input, real = InputHessian(hessian, 0.01), Tensor.addmm_
    _ = of_input.factor
    monkeypatch.setattr(
        Tensor,
        "addmm_",
        lambda *args, **options: seen.append(products.fp32_precision) or real(*args, **options),
    )
    prune_sparsegpt(weight, of_input, Sparsity.parse("2:4"), block_size=16, total=1.0)
    assert seen == ["tf32", "tf32"] and products.fp32_precision == "ieee"


def test_factors_rounded_to_ten_bits_keep_the_masks_and_the_error(monkeypatch) -> None:
    """What TF32 does on a GPU, emulated, for blocks that are updated 15 times."""
    weight, _, hessian = problem(64, 240)
    weight, hessian = weight.float(), hessian.float()
    exact = prune(weight, hessian, "2:4", 16)

    def rounded(x: Tensor) -> Tensor:
        bits = (x.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)
        return bits.view(torch.float32)

    real = Tensor.addmm_
    of_input, calls = InputHessian(hessian, DAMPING), []
    _ = of_input.factor

    def emulated(self: Tensor, a: Tensor, b: Tensor, **options: float) -> Tensor:
        calls.append(a.shape)
        return real(self, rounded(a), rounded(b), **options)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "addmm_", emulated)
        pattern = Sparsity.parse("2:4")
        found = prune_sparsegpt(weight, of_input, pattern, block_size=16, total=exact.energy)
    assert len(calls) == 15
    assert 0 < float((found.weight - exact.weight).abs().max()) < 2
    assert float((found.removed == exact.removed).float().mean()) >= 0.999
    ratio = output_error(weight, found.weight, hessian) / output_error(weight, exact.weight, hessian)
    assert ratio == pytest.approx(1, abs=1e-3)
