"""The CUDA source of swiglu_rotate, run on the CPU.

The tests show that indices and barriers are right if the tensor cores arrange their operands as the PTX
manual says. They do not show that a GPU does so, nor how fast the kernels are.
"""

import ctypes

import pytest
import torch
from compiled import compiled

from drot.ops import swiglu_rotate_ref


@pytest.fixture(scope="module")
def library():
    flags = ("-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas")
    return ctypes.CDLL(str(compiled("swiglu_rotate", *flags)))


@pytest.mark.parametrize(("backwards", "early"), [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "blocks", "size", "before", "between"),
    [
        (1, 3, 64, 0, 0),
        (16, 2, 64, 0, 0),
        (17, 2, 64, 0, 0),
        (70, 1, 64, 8, 8),
        (5, 3, 16, 0, 16),
        (9, 1, 200, 0, 0),
        (33, 2, 88, 0, 8),
        (40, 1, 136, 4, 4),
        (18, 2, 64, 1, 7),
        (3, 2, 7, 0, 1),
        (20, 2, 130, 0, 0),
    ],
)
def test_values(
    library, tokens: int, blocks: int, size: int, before: int, between: int, dtype, backwards: int, early: int
) -> None:
    """Also where gate and up are parts of a wider tensor, and where vectors do not fit: unaligned, or odd."""
    width = blocks * size
    wide = torch.randn(tokens, before + 2 * width + between).to(dtype)
    gate, up = wide[:, before : before + width], wide[:, -width:]
    rotation = torch.linalg.qr(torch.randn(blocks, size, size))[0].to(dtype).contiguous()
    out = torch.full((tokens, width), torch.nan, dtype=dtype)
    sizes = (ctypes.c_int64 * 5)(gate.stride(0), up.stride(0), tokens, blocks, size)
    run = library.swiglu_bf16 if dtype == torch.bfloat16 else library.swiglu_float
    order = ctypes.c_int64(backwards), ctypes.c_int64(early)
    none = ctypes.c_void_p(None), ctypes.c_int64(0)
    run(*(ctypes.c_void_p(t.data_ptr()) for t in (gate, up, rotation, out)), sizes, *order, *none)
    # the kernel rounds the activation before the product
    gated = swiglu_rotate_ref(gate.double(), up.double()).to(dtype).double()
    assert_near(out, gated @ torch.block_diag(*rotation.double()), dtype)
    alone = torch.full_like(out, torch.nan)
    pointers = [t.data_ptr() for t in (gate, up)] + [None, alone.data_ptr()]
    whole = (ctypes.c_int64 * 5)(*sizes[:3], 1, width)  # one block as wide as a row, without a rotation
    run(*map(ctypes.c_void_p, pointers), whole, *order, *none)
    assert_near(alone, swiglu_rotate_ref(gate.double(), up.double()), dtype)


@pytest.mark.parametrize(("backwards", "early"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [64, 88, 7])
@pytest.mark.parametrize(
    "numbers",
    [(1,), (0, 1, 0, 0, 2), (16, 0, 33, 1), (0, 70, 5, 0, 0, 64, 3, 0), (1,) * 140, (0,) * 130 + (20,)],
    ids=str,
)
def test_experts(
    library, numbers: tuple[int, ...], size: int, dtype: torch.dtype, backwards: int, early: int
) -> None:
    """Each expert rotates its own rows; more experts than a block has threads, too."""
    blocks, rows, experts = 2, sum(numbers), len(numbers)
    gate, up = torch.randn(2, rows, blocks * size).to(dtype)
    rotation = torch.linalg.qr(torch.randn(experts * blocks, size, size))[0].to(dtype).contiguous()
    ends = torch.tensor(numbers).cumsum(0).int()
    out = torch.full((rows, blocks * size), torch.nan, dtype=dtype)
    sizes = (ctypes.c_int64 * 5)(blocks * size, blocks * size, rows, blocks, size)
    run = library.swiglu_bf16 if dtype == torch.bfloat16 else library.swiglu_float
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (gate, up, rotation, out, ends)]
    order = ctypes.c_int64(backwards), ctypes.c_int64(early)
    run(*pointers[:4], sizes, *order, pointers[4], ctypes.c_int64(experts))
    gated = swiglu_rotate_ref(gate.double(), up.double()).to(dtype).double()
    matrices = [torch.block_diag(*of) for of in rotation.double().unflatten(0, (experts, blocks))]
    want = torch.cat([of @ matrix for of, matrix in zip(gated.split(numbers), matrices, strict=True)])
    assert_near(out, want, dtype)


def assert_near(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    error = 2**-8 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(
        out.double(), want, rtol=error, atol=error * float(want.square().mean().sqrt())
    )
