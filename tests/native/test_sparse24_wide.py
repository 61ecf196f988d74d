"""The AVX-512 form of sparse24_linear's CPU kernel; pairs of AVX2 registers emulate its registers."""

import ctypes

import pytest
import torch
from compiled import compiled

from drot.ops import nm_mask_ref, pack24, sparse24_linear_ref

AVX2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")

pytestmark = pytest.mark.skipif(not AVX2, reason="no AVX2")


@pytest.fixture(scope="module")
def kernels():
    library = compiled("sparse24_wide", "-shared", "-fPIC", "-mavx2", "-mfma", "-mf16c")
    return ctypes.CDLL(str(library))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(
    ("tokens", "out", "columns"),
    [(1, 5, 24), (2, 9, 64), (3, 4, 1032), (5, 7, 40), (7, 18, 1048), (50, 33, 2072)],
)
def test_product(kernels, tokens: int, out: int, columns: int, rotate: bool, dtype: torch.dtype) -> None:
    w = torch.randn(out, columns).to(dtype)
    values, positions = pack24(w.masked_fill(nm_mask_ref(torch.rand(out, columns), 2, 4), 0))
    x = torch.randn(tokens, columns).to(dtype)
    rotation = (torch.randn(out, out) / out**0.5).to(dtype).T if rotate else None  # by columns
    y = torch.full((tokens, out), torch.nan, dtype=dtype)
    scratch = torch.full((3 * tokens * (columns + out + 16),), torch.nan)
    tensors = [None if t is None else t.data_ptr() for t in (x, values, positions, rotation, y)]
    getattr(kernels, str(dtype).removeprefix("torch."))(
        *(ctypes.c_void_p(p) for p in tensors),
        *(ctypes.c_int64(n) for n in (tokens, columns, out)),
        ctypes.c_void_p(scratch.data_ptr()),
    )
    added = (None, x[:, :out].double(), rotation.double()) if rotation is not None else ()
    want = sparse24_linear_ref(x.double(), values.double(), positions, *added)
    size = float(want.square().mean().sqrt())
    tolerance = torch.finfo(dtype).eps + 1e-6
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance * size)
