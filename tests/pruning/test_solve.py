"""The solvers of the kept weights, against a least-squares solution of each row in fp64."""

import pytest
import torch
from torch import Tensor

from drot.calibration.hessian import InputHessian
from drot.config import PruningConfig, Sparsity
from drot.core.errors import UserError
from drot.pruning import (
    PruneOutcome,
    prune_magnitude,
    prune_once,
    prune_sparsegpt,
    prune_wanda,
    solve_kept_weights,
    solve_weights,
)
from drot.pruning.result import output_error
from drot.pruning.shifted_inverse import ShiftedInverse
from drot.pruning.solve import (
    ADMM_INTERVAL,
    PCG_ITERATIONS,
    _admm,
    _conjugate_gradients,
    _Parts,
)

DAMPING = 0.01


def problem(rows: int, columns: int, device: str = "cpu", dtype: torch.dtype = torch.float64):
    """Weight [rows, columns] and H = XᵀX / samples of inputs X with unequal scales."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(3 * columns, columns, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    x = x * torch.logspace(-1, 1, columns, dtype=torch.float64)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight.to(device, dtype), (x.T @ x / len(x)).to(device, dtype)


def damped(hessian: Tensor) -> Tensor:
    return hessian + DAMPING * hessian.diagonal().mean() * torch.eye(
        len(hessian), dtype=hessian.dtype, device=hessian.device
    )


def errors(weight: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """E of each row, in fp64."""
    change = weight.double() - target.double()
    return ((change @ damped(hessian.double())) * change).sum(1)


def exact(target: Tensor, hessian: Tensor, removed: Tensor) -> Tensor:
    """The minimum of E for each row: H_kk ŵ_k = (H t)_k, for the kept columns k, solved row by row."""
    matrix, out = damped(hessian), torch.zeros_like(target)
    for row in range(len(target)):
        kept = (~removed[row]).nonzero()[:, 0]
        right = (matrix @ target[row])[kept]
        out[row, kept] = torch.linalg.solve(matrix[kept][:, kept], right)
    return out


def outcomes(weight: Tensor, hessian: Tensor, sparsity: str) -> dict[str, PruneOutcome]:
    parsed = Sparsity.parse(sparsity)
    return {
        "sparsegpt": prune_sparsegpt(weight, InputHessian(hessian, DAMPING), parsed, block_size=24),
        "wanda": prune_wanda(weight, hessian.diagonal(), parsed),
        "magnitude": prune_magnitude(weight, parsed),
    }


def solve(outcome: PruneOutcome, target: Tensor, hessian: Tensor, solver: str, sparsity: str = "2:4"):
    (found,) = solve_kept_weights(
        [outcome], [target], InputHessian(hessian, DAMPING), [Sparsity.parse(sparsity)], solver=solver
    )
    return found


@pytest.mark.parametrize("sparsity", ["2:4", "4:8", "0.5", "0.8"])
@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_pcg_finds_the_minimum_of_each_row(method, sparsity, device, monkeypatch):
    monkeypatch.setattr("drot.pruning.solve.PCG_ITERATIONS", 200)
    weight, hessian = problem(16, 48, device)
    start = outcomes(weight, hessian, sparsity)[method]
    solved = solve(start, weight, hessian, "pcg", sparsity)
    torch.testing.assert_close(solved.weight, exact(weight, hessian, start.removed), rtol=1e-8, atol=1e-8)
    assert torch.equal(solved.removed, start.removed)


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_the_default_iterations_come_near_the_minimum(method, device):
    """In fp32, with the number of iterations that a run takes."""
    weight, hessian = problem(32, 64, device, torch.float32)
    start = outcomes(weight, hessian, "2:4")[method]
    least = errors(exact(weight.double(), hessian.double(), start.removed), weight, hessian).sum()
    solved = errors(solve(start, weight, hessian, "pcg").weight, weight, hessian).sum()
    assert least <= solved < 1.02 * least
    assert solved < 0.9 * errors(start.weight, weight, hessian).sum()


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_products_in_bfloat16_come_as_near(method):
    """What a GPU computes: products in bf16, sums in fp32."""
    weight, hessian = problem(32, 64, "cpu", torch.float32)
    scale = damped(hessian).diagonal().sqrt()
    scaled = damped(hessian) / scale / scale[:, None]
    start = outcomes(weight, hessian, "2:4")[method]
    least = errors(exact(weight.double(), hessian.double(), start.removed), weight, hessian).sum()
    found = _conjugate_gradients(
        start.weight * scale, weight * scale, scaled, ~start.removed, torch.bfloat16, PCG_ITERATIONS
    )
    assert least <= errors(found / scale, weight, hessian).sum() < 1.03 * least


@pytest.mark.parametrize("sparsity", ["2:4", "4:8", "1:4", "0.5"])
@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_admm_is_never_above_its_start_and_keeps_the_pattern(method, sparsity, dtype, device):
    weight, hessian = problem(24, 64, device, dtype)
    parsed = Sparsity.parse(sparsity)
    start = outcomes(weight, hessian, sparsity)[method]
    pcg, admm = (solve(start, weight, hessian, solver, sparsity) for solver in ("pcg", "admm"))
    before, fixed, moved = (errors(found.weight, weight, hessian) for found in (start, pcg, admm))
    assert float(moved.sum()) <= float(fixed.sum()) * (1 + 1e-5) <= float(before.sum()) * (1 + 2e-5)
    if parsed.structured:
        assert bool((moved <= before * (1 + 1e-5)).all())
        removed = admm.removed.unflatten(1, (-1, parsed.m)).sum(-1)
        assert bool((removed == parsed.m - parsed.n).all())
    else:
        assert int(admm.removed.sum()) == int(24 * 64 * parsed.ratio)
    assert bool((admm.weight[admm.removed] == 0).all())


def test_admm_moves_the_mask_and_gains_by_it(device):
    weight, hessian = problem(48, 96, device, torch.float32)
    start = outcomes(weight, hessian, "2:4")["magnitude"]
    pcg, admm = (solve(start, weight, hessian, solver) for solver in ("pcg", "admm"))
    assert not torch.equal(admm.removed, start.removed)
    gain = errors(admm.weight, weight, hessian).sum() / errors(pcg.weight, weight, hessian).sum()
    assert float(gain) < 0.95


def test_the_linears_of_a_group_share_their_inverses(device, monkeypatch):
    """As many inverses as ADMM takes for one linear, and each of its own pattern and no worse than before.

    On a GPU the first inverse gives the later ones by products in 16 bits.
    """
    weight, hessian = problem(48, 96, device, torch.float32)
    weights, patterns = weight.split([8, 16, 24]), ("2:4", "0.5", "4:8")
    sparsities = [Sparsity.parse(pattern) for pattern in patterns]
    inverses = []
    real = ShiftedInverse._inverse
    monkeypatch.setattr(ShiftedInverse, "_inverse", lambda self: inverses.append(self) or real(self))
    starts = [prune_wanda(w, hessian.diagonal(), s) for w, s in zip(weights, sparsities, strict=True)]
    found = solve_kept_weights(starts, weights, InputHessian(hessian, DAMPING), sparsities, solver="admm")
    (iterations,) = {outcome.admm_iterations for outcome in found}
    grown = 0 if device == "cuda" else iterations // ADMM_INTERVAL
    assert len(inverses) in (grown, grown + 1) and inverses
    for outcome, start, target, sparsity in zip(found, starts, weights, sparsities, strict=True):
        assert int(outcome.removed.sum()) == int(start.removed.sum())
        if sparsity.structured:
            removed = outcome.removed.unflatten(1, (-1, sparsity.m)).sum(-1)
            assert bool((removed == sparsity.m - sparsity.n).all())
        after, before = (errors(found.weight, target, hessian).sum() for found in (outcome, start))
        assert float(after) < 0.9 * float(before)
        assert outcome.output_error == pytest.approx(
            output_error(target.double(), outcome.weight.double(), hessian.double()), rel=1e-3
        )


def test_iterations_of_admm_in_bfloat16_end_as_low(monkeypatch):
    """What a GPU computes, on inputs with a common part, whose eigenvalue is a third of all."""
    weight, hessian = problem(48, 96, "cpu", torch.float32)
    hessian += 0.5 * torch.outer(hessian.diagonal().sqrt(), hessian.diagonal().sqrt())
    scale = damped(hessian).diagonal().sqrt()
    scaled, wanted = damped(hessian) / scale / scale[:, None], weight * scale
    start, parts = outcomes(weight, hessian, "2:4")["sparsegpt"], _Parts([48], [Sparsity.parse("2:4")])
    left = {}
    for products in (torch.float32, torch.bfloat16):
        found, removed, _ = _admm(start.weight * scale, start.removed, wanted, scaled, parts, products)
        left[products] = errors(exact(weight.double(), hessian.double(), removed), weight, hessian).sum()
        assert bool((found[removed] == 0).all())
    assert float(left[torch.bfloat16]) < 1.02 * float(left[torch.float32])


def test_the_error_is_that_of_the_target(device):
    """A target other than the dense weight: the solution is nearest to the target."""
    weight, hessian = problem(16, 48, device)
    target = weight + 0.3 * torch.randn(16, 48, dtype=weight.dtype).to(device)
    start = outcomes(weight, hessian, "2:4")["wanda"]
    solved = solve(start, target, hessian, "pcg")
    assert bool((errors(solved.weight, target, hessian) < errors(start.weight, target, hessian)).all())
    change = solved.weight - target
    expected = ((change @ hessian) * change).sum() / ((target @ hessian) * target).sum()
    assert solved.output_error == pytest.approx(float(expected), rel=1e-6)


def test_an_input_that_is_always_zero(device):
    weight, hessian = problem(8, 16, device)
    hessian[3], hessian[:, 3] = 0, 0
    start = outcomes(weight, hessian, "2:4")["sparsegpt"]
    for solver in ("pcg", "admm"):
        solved = solve(start, weight, hessian, solver)
        assert bool(torch.isfinite(solved.weight).all())
        assert float(errors(solved.weight, weight, hessian).sum()) <= float(
            errors(start.weight, weight, hessian).sum()
        )


def test_bfloat16_weights_keep_dtype_and_mask(device):
    weight, hessian = problem(16, 48, device, torch.float32)
    weight = weight.bfloat16()
    start = outcomes(weight, hessian, "2:4")["sparsegpt"]
    solved = solve(start, weight, hessian, "admm")
    assert solved.weight.dtype == torch.bfloat16
    assert bool((solved.weight[solved.removed] == 0).all())
    assert float(errors(solved.weight, weight, hessian).sum()) < float(
        errors(start.weight, weight, hessian).sum()
    )


@pytest.mark.parametrize("method", ["wanda", "magnitude"])
def test_sparsegpts_sweep_on_another_methods_mask(method, device):
    """Each row's error is between that of the method and the minimum on the same mask."""
    weight, hessian = problem(16, 48, device)
    start = outcomes(weight, hessian, "2:4")[method]
    given, config = InputHessian(hessian, DAMPING), PruningConfig(method=method)
    (swept,) = solve_weights([prune_once(weight, given, config)], [weight], given, [config], "sparsegpt")
    assert torch.equal(swept.removed, start.removed)
    least = errors(exact(weight, hessian, start.removed), weight, hessian)
    assert bool((errors(swept.weight, weight, hessian) >= least * (1 - 1e-9)).all())
    assert float(errors(swept.weight, weight, hessian).sum()) < float(
        errors(start.weight, weight, hessian).sum()
    )


def test_a_hessian_that_is_not_finite_is_refused():
    weight, hessian = problem(8, 16)
    start = outcomes(weight, hessian, "2:4")["wanda"]
    with pytest.raises(UserError, match="hessian must be finite"):
        solve(start, weight, hessian * float("nan"), "pcg")
