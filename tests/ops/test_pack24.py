"""pack24 and unpack24 against their references, and their round trip."""

import pytest
import torch
from torch import Tensor

from drot.ops import pack24, pack24_ref, unpack24, unpack24_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def sparse24(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """A random 2:4 matrix. Its groups hold zero to two non-zeros, at all positions."""
    w = torch.randn(rows, columns // 4, 4)
    keep = torch.rand(w.shape).argsort(-1) < torch.randint(0, 3, (*w.shape[:-1], 1))
    return (w * keep).reshape(rows, columns).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 24), (65, 136), (128, 4096)])
def test_round_trip(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    w = sparse24(*shape, dtype, device)
    values, positions = pack24(w)
    assert (values.dtype, positions.dtype) == (dtype, torch.uint8)
    assert torch.equal(unpack24(values, positions), w)
    assert torch.equal(unpack24_ref(values, positions), w)
    for got, want in zip((values, positions), pack24_ref(w), strict=True):
        assert torch.equal(got, want)


def test_layout(device: str) -> None:
    """Every pattern of one group against the documented format."""
    patterns = {
        (0, 0, 0, 0): (0, 1), (1, 0, 0, 0): (0, 1), (0, 1, 0, 0): (0, 1), (0, 0, 1, 0): (0, 2),
        (0, 0, 0, 1): (0, 3), (1, 1, 0, 0): (0, 1), (1, 0, 1, 0): (0, 2), (1, 0, 0, 1): (0, 3),
        (0, 1, 1, 0): (1, 2), (0, 1, 0, 1): (1, 3), (0, 0, 1, 1): (2, 3),
    }  # fmt: skip
    for pattern, (first, second) in patterns.items():
        group = [(i + 1.0) * on for i, on in enumerate(pattern)]
        w = torch.tensor([[*group, 0.0, 7.0, 0.0, 9.0]], device=device)
        values, positions = pack24(w)
        assert values.tolist() == [[group[first], group[second], 7.0, 9.0]]
        assert positions.item() == first | second << 2 | 1 << 4 | 3 << 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: torch.dtype, device: str) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 2
    w = torch.tensor([[0, torch.nan, 0, torch.inf, -torch.inf, 0, tiny, 0]], dtype=dtype, device=device)
    assert torch.equal(unpack24(*pack24(w)).nan_to_num(nan=5.0), w.nan_to_num(nan=5.0))
    # -0.0 is a zero: a group may hold three of them
    w = torch.tensor([[-0.0, 1, -0.0, 2, -0.0, -0.0, -0.0, 3]], dtype=dtype, device=device)
    assert torch.equal(unpack24(*pack24(w)), w)


def test_non_contiguous(device: str) -> None:
    w = sparse24(6, 32, torch.bfloat16, device)
    wide = torch.empty(6, 65, dtype=torch.bfloat16, device=device)
    wide[:, 1:33] = w
    for view in (wide[:, 1:33], w.mT.contiguous().mT, torch.cat([w[0, :1], w.flatten()])[1:].view(6, 32)):
        assert torch.equal(unpack24(*pack24(view)), w)
    values, positions = pack24(w)
    assert torch.equal(unpack24(values.mT.contiguous().mT, positions.mT.contiguous().mT), w)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_empty(shape: tuple[int, int], device: str) -> None:
    w = torch.empty(shape, device=device)
    values, positions = pack24(w)
    assert values.shape == (shape[0], shape[1] // 2)
    assert positions.shape == (shape[0], shape[1] // 8)
    assert unpack24(values, positions).shape == shape


@pytest.mark.parametrize("rows", [5, 3000])
def test_first_faulty_row_is_named(rows: int, device: str) -> None:
    w = torch.zeros(rows, 64, device=device)
    w[3, 8:11] = 1
    w[4, :4] = 1
    with pytest.raises(ValueError, match="at most 2 non-zeros in each 4 neighbours, row 3 has more"):
        pack24(w)
    values, positions = pack24(torch.zeros_like(w))
    for bad in (0b0000, 0b1010, 0b0001, 0b0110 << 4 | 0b0100):
        faulty = positions.clone()
        faulty[2, 5] = bad
        faulty[4, 0] = 0
        with pytest.raises(ValueError, match="positions must ascend .*; in row 2 they do not"):
            unpack24(values, faulty)


def test_wrong_input(device: str) -> None:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    with pytest.raises(ValueError, match=r"w must be \[rows, columns\], got \[8\]"):
        pack24(zeros(8))
    with pytest.raises(ValueError, match=r"w must have a multiple of 8 columns, got \[2, 12\]"):
        pack24(zeros(2, 12))
    with pytest.raises(ValueError, match="w must be one of BFloat16, Half, Float, got Double"):
        pack24(zeros(2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="positions must be one of Byte, got Int"):
        unpack24(zeros(2, 4), zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"positions must be \[2, 1\], got \[2, 2\]"):
        unpack24(zeros(2, 4), zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"values must have a multiple of 4 columns, got \[2, 6\]"):
        unpack24(zeros(2, 6), zeros(2, 1, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype, device: str) -> None:
    w = sparse24(5, 40, dtype, device)
    torch.library.opcheck(torch.ops.drot.pack24.default, (w,))
    torch.library.opcheck(torch.ops.drot.unpack24.default, pack24(w))


def test_compile(device: str) -> None:
    w = sparse24(8, 64, torch.float32, device)
    x = torch.randn(3, 64, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def product(x: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        return x @ unpack24(values, positions).mT

    torch.testing.assert_close(product(x, *pack24(w)), x @ w.mT)


def test_backward_is_refused(device: str) -> None:
    weight = sparse24(8, 16, torch.float32, device)
    values, positions = pack24(weight)
    for result in (pack24(weight.requires_grad_())[0], unpack24(values.requires_grad_(), positions)):
        with pytest.raises(RuntimeError, match="derivative for drot::.*pack24 is not implemented"):
            result.sum().backward()
