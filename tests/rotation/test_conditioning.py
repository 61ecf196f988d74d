"""Ill-conditioned Hessians with outlier channels, in bf16 against fp64: q = diag(RᵀMR) stays positive."""

import pytest
import test_objective
import torch
from test_objective import build, make_layer
from torch import Tensor

from drot.config import Recipe, resolve
from drot.rotation import optimizers
from drot.rotation.importance import RESOLUTION, ColumnScales, Metric, upper_factor
from drot.rotation.train import train_rotation

N = 256


def config(**fields):
    return resolve(Recipe().replace(**fields)).rotation


def hessian(n: int, condition: float, seed: int = 0) -> Tensor:
    """H [n, n] in fp64 with eigenvalues from 1 to 1/condition, and a few channels 30 times as large."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    channels = torch.ones(n, dtype=torch.float64)
    channels[: max(1, n // 64)] = 30
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)
    return (basis * values) @ basis.T * channels[:, None] * channels


def rotations(matrix: Tensor) -> dict[str, Tensor]:
    """A random R, and an R near to the eigenvectors of M, where q is as small as it can be."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(*matrix.shape, generator=generator, dtype=torch.float64)
    near = torch.linalg.eigh(matrix)[1] @ torch.matrix_exp(1e-3 * (noise - noise.T))
    return {"random": torch.linalg.qr(noise)[0].float(), "eigenvectors": near.float()}


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("condition", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("where", ["random", "eigenvectors"])
def test_q_and_its_gradient_in_bf16(where: str, condition: float, inverse: bool, device: str) -> None:
    matrix = hessian(N, condition)
    matrix = torch.linalg.inv(matrix) if inverse else matrix
    matrix = (matrix / matrix.diagonal().mean()).float()
    r = rotations(matrix.double())[where]
    exact = matrix.double() @ r.double()
    q = (r.double() * exact).sum(0)
    metric = Metric(matrix[None].to(device), inverse).rounded(torch.bfloat16)
    blocks = r[None].to(device)
    scales = ColumnScales(metric, blocks, blocks.bfloat16())
    value = scales.of_inputs(slice(1))
    assert value is not None
    found = value.double().cpu()
    found = 1 / found if inverse else found
    assert float(found.min()) > 0
    assert float((found / q - 1).abs().max()) < 0.2
    # the loss Σ log column_scale weighs all columns alike
    gradient = torch.zeros_like(blocks)
    scales.add_gradient(gradient, [1 / value])
    expected = (-1 if inverse else 1) * 2 * exact / q
    assert float((gradient[0].double().cpu() - expected).norm() / expected.norm()) < 0.1
    if inverse and where == "eigenvectors" and condition >= 1e6:  # M in 16 bits gives a q below 0
        rounded = matrix.bfloat16().float() @ r.bfloat16().float()
        assert float((r * rounded).sum(0).min()) < 0


@pytest.mark.parametrize("rank", [0, 1, 100, N])
def test_the_factor_of_a_singular_matrix(rank: int) -> None:
    """M = X Xᵀ of a rank below N is met to the resolution; of full rank exactly."""
    x = torch.randn(N, rank, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = torch.linalg.qr(x)[0] if rank == N else x
    matrix = x @ x.T
    factor = upper_factor(matrix)
    assert torch.equal(factor, factor.triu()) and float(factor.diagonal().min()) > 0
    added = 0.0 if rank == N else RESOLUTION * (float(matrix.diagonal().max()) or 1.0)
    error = factor.T @ factor - matrix - added * torch.eye(N, dtype=torch.float64)
    assert float(error.abs().max()) < 1e-12 * max(rank, 1)


def test_q_below_the_resolution_stays_positive(device: str) -> None:
    """M = 1 - vvᵀ, which is singular, and a column of R that is v: q is 0."""
    v = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
    matrix = torch.eye(N, dtype=torch.float64) - v[:, :1] @ v[:, :1].T
    metric = Metric(matrix[None].float().to(device), True).rounded(torch.bfloat16)
    blocks = v[None].float().to(device)
    value = ColumnScales(metric, blocks, blocks.bfloat16()).of_inputs(slice(1))
    assert value is not None and bool((value > 0).all()) and bool(value.isfinite().all())
    assert float(value.max()) <= 1 / (0.1 * RESOLUTION)


@pytest.mark.parametrize("arithmetic", ["plain", "tensor cores"])
@pytest.mark.parametrize("objective", ["entropy", "pruned"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_training_in_bf16_on_an_ill_conditioned_layer(
    method: str, objective: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 steps end without NaN, at the fp64 loss. For `pruned` it falls nearly as far as by steps in fp32.

    The entropy of so small and so ill-conditioned a layer has many valleys: steps in fp32 may end in none.
    """
    monkeypatch.setattr(test_objective, "DAMPING", 1e-9)
    if arithmetic == "tensor cores":
        monkeypatch.setattr(optimizers, "on_tensor_cores", lambda x: x.dtype == torch.float32)
    weights, hessians = make_layer()
    hessians = {group: hessian(len(h), 1e7) for group, h in hessians.items()}
    exact = build(weights, hessians, method, objective, "2:4", False, product_dtype=torch.float64)
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        problem = build(weights, hessians, method, objective, "2:4", False, product_dtype=dtype)
        (rotation,), record = train_rotation([problem], config(steps=50, early_stop=0.0))
        assert torch.tensor(record["loss_curve"]).isfinite().all()
        losses[dtype] = float(exact.value(rotation.r1[None], rotation.r2))
        assert record["loss_after"] == pytest.approx(losses[dtype], rel=5e-3)
    before = float(exact.value(*exact.identity()))
    gain, gain_in_fp32 = (before - losses[dtype] for dtype in (torch.bfloat16, torch.float32))
    assert gain > -1e-3 * before
    if objective == "pruned":
        assert gain > 0.6 * gain_in_fp32
