"""column_dot against fp64: the dot products of equal columns."""

import pytest
import torch
from torch import Tensor

from drot.ops import column_dot, column_dot_ref

SHAPES = [(1, 1, 1), (1, 5, 3), (2, 64, 64), (3, 33, 65), (1, 700, 130), (2, 257, 31)]


@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: tuple[int, ...], device: str) -> None:
    a, b = torch.randn(2, *shape).to(device)
    expected = (a.double() * b.double()).sum(1)
    for dots in (column_dot(a, b), column_dot_ref(a, b)):
        assert dots.dtype == torch.float32
        torch.testing.assert_close(dots.double(), expected, rtol=0, atol=1e-5 * shape[1] ** 0.5)


def test_matrices_that_are_not_contiguous(device: str) -> None:
    a, b = torch.randn(2, 3, 40, 70).to(device)
    assert torch.equal(column_dot(a.mT, b.mT), column_dot(a.mT.contiguous(), b.mT.contiguous()))
    assert torch.equal(
        column_dot(a[:, 1::2, 3:], b[:, 1::2, 3:]), column_dot(a[:, 1::2, 3:].clone(), b[:, 1::2, 3:])
    )


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    a = torch.ones(shape, device=device)
    assert torch.equal(column_dot(a, a), torch.zeros(shape[0], shape[2], device=device))


def test_threads_do_not_change_the_bytes() -> None:
    a, b = torch.randn(2, 2, 300, 200)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(column_dot(a, b))
    torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), r"a must be \[count, rows, columns\], got \[2, 3\]"),
        (torch.zeros(1, 2, 3).half(), torch.zeros(1, 2, 3).half(), "a must be one of Float, got Half"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 3, 2), "b must have the shape of a"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3).half(), "b must have the dtype of a"),
    ],
)
def test_wrong_input(a: Tensor, b: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        column_dot(a, b)


def test_the_result_has_no_gradient(device: str) -> None:
    a = torch.randn(1, 3, 4, device=device, requires_grad=True)
    assert not column_dot(a, a).requires_grad


@pytest.mark.slow
def test_torch_accepts_the_op_and_compiles_it(device: str) -> None:
    a, b = torch.randn(2, 2, 33, 40).to(device)
    torch.library.opcheck(torch.ops.drot.column_dot.default, (a, b))
    compiled = torch.compile(lambda a, b: 2 * column_dot(a, b), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), 2 * column_dot(a, b))
