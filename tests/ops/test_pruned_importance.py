"""pruned_importance against its definition, in fp64."""

import pytest
import torch
from torch import Tensor

from drot.ops import nm_mask, pruned_importance, pruned_importance_and_grad, pruned_importance_ref

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PATTERNS = [(2, 4), (4, 8), (1, 3), (16, 32), (0, 4), (4, 4), (30, 0), (0, 0)]


def exact(y: Tensor, m: Tensor | None, prune: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sum, dy and dm in fp64, of the mask of the scores as the op computes them."""
    wide = torch.promote_types(y.dtype, torch.float32)
    factor = torch.ones(y.shape[1], dtype=wide, device=y.device) if m is None else m
    removed = nm_mask(y.to(wide) * (y.to(wide) * factor), prune, group).double()
    y, factor = y.double(), factor.double()
    return (removed * y**2 * factor).sum(), removed * 2 * y * factor, (removed * y**2).sum(0)


@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize(("prune", "group"), PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradients(
    dtype: torch.dtype, prune: int, group: int, with_factor: bool, device: str
) -> None:
    width = 11 * group or 101
    y = torch.randn(37, width, device=device).to(dtype)
    y[0] = 1.0  # ties
    wide = torch.promote_types(dtype, torch.float32)
    m = (torch.rand(width, device=device).to(wide) + 0.1) if with_factor else None
    loss, dy, dm = pruned_importance_and_grad(y, m, prune=prune, group=group, scale=0.7)
    sums, expected_dy, expected_dm = exact(y, m, prune, group)
    eps, precision = torch.finfo(dtype).eps, torch.finfo(wide).eps
    assert dy.dtype == dtype and loss.dtype == dm.dtype == wide
    torch.testing.assert_close(loss.double(), 0.7 * sums, rtol=16 * precision, atol=0)
    torch.testing.assert_close(dy.double(), 0.7 * expected_dy, rtol=2 * eps, atol=0)
    if m is None:
        assert dm.shape == (0,)
    else:
        torch.testing.assert_close(dm.double(), 0.7 * expected_dm, rtol=16 * precision, atol=0)
    reference = pruned_importance_ref(y, m, prune=prune, group=group, scale=0.7)
    torch.testing.assert_close(loss, reference, rtol=64 * precision, atol=0)


def test_gradcheck(device: str) -> None:
    y = torch.randn(5, 8, device=device, dtype=torch.float64, requires_grad=True)
    m = torch.rand(8, device=device, dtype=torch.float64, requires_grad=True)
    for group in (4, 0):
        assert torch.autograd.gradcheck(lambda y, m: pruned_importance(y, m, prune=2, group=group), (y, m))  # noqa: B023


def test_opcheck(device: str) -> None:
    y = torch.randn(5, 8, device=device, requires_grad=True)
    m = torch.rand(8, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.drot.pruned_importance, (y, m), {"prune": 2, "group": 4})
    torch.library.opcheck(torch.ops.drot.pruned_importance, (y, None), {"prune": 2, "group": 0})


def test_refuses_a_second_derivative(device: str) -> None:
    y = torch.randn(5, 8, device=device, requires_grad=True)
    (dy,) = torch.autograd.grad(pruned_importance(y, prune=2, group=4), y, create_graph=True)
    with pytest.raises(NotImplementedError, match="pruned_importance is differentiable once"):
        dy.square().sum().backward()
