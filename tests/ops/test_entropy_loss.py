"""entropy_loss against its definition, in fp64."""

import pytest
import torch
from torch import Tensor

from drot.ops import entropy_loss, entropy_loss_and_grad, entropy_loss_ref

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
AXES = [{"rows": True, "columns": False}, {"rows": False, "columns": True}, {"rows": True, "columns": True}]


def problem(r: int, c: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    y = torch.randn(r, c, device=device).to(dtype)
    m = torch.rand(c, device=device).to(torch.promote_types(dtype, torch.float32)) + 0.1
    return y, m


def exact(y: Tensor, m: Tensor | None, **options: object) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss and gradients by autograd through the reference, in fp64."""
    leaves = [y.double().requires_grad_()] + ([] if m is None else [m.double().requires_grad_()])
    loss = entropy_loss_ref(*leaves, **options)
    grads = torch.autograd.grad(loss, leaves)
    return loss.detach(), grads[0], None if m is None else grads[1]


@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradients(dtype: torch.dtype, axes: dict, with_factor: bool, device: str) -> None:
    y, m = problem(37, 61, dtype, device)
    m = m if with_factor else None
    loss, dy, dm = entropy_loss_and_grad(y, m, scale=0.7, **axes)
    expected = exact(y, m, scale=0.7, **axes)
    assert dy.dtype == dtype and loss.dtype == dm.dtype == torch.promote_types(dtype, torch.float32)
    precision = torch.finfo(loss.dtype).eps
    torch.testing.assert_close(loss.double(), expected[0], rtol=8 * precision, atol=0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(dy.double(), expected[1], rtol=2 * eps, atol=16 * eps * dy.abs().max().item())
    if m is None:
        assert dm.shape == (0,)
    else:
        # Σ over a column of y²·∂H/∂s cancels, with columns=True to 0
        atol = 16 * precision * (y.double() * expected[1] / (2 * m.double())).abs().sum(0).max().item()
        torch.testing.assert_close(dm.double(), expected[2], rtol=0, atol=atol)


def test_gradcheck(device: str) -> None:
    y, m = problem(5, 6, torch.float64, device)
    for axes in AXES:
        inputs = (y.requires_grad_(), m.requires_grad_())
        assert torch.autograd.gradcheck(lambda y, m: entropy_loss(y, m, **axes), inputs)  # noqa: B023


def test_opcheck(device: str) -> None:
    y, m = problem(5, 6, torch.float32, device)
    torch.library.opcheck(torch.ops.drot.entropy_loss, (y.requires_grad_(), m.requires_grad_()))
    torch.library.opcheck(torch.ops.drot.entropy_loss, (y, None), {"columns": True})


def test_refuses_a_second_derivative(device: str) -> None:
    y, m = problem(5, 6, torch.float32, device)
    (dy,) = torch.autograd.grad(entropy_loss(y.requires_grad_(), m), y, create_graph=True)
    with pytest.raises(NotImplementedError, match="entropy_loss is differentiable once"):
        dy.square().sum().backward()
