"""The CUDA kernels of column_scale, column_scale_backward and turn_start, run on a CPU (block_on_cpu.h).

Their results are compared with fp64. The tests cover indices, edges, barriers, alignment and the launch code,
in both orders of the threads. They do not cover the arithmetic and the memory of a GPU.
"""

import ctypes
import mmap

import pytest
import torch
from compiled import compiled_kernels
from torch import Tensor

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
HALF_ULP = 2**-8 * (1 + 1e-4)  # of bf16, and of the fp32 arithmetic before it
SHAPES = [(1, 1, 1), (2, 3, 8), (3, 5, 7), (2, 64, 128), (2, 65, 136), (1, 520, 40), (2, 0, 5), (1, 130, 259)]


class Kernels:
    """The kernels, for contiguous tensors; results lie between NaNs, and nothing may be written there."""

    def __init__(self, library: ctypes.CDLL, backwards: bool) -> None:
        self._library, self._backwards = library, backwards

    def __call__(
        self,
        name: str,
        given: list[Tensor],
        results: list[Tensor],
        *further: int,
        inverse: bool | None = None,
    ) -> list[Tensor]:
        padded = [torch.full((t.numel() + 128,), torch.nan, dtype=t.dtype) for t in results]
        written = [store[64:-64] for store in padded]
        call = getattr(self._library, name)
        call.restype = ctypes.c_char_p
        complaint = call(
            self._backwards,
            *(ctypes.c_void_p(t.data_ptr()) for t in (*given, *written)),
            *map(ctypes.c_int64, further),
            *([] if inverse is None else [inverse]),
        )
        assert complaint == b"", complaint
        assert all(store[:64].isnan().all() and store[-64:].isnan().all() for store in padded)
        return [t.view(result.shape) for t, result in zip(written, results, strict=True)]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    path = compiled_kernels("step_kernels_on_cpu")
    return ctypes.CDLL(str(path))


@pytest.fixture(params=[False, True], ids=["upwards", "backwards"])
def kernels(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Kernels:
    return Kernels(library, request.param)


def between_nans(t: Tensor, aligned: bool = True) -> Tensor:
    """t between NaNs, aligned to 16 bytes or not: a kernel that reads beside it returns NaN."""
    start = 64 if aligned else 65
    store = torch.full((t.numel() + 129,), torch.nan, dtype=t.dtype)
    placed = store[start : start + t.numel()].view(t.shape).copy_(t)
    assert t.numel() == 0 or (placed.data_ptr() % 16 == 0) == aligned
    return placed


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_column_scale(shape: tuple[int, int, int], aligned: bool, kernels: Kernels) -> None:
    product = between_nans(torch.randn(shape).bfloat16(), aligned)
    inverse = aligned == (SHAPES.index(shape) % 2 == 0)
    (scale,) = kernels("column_scale", [product], [torch.empty(shape[0], shape[2])], *shape, inverse=inverse)
    q = product.double().square().sum(1)
    torch.testing.assert_close(scale.double(), 1 / q if inverse else q, rtol=2e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 3, 40), (2, 65, 37)])
def test_nothing_beyond_the_product_is_read(shape: tuple[int, int, int], kernels: Kernels) -> None:
    """The product ends where a page begins that cannot be read: reading there would end the process."""
    drawn = torch.randn(shape).bfloat16()
    room = -(-drawn.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = torch.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), dtype=BF16)
    guard = ctypes.c_void_p(pages.data_ptr() + room)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    try:
        product = pages[room // 2 - drawn.numel() : room // 2].view(shape).copy_(drawn)
        result = torch.empty(shape[0], shape[2])
        (scale,) = kernels("column_scale", [product], [result], *shape, inverse=False)
    finally:
        protect(guard, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE)
    torch.testing.assert_close(scale.double(), drawn.double().square().sum(1), rtol=2e-6, atol=0)


@pytest.mark.parametrize("n", [64, 67])
def test_the_sums_have_one_order(n: int, library: ctypes.CDLL) -> None:
    product = torch.randn(2, 300, n).bfloat16()
    results = [
        Kernels(library, backwards)("column_scale", [product], [torch.empty(2, n)], 2, 300, n, inverse=False)
        for backwards in (False, True)
    ]
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("n", [64, 67])
def test_nan_and_zeros(n: int, kernels: Kernels) -> None:
    product = torch.randn(2, 70, n).bfloat16()
    product[1, 69, 5], product[0, :, n - 1] = torch.nan, 0
    (scale,) = kernels("column_scale", [product], [torch.empty(2, n)], 2, 70, n, inverse=True)
    assert scale[1, 5].isnan() and scale[0, n - 1] == torch.inf and scale.isfinite().sum() == 2 * n - 2


@pytest.mark.parametrize("unaligned", [None, "product", "value", "gradient"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1]])
def test_column_scale_backward(shape: tuple[int, int, int], unaligned: str | None, kernels: Kernels) -> None:
    columns, inverse = (shape[0], shape[2]), (SHAPES.index(shape) + len(unaligned or "")) % 2 == 0
    product = between_nans(torch.randn(shape).bfloat16(), unaligned != "product")
    value = between_nans(torch.rand(columns) + 0.5, unaligned != "value")
    gradient = between_nans(torch.randn(columns), unaligned != "gradient")
    given = [product, value, gradient]
    (found,) = kernels(
        "column_scale_backward", given, [torch.empty(shape, dtype=BF16)], *shape, inverse=inverse
    )
    d = -gradient.double() * value.double() ** 2 if inverse else gradient.double()
    torch.testing.assert_close(found.double(), product.double() * d[:, None], rtol=HALF_ULP, atol=0)


@pytest.mark.parametrize(
    ("n", "aligned", "stride"),  # stride 0: no scales
    [
        *((n, i % 2 == 0, (0, 1, 3)[i % 3]) for i, n in enumerate((1, 7, 8, 40, 67, 130, 136, 264))),
        *((n, aligned, stride) for n in (8, 67) for aligned in (True, False) for stride in (0, 3)),
    ],
)
def test_turn_start(n: int, aligned: bool, stride: int, kernels: Kernels) -> None:
    j = between_nans(torch.randn(2, n, n).bfloat16(), aligned)
    j[1, n - 1, n - 1] = torch.nan
    angle = between_nans(torch.tensor([-0.3, 0.07]))
    scale = between_nans(torch.tensor([0.5, torch.nan, torch.nan, 3.0]).bfloat16())
    if stride == 1:
        scale[1] = 3
    given = [j, angle, scale]
    results = kernels("turn_start", given, [torch.empty(2, n, n, dtype=BF16)] * 2, 2, n, stride)
    first, second = angle.double()
    s = torch.tensor([0.5, 3.0] if stride else [1.0, 1.0], dtype=torch.float64)[:, None, None] * j.double()
    squares = torch.tensor([0.5, 3.0] if stride else [1.0, 1.0], dtype=torch.float64)[:, None, None]
    wanted = 0.5 * torch.eye(n, dtype=torch.float64) + first * s, second * squares * s
    for found, true in zip(results, wanted, strict=True):
        torch.testing.assert_close(found.double(), true, rtol=HALF_ULP, atol=1e-7, equal_nan=True)
