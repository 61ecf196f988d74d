"""The CUDA kernels of five ops, run on a CPU (block_on_cpu.h): kernels_on_cpu.cpp names the ops.

Their results are compared with fp64.

The tests cover what the sources determine: indices, edges, barriers, alignment and the launch code, in both
orders of the threads. They do not cover the arithmetic and the memory of a GPU.
"""

import ctypes
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import compiled_kernels
from torch import Tensor

from drot.ops import nm_mask_ref, pruned_importance_ref

pytestmark = pytest.mark.slow
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
AXES = [(True, False), (False, True), (True, True)]
BY_ROW = AXES[0]
POLAR = (7.9, -21.7, 15.1, 0.95)
SM_80, SM_90 = 162 * 1024, 226 * 1024  # bytes that Launcher::shared_memory() returns there


class Kernels:
    """The ops as the dispatcher calls them, for contiguous tensors."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.multiprocessors, self.shared_memory, self.backwards, self.once = 3, SM_90, False, False

    def entropy_loss(
        self, y: Tensor, column_scale: Tensor | None, rows: bool, columns: bool, scale: float
    ) -> list[Tensor]:
        machine = (self.multiprocessors, ctypes.c_int64(self.shared_memory), self.backwards, self.once)
        return self._call(
            "entropy_loss", y, column_scale, machine, (), (rows, columns, ctypes.c_double(scale))
        )

    def pruned_importance(
        self,
        y: Tensor,
        column_scale: Tensor | None,
        prune: int,
        group: int,
        scale: float,
        removed: Tensor | None = None,
    ) -> list[Tensor]:
        mask = ctypes.c_void_p(None if removed is None else removed.data_ptr())
        options = (group, prune, ctypes.c_double(scale))
        return self._call(
            "pruned_importance", y, column_scale, (self.multiprocessors, self.backwards), (mask,), options
        )

    def skew_momentum(
        self, product: Tensor, momentum: Tensor, decay: float, square_decay: float | None = None
    ) -> Tensor:
        u = torch.full((product.numel() + 128,), torch.nan, dtype=torch.bfloat16)
        size = (ctypes.c_int64(len(product)), ctypes.c_int64(product.shape[-1]))
        decays = ctypes.c_float(decay), square_decay is not None, ctypes.c_float(square_decay or 0)
        self._call_on("skew_momentum", (product, momentum, u[64:-64]), [*size, *decays])
        assert u[:64].isnan().all() and u[-64:].isnan().all()
        return u[64:-64].view(product.shape)

    def polar_start(self, squared: Tensor, fourth: Tensor, *numbers: float) -> Tensor:
        out = torch.full((squared.numel() + 128,), torch.nan, dtype=torch.bfloat16)
        size = (ctypes.c_int64(len(squared)), ctypes.c_int64(squared.shape[-1]))
        self._call_on("polar_start", (squared, fourth, out[64:-64]), [*size, *map(ctypes.c_float, numbers)])
        assert out[:64].isnan().all() and out[-64:].isnan().all()
        return out[64:-64].view(squared.shape)

    def _call_on(self, name: str, tensors: tuple[Tensor, ...], further: Iterable[Any]) -> None:
        call = getattr(self.library, name)
        call.restype = ctypes.c_char_p
        complaint = call(self.backwards, *(ctypes.c_void_p(t.data_ptr()) for t in tensors), *further)
        assert complaint == b"", complaint

    def _call(
        self, name: str, y: Tensor, column_scale: Tensor | None, machine: tuple, mask: tuple, options: tuple
    ) -> list[Tensor]:
        math = torch.promote_types(y.dtype, torch.float32)
        n = 0 if column_scale is None else column_scale.numel()
        # 64 values of margin on both sides: nothing may be written there
        padded = [
            torch.full((k + 128,), torch.nan, dtype=d)
            for k, d in ((1, math), (y.numel(), y.dtype), (n, math))
        ]
        results = [t[64:-64] for t in padded]
        results[1] = results[1].view(y.shape)
        pointer = [ctypes.c_void_p(t.data_ptr()) for t in (results[1], results[2], results[0])]
        if column_scale is None:
            pointer[1] = ctypes.c_void_p(None)
        scales = ctypes.c_void_p(None if column_scale is None else column_scale.data_ptr())
        call = getattr(self.library, name)
        call.restype = ctypes.c_char_p
        size = (ctypes.c_int64(y.shape[0]), ctypes.c_int64(y.shape[1]))
        dtype = str(y.dtype).removeprefix("torch.").encode()
        complaint = call(
            dtype, *machine, ctypes.c_void_p(y.data_ptr()), scales, *mask, *size, *options, *pointer
        )
        assert complaint == b"", complaint
        assert all(t[:64].isnan().all() and t[-64:].isnan().all() for t in padded)
        return results


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled_kernels("kernels_on_cpu")


@pytest.fixture(params=[False, True], ids=["upwards", "backwards"])
def kernels(library: Path, request: pytest.FixtureRequest) -> Kernels:
    kernels = Kernels(library)
    kernels.backwards = request.param
    return kernels


def problem(r: int, c: int, dtype: torch.dtype, aligned: bool = True) -> tuple[Tensor, Tensor]:
    """y [r, c], aligned to 16 bytes or not, and column_scale [c].

    Both are between NaNs: a kernel that reads beside them returns NaN.
    """
    start = 64 if aligned else 65
    store = torch.full((r * c + 128,), torch.nan, dtype=dtype)
    y = store[start : start + r * c].view(r, c)
    y.copy_(torch.randn(r, c))
    assert (y.data_ptr() % 16 == 0) == aligned
    column_scale = torch.full((c + 128,), torch.nan, dtype=torch.promote_types(dtype, torch.float32))[64:-64]
    return y, column_scale.copy_(torch.rand(c) + 0.1)


def exact_entropy(
    y: Tensor, column_scale: Tensor | None, rows: bool, columns: bool, scale: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss, dy and dcolumn_scale in fp64 from the shares p: H = -Σ p log p, ∂H/∂s = -(log p + H) / Σ s.

    Also the sizes of the terms that cancel in each of them, by which rounding errors are measured.
    """
    y = y.double()
    scales = torch.ones(y.shape[1], dtype=torch.float64) if column_scale is None else column_scale.double()
    s = y.square() * scales
    loss, ds, size = y.new_zeros(()), torch.zeros_like(s), torch.zeros_like(s)
    for dim in [1] * rows + [0] * columns:
        z = s.sum(dim, keepdim=True)
        p = s / torch.where(z > 0, z, 1)
        log = torch.where(p > 0, p, 1).log()
        entropy = -(p * log).sum(dim, keepdim=True)
        loss = loss + entropy.sum()
        ds = ds - torch.where(p > 0, (log + entropy) / torch.where(z > 0, z, 1), 0)
        size = size + p
    over_y, over_scale = (torch.where(t != 0, 1 / t, 0) for t in (y, scales))
    results = [scale * loss, scale * 2 * y * scales * ds, scale * (y.square() * ds).sum(0)]
    sizes = [size.sum(), 2 * size * over_y, (size * over_scale).sum(0)]
    return results, [scale * t for t in sizes]


def by_autograd(reference: Callable[..., Tensor], y: Tensor, column_scale: Tensor | None) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in (y, column_scale) if t is not None]
    loss = reference(*leaves)
    return [loss.detach(), *(grad.detach() for grad in torch.autograd.grad(loss, leaves))]


def assert_close(ours: list[Tensor], true: list[Tensor], sizes: list[Tensor] | None = None) -> None:
    """Compares the norms of the errors: dy is rounded to its dtype, the other results are sums.

    sizes: sizes of the terms that cancel in each result.
    """
    wide = 1e-14 if ours[0].dtype == torch.float64 else 1e-6
    for i, (mine, expected) in enumerate(zip(ours, true, strict=True)):
        allowed = wide + (torch.finfo(mine.dtype).eps if i == 1 else 0)
        error = (mine.double() - expected).norm()
        size = expected.norm() + (0.0 if sizes is None else sizes[i].norm())
        assert error <= allowed * size, f"result {i}: error {error} of {size}"


def check_entropy(
    kernels: Kernels, y: Tensor, column_scale: Tensor | None, rows: bool, columns: bool
) -> None:
    ours = kernels.entropy_loss(y, column_scale, rows, columns, 0.7)
    true, sizes = exact_entropy(y, column_scale, rows, columns, 0.7)
    n = 2 if column_scale is None else 3
    assert_close(ours[:n], true[:n], sizes[:n])


@pytest.mark.parametrize(
    ("dtype", "axes", "with_column_scale"),
    [
        *((dtype, axes, True) for dtype in (torch.bfloat16, torch.float32) for axes in AXES),
        *((torch.float16, AXES[0], True), (torch.float64, AXES[2], True)),
        *((torch.bfloat16, AXES[0], False), (torch.float32, AXES[2], False)),
    ],
)
def test_entropy(
    kernels: Kernels, dtype: torch.dtype, axes: tuple[bool, bool], with_column_scale: bool
) -> None:
    for shape, aligned in (
        ((37, 616), True),
        ((9, 1040), True),
        ((37, 611), True),
        ((5, 48), False),
        ((5, 1), True),
        ((1, 31), True),
        ((1, 1), True),
    ):
        y, column_scale = problem(*shape, dtype, aligned)
        check_entropy(kernels, y, column_scale if with_column_scale else None, *axes)


@pytest.mark.parametrize(
    ("dtype", "columns", "with_column_scale"),
    [
        *((torch.bfloat16, columns, True) for columns in (4096, 4097, 8193, 14336, 65535, 65536)),
        *((torch.float32, columns, True) for columns in (4097, 8192, 8200, 28672)),
        *((torch.float32, 8193, False), (torch.float16, 8192, False), (torch.float64, 4096, True)),
    ],
)
def test_entropy_of_long_rows(
    kernels: Kernels, dtype: torch.dtype, columns: int, with_column_scale: bool
) -> None:
    kernels.multiprocessors, kernels.shared_memory = 2, SM_80
    y, column_scale = problem(3, columns, dtype)  # one block has one row, the other two rows
    check_entropy(kernels, y, column_scale if with_column_scale else None, *BY_ROW)


@pytest.mark.parametrize(
    ("dtype", "columns", "backwards"), [(torch.bfloat16, 132_104, False), (torch.float32, 70_001, True)]
)
def test_entropy_of_rows_that_are_read_again(
    library: Path, dtype: torch.dtype, columns: int, backwards: bool
) -> None:
    kernels = Kernels(library)
    kernels.multiprocessors, kernels.shared_memory, kernels.backwards = 1, SM_80, backwards
    y, column_scale = problem(2, columns, dtype)
    check_entropy(kernels, y, column_scale, *BY_ROW)
    kernels.shared_memory = 0
    check_entropy(kernels, y, column_scale, *BY_ROW)


@pytest.mark.parametrize(
    ("dtype", "longest", "longest_unaligned"),
    [
        (torch.bfloat16, 132_096, 107_520),
        (torch.float32, 66_048, 66_048),
        (torch.float64, 33_024, 33_024),
    ],
)
def test_rows_are_read_once(library: Path, dtype: torch.dtype, longest: int, longest_unaligned: int) -> None:
    """The longest rows that are read once are those that entropy_loss_long_rows.cuh states for sm_80."""
    kernels = Kernels(library)
    kernels.shared_memory, kernels.once = SM_80, True
    for columns, aligned in (
        (64, True),
        (8192, True),
        (8200, True),
        (33, False),
        (longest, True),
        (longest_unaligned, False),
    ):
        y, column_scale = problem(1, columns, dtype, aligned)
        true, _ = exact_entropy(y, column_scale, *BY_ROW, 64.0)
        ours = kernels.entropy_loss(y, column_scale, *BY_ROW, 64.0)
        assert y.isnan().all()
        assert_close(ours[:2], true[:2])
    y, column_scale = problem(1, longest + 8, dtype)
    dy = kernels.entropy_loss(y, column_scale, *BY_ROW, 1.0)[1]
    assert dy[:, :longest].isfinite().all() and dy[:, longest:].isnan().all()


def test_entropy_of_many_rows_per_block(kernels: Kernels) -> None:
    kernels.multiprocessors = 1
    y, column_scale = problem(141, 2080, torch.float32)
    check_entropy(kernels, y, column_scale, *BY_ROW)


@pytest.mark.parametrize(
    ("shape", "by_row"), [((600, 16), False), ((33, 8193), True), ((3, 28672), False), ((28672, 1), True)]
)
def test_entropy_of_columns(kernels: Kernels, shape: tuple[int, int], by_row: bool) -> None:
    y, column_scale = problem(*shape, torch.float32)
    check_entropy(kernels, y, column_scale, by_row, True)


@pytest.mark.parametrize("columns", [40, 8224])
@pytest.mark.parametrize("axes", AXES)
def test_entropy_of_zeros(kernels: Kernels, axes: tuple[bool, bool], columns: int) -> None:
    y, column_scale = problem(6, columns, torch.float32)
    y[2], y[:, 3], column_scale[7] = 0, 0, 0
    y[4, 5], y[4, 6] = 1e-39, 1e-22  # y, or y², is a denormal
    counts = y.square() * column_scale >= torch.finfo(torch.float32).tiny
    ours = kernels.entropy_loss(y, column_scale, *axes, 1.0)
    true, sizes = exact_entropy(torch.where(counts, y, 0), column_scale, *axes)
    true[2][7] = sizes[2][7] = 0.0
    assert_close(ours, true, sizes)
    assert not ours[1][~counts].any() and ours[2][3] == 0 and ours[2][7] == 0
    nothing = kernels.entropy_loss(torch.zeros_like(y), column_scale, *axes, 1.0)
    assert all(not t.any() for t in nothing)


@pytest.mark.parametrize(("columns", "axes"), [(40, AXES[2]), (39, AXES[0]), (40, AXES[1]), (8224, AXES[0])])
def test_entropy_of_what_is_refused(kernels: Kernels, axes: tuple[bool, bool], columns: int) -> None:
    y, column_scale = problem(6, columns, torch.float32)
    y[:, 3] = 0
    only_its_logarithm_overflows = float((2e38 / column_scale[-1]).sqrt())
    for row, bad in (
        (1, torch.inf),
        (2, -torch.inf),
        (5, torch.nan),
        (3, 1e30),
        (4, only_its_logarithm_overflows),
    ):
        broken = y.clone()
        broken[row, -1] = bad
        assert kernels.entropy_loss(broken, column_scale, *axes, 1.0)[0].isnan()
    for bad in (-0.5, torch.inf, torch.nan):
        scales = column_scale.clone()
        scales[3] = bad  # in the column of zeros all scores are 0, whatever the scale
        assert kernels.entropy_loss(y, scales, *axes, 1.0)[0].isnan()


def test_the_same_every_time(library: Path) -> None:
    """Results repeat bit for bit, in both orders of the threads."""
    for columns, axes in ((616, (True, True)), (611, BY_ROW), (4096, BY_ROW), (28672, BY_ROW)):
        y, column_scale = problem(37, columns, torch.float32)
        kernels = Kernels(library)
        first = kernels.entropy_loss(y, column_scale, *axes, 1.0)
        for kernels.backwards in (False, True):
            again = kernels.entropy_loss(y, column_scale, *axes, 1.0)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("dtype", "pattern", "with_column_scale"),
    [
        *((torch.float32, pattern, True) for pattern in ((1, 1), (1, 2), (2, 4), (4, 8), (1, 3), (20, 32))),
        *((torch.bfloat16, (2, 4), True), (torch.bfloat16, (1, 3), False), (torch.bfloat16, (4, 8), False)),
        *((torch.float16, (2, 4), False), (torch.float64, (20, 32), True)),
    ],
)
def test_pruned(
    kernels: Kernels, dtype: torch.dtype, pattern: tuple[int, int], with_column_scale: bool
) -> None:
    prune, group = pattern
    for groups, aligned in ((48, True), (83, True), (16, False)):
        if group == 32 and groups > 16:
            continue
        y, column_scale = problem(35, groups * group, dtype, aligned)
        if groups == 48:
            y.copy_(y.mul(2).round())  # ties
        scales = column_scale if with_column_scale else None
        ours = kernels.pruned_importance(y, scales, prune, group, 0.7)
        true = by_autograd(
            lambda y, column_scale=None: pruned_importance_ref(
                y, column_scale, prune=prune, group=group, scale=0.7
            ),
            y,
            scales,
        )
        assert_close(ours[: len(true)], true)
        assert torch.equal(ours[1] != 0, true[1] != 0)


@pytest.mark.parametrize("columns", [64, 67])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pruned_by_a_mask(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    y, column_scale = problem(35, columns, dtype)
    score = y.double().square() * column_scale
    removed = nm_mask_ref(score, columns // 3, 0)
    ours = kernels.pruned_importance(y, column_scale, columns // 3, 1, 0.7, removed)
    true = by_autograd(
        lambda y, column_scale: 0.7 * torch.where(removed, y.square() * column_scale, 0).sum(),
        y,
        column_scale,
    )
    assert_close(ours, true)


def test_pruned_refuses(kernels: Kernels) -> None:
    y, column_scale = problem(6, 40, torch.float32)
    for bad in (torch.inf, torch.nan, 1e30):
        broken = y.clone()
        broken[5, 39] = bad  # too large to be removed
        assert kernels.pruned_importance(broken, column_scale, 2, 4, 1.0)[0].isnan()
    y[:, 3] = 0
    for bad in (-0.5, torch.inf, torch.nan):
        scales = column_scale.clone()
        scales[3] = bad
        assert kernels.pruned_importance(y, scales, 2, 4, 1.0)[0].isnan()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 5), (1, 32, 32), (2, 33, 33), (2, 100, 100)])
def test_skew_momentum(shape: tuple[int, ...], kernels: Kernels) -> None:
    # between NaNs: a kernel that reads beside them returns NaN, and one that writes there is found
    store = [torch.full((math.prod(shape) + 128,), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    product, momentum = (t[64:-64].view(shape).copy_(torch.randn(shape)) for t in store)
    above = torch.ones(shape, dtype=torch.bool).triu(1)
    momentum[~above] = torch.nan  # only the elements above the diagonal are read and written
    s, upper = product.double() - product.double().mT, torch.where(above, momentum.double(), 0)
    expected = 0.9 * (upper - upper.mT) + s
    u = kernels.skew_momentum(product, momentum, 0.9)
    torch.testing.assert_close(momentum.double()[above], expected[above], rtol=2**-8, atol=1e-6)
    assert momentum[~above].isnan().all()
    torch.testing.assert_close(u.double(), s + 0.9 * expected, rtol=2**-8, atol=1e-6)
    assert all(t[:64].isnan().all() and t[-64:].isnan().all() for t in store)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 5), (1, 32, 32), (2, 33, 33), (2, 100, 100)])
def test_skew_momentum_with_squares(shape: tuple[int, ...], kernels: Kernels) -> None:
    store = [torch.full((math.prod(shape) + 128,), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    product, momentum = (t[64:-64].view(shape).copy_(torch.randn(shape)) for t in store)
    below = torch.ones(shape, dtype=torch.bool).tril(-1)
    momentum[below] = momentum[below].abs()
    momentum.diagonal(dim1=-2, dim2=-1).fill_(torch.nan)  # neither read nor written
    s, before = product.double() - product.double().mT, momentum.double().nan_to_num()
    m, v = 0.9 * before.triu(1) + s.triu(1), 0.95 * before.tril(-1).mT + s.square().triu(1)
    u = kernels.skew_momentum(product, momentum, 0.9, 0.95)
    torch.testing.assert_close(momentum.double()[below.mT], m[below.mT], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(momentum.double()[below], v.mT[below], rtol=2**-8, atol=1e-6)
    assert momentum.diagonal(dim1=-2, dim2=-1).isnan().all()
    ratio = torch.where(v > 0, m / v.sqrt(), 0)
    torch.testing.assert_close(u.double(), ratio - ratio.mT, rtol=2**-8, atol=1e-6)
    assert all(t[:64].isnan().all() and t[-64:].isnan().all() for t in store)


def between_nans(t: Tensor) -> Tensor:
    """t between NaNs, aligned to 16 bytes: a kernel that reads beside it returns NaN."""
    store = torch.full((t.numel() + 128,), torch.nan, dtype=t.dtype)
    return store[64:-64].view(t.shape).copy_(t)


@pytest.mark.parametrize("n", [1, 7, 8, 40, 67, 264])
def test_polar_start(n: int, kernels: Kernels) -> None:
    squared, fourth = (between_nans((s * torch.randn(2, n, n)).bfloat16()) for s in (1e-3, 1e-6))
    fourth[1] *= 100  # the norms differ
    found = kernels.polar_start(squared, fourth, *POLAR)
    a, b, c, margin = POLAR
    s = margin / fourth.double().abs().sum(-1).amax(-1)[:, None, None] ** 0.25
    eye = torch.eye(n, dtype=torch.float64)
    expected = s * (a * eye - b * s**2 * squared.double() + c * s**4 * fourth.double())
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5 * float(s.max()))
    for bad in (torch.nan, torch.inf):
        fourth[0, -1, -1] = bad
        found = kernels.polar_start(squared, fourth, *POLAR)
        assert found[0].isnan().any() and torch.equal(
            found[1], kernels.polar_start(squared, fourth, *POLAR)[1]
        )
        assert found[1].isfinite().all()
