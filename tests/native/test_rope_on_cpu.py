"""The CUDA source of rope, run on the CPU (block_on_cpu.h): indices, edges, views, alignment and the launch.

The tests do not cover the arithmetic and the memory of a GPU.
"""

import ctypes

import pytest
import torch
from compiled import compiled_kernels
from torch import Tensor

from drot.ops import rope_ref

KERNELS = {torch.float32: "rope_float", torch.bfloat16: "rope_bf16", torch.float16: "rope_fp16"}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled_kernels("rope")))


def strides(t: Tensor) -> tuple[int, int, int]:
    if t.dim() == 3:
        return (t.stride(0) if t.shape[0] > 1 else 0, 0, t.stride(1))
    return t.stride()[:3]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("before", [0, 3, 8])
@pytest.mark.parametrize(
    ("b", "h", "g", "t", "d", "rows"),
    [
        (1, 32, 8, 1, 128, 1),
        (2, 3, 1, 5, 64, 2),
        (3, 9, 9, 2, 80, 1),
        (2, 70, 2, 3, 128, 2),
        (2, 2, 1, 4, 6, 1),
    ],
)
def test_values(library, b, h, g, t, d, rows, before, dtype, backwards) -> None:
    """Queries and keys are parts of one product, also where vectors do not fit: unaligned, or odd."""
    product = torch.randn(b, t, before + (h + g) * d).to(dtype)
    q, k = (
        part.unflatten(-1, (-1, d)).transpose(1, 2)
        for part in (product[..., before : before + h * d], product[..., before + h * d :])
    )
    cos, sin = (torch.randn(rows, t, d).to(dtype) for _ in range(2))
    given = (q, k, cos, sin)
    stores = [torch.full((b * t * heads * d + 128,), torch.nan, dtype=dtype) for heads in (h, g)]
    written = [store[64:-64] for store in stores]
    tensors = (ctypes.c_void_p * 6)(*(one.data_ptr() for one in (*given, *written)))
    sizes = (ctypes.c_int64 * 17)(*(s for one in given for s in strides(one)), b, t, h, g, d // 2)
    getattr(library, KERNELS[dtype])(tensors, sizes, ctypes.c_bool(backwards))
    for store in stores:  # nothing is written beside the results
        assert bool(store[:64].isnan().all()) and bool(store[-64:].isnan().all())
    for out, want in zip(written, rope_ref(*given), strict=True):
        assert torch.equal(out.view(b, t, -1, d).transpose(1, 2), want)
