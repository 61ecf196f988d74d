"""The CUDA kernels of entropy_loss and pruned_importance, run by a CPU (block_on_cpu.h), against fp64.

It covers what the sources say: indices, edges, barriers, alignment and the launch code, in both orders of the
threads. The GPU's own arithmetic and memory are not in it.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths

from drot.ops import nm_mask_ref, pruned_importance_ref

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("c++")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
AXES = [(True, False), (False, True), (True, True)]
BY_ROW = AXES[0]
SM_80, SM_90 = 162 * 1024, 226 * 1024  # bytes of dynamic shared memory, as gpu.cuh counts them


class Kernels:
    """Both ops as the dispatcher would call them, of contiguous y and m."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.processors, self.shared_memory, self.backwards, self.once = 3, SM_90, False, False

    def entropy_loss(
        self, y: Tensor, m: Tensor | None, rows: bool, columns: bool, scale: float
    ) -> list[Tensor]:
        machine = (self.processors, ctypes.c_int64(self.shared_memory), self.backwards, self.once)
        return self._call("entropy_loss", y, m, machine, (), (rows, columns, ctypes.c_double(scale)))

    def pruned_importance(
        self, y: Tensor, m: Tensor | None, prune: int, group: int, scale: float, removed: Tensor | None = None
    ) -> list[Tensor]:
        mask = ctypes.c_void_p(None if removed is None else removed.data_ptr())
        options = (group, prune, ctypes.c_double(scale))
        return self._call("pruned_importance", y, m, (self.processors, self.backwards), (mask,), options)

    def _call(
        self, name: str, y: Tensor, m: Tensor | None, machine: tuple, mask: tuple, options: tuple
    ) -> list[Tensor]:
        wide = torch.promote_types(y.dtype, torch.float32)
        n = 0 if m is None else m.numel()
        # 64 values of margin on both sides: nothing may be written there
        padded = [
            torch.full((k + 128,), torch.nan, dtype=d)
            for k, d in ((1, wide), (y.numel(), y.dtype), (n, wide))
        ]
        results = [t[64:-64] for t in padded]
        results[1] = results[1].view(y.shape)
        pointer = [ctypes.c_void_p(t.data_ptr()) for t in (results[1], results[2], results[0])]
        if m is None:
            pointer[1] = ctypes.c_void_p(None)
        factor = ctypes.c_void_p(None if m is None else m.data_ptr())
        call = getattr(self.library, name)
        call.restype = ctypes.c_char_p
        size = (ctypes.c_int64(y.shape[0]), ctypes.c_int64(y.shape[1]))
        dtype = str(y.dtype).removeprefix("torch.").encode()
        complaint = call(
            dtype, *machine, ctypes.c_void_p(y.data_ptr()), factor, *mask, *size, *options, *pointer
        )
        assert complaint == b"", complaint
        assert all(t[:64].isnan().all() and t[-64:].isnan().all() for t in padded)
        return results


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("kernels") / "kernels_on_cpu.so"
    includes = [f"-I{folder}" for folder in (HERE, HERE.parent.parent / "csrc", *include_paths())]
    # misaligned loads, shifts and indices out of range end the process
    flags = [
        "-std=c++20",
        "-O1",
        "-U_FORTIFY_SOURCE",  # its longjmp stays on one stack
        "-shared",
        "-fPIC",
        "-fsanitize=undefined",
        "-fno-sanitize-recover=undefined",
    ]
    build = subprocess.run(
        [COMPILER, *flags, *includes, str(HERE / "kernels_on_cpu.cpp"), "-o", str(path)],
        capture_output=True,
        text=True,
    )
    if "libubsan" in build.stderr:
        pytest.skip("the compiler has no UndefinedBehaviorSanitizer")
    assert build.returncode == 0, build.stderr
    return path


@pytest.fixture(params=[False, True], ids=["upwards", "backwards"])
def kernels(library: Path, request: pytest.FixtureRequest) -> Kernels:
    kernels = Kernels(library)
    kernels.backwards = request.param
    return kernels


def problem(r: int, c: int, dtype: torch.dtype, aligned: bool = True) -> tuple[Tensor, Tensor]:
    """y between NaNs, so that what is read beside it shows; 16-byte aligned or not."""
    start = 64 if aligned else 65
    store = torch.full((r * c + 128,), torch.nan, dtype=dtype)
    y = store[start : start + r * c].view(r, c)
    y.copy_(torch.randn(r, c))
    assert (y.data_ptr() % 16 == 0) == aligned
    m = torch.full((c + 128,), torch.nan, dtype=torch.promote_types(dtype, torch.float32))[64:-64]
    return y, m.copy_(torch.rand(c) + 0.1)


def exact_entropy(
    y: Tensor, m: Tensor | None, rows: bool, columns: bool, scale: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss, dy and dm in fp64 from the shares p: H = -Σ p log p, ∂H/∂s = -(log p + H) / Σ s.

    Also the sizes of what cancels in each: p·log p, which every share's rounding is measured by.
    """
    y = y.double()
    factor = torch.ones(y.shape[1], dtype=torch.float64) if m is None else m.double()
    s = y.square() * factor
    loss, ds, size = y.new_zeros(()), torch.zeros_like(s), torch.zeros_like(s)
    for dim in [1] * rows + [0] * columns:
        z = s.sum(dim, keepdim=True)
        p = s / torch.where(z > 0, z, 1)
        log = torch.where(p > 0, p, 1).log()
        entropy = -(p * log).sum(dim, keepdim=True)
        loss = loss + entropy.sum()
        ds = ds - torch.where(p > 0, (log + entropy) / torch.where(z > 0, z, 1), 0)
        size = size + p
    over_y, over_m = (torch.where(t != 0, 1 / t, 0) for t in (y, factor))
    results = [scale * loss, scale * 2 * y * factor * ds, scale * (y.square() * ds).sum(0)]
    sizes = [size.sum(), 2 * size * over_y, (size * over_m).sum(0)]
    return results, [scale * t for t in sizes]


def by_autograd(reference: Callable[..., Tensor], y: Tensor, m: Tensor | None) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in (y, m) if t is not None]
    loss = reference(*leaves)
    return [loss.detach(), *(grad.detach() for grad in torch.autograd.grad(loss, leaves))]


def assert_close(ours: list[Tensor], true: list[Tensor], sizes: list[Tensor] | None = None) -> None:
    """By the norms of the errors: dy rounds to its dtype, the others as sums do.

    sizes: of the terms that cancel in each result.
    """
    wide = 1e-14 if ours[0].dtype == torch.float64 else 1e-6
    for i, (mine, expected) in enumerate(zip(ours, true, strict=True)):
        allowed = wide + (torch.finfo(mine.dtype).eps if i == 1 else 0)
        error = (mine.double() - expected).norm()
        size = expected.norm() + (0.0 if sizes is None else sizes[i].norm())
        assert error <= allowed * size, f"result {i}: error {error} of {size}"


def check_entropy(kernels: Kernels, y: Tensor, m: Tensor | None, rows: bool, columns: bool) -> None:
    ours = kernels.entropy_loss(y, m, rows, columns, 0.7)
    true, sizes = exact_entropy(y, m, rows, columns, 0.7)
    n = 2 if m is None else 3
    assert_close(ours[:n], true[:n], sizes[:n])


@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy(kernels: Kernels, dtype: torch.dtype, axes: tuple[bool, bool], with_factor: bool) -> None:
    for shape, aligned in (
        ((37, 616), True),
        ((9, 1040), True),
        ((37, 611), True),
        ((5, 48), False),
        ((5, 1), True),
        ((1, 31), True),
        ((1, 1), True),
    ):
        y, m = problem(*shape, dtype, aligned)
        check_entropy(kernels, y, m if with_factor else None, *axes)


@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize("columns", [4096, 4097, 8192, 8193, 8200, 14336, 28672, 65535, 65536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy_of_long_rows(kernels: Kernels, dtype: torch.dtype, columns: int, with_factor: bool) -> None:
    kernels.processors, kernels.shared_memory = 2, SM_80
    y, m = problem(3, columns, dtype)  # a block has one row, the other two
    check_entropy(kernels, y, m if with_factor else None, *BY_ROW)


@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 132_104), (torch.float32, 70_001)])
def test_entropy_of_rows_that_are_read_again(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    kernels.processors, kernels.shared_memory = 2, SM_80
    y, m = problem(3, columns, dtype)
    check_entropy(kernels, y, m, *BY_ROW)
    kernels.shared_memory = 0
    check_entropy(kernels, y, m, *BY_ROW)


@pytest.mark.parametrize(
    ("dtype", "longest", "longest_unaligned"),
    [
        (torch.bfloat16, 132_096, 107_520),
        (torch.float32, 66_048, 66_048),
        (torch.float64, 33_024, 33_024),
    ],
)
def test_rows_are_read_once(library: Path, dtype: torch.dtype, longest: int, longest_unaligned: int) -> None:
    """Up to the lengths that entropy_loss_long_rows.cuh names, of sm_80, and no further."""
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
        y, m = problem(1, columns, dtype, aligned)
        true, _ = exact_entropy(y, m, *BY_ROW, 64.0)
        ours = kernels.entropy_loss(y, m, *BY_ROW, 64.0)
        assert y.isnan().all()
        assert_close(ours[:2], true[:2])
    y, m = problem(1, longest + 8, dtype)
    dy = kernels.entropy_loss(y, m, *BY_ROW, 1.0)[1]
    assert dy[:, :longest].isfinite().all() and dy[:, longest:].isnan().all()


def test_entropy_of_many_rows_per_block(kernels: Kernels) -> None:
    kernels.processors = 1
    y, m = problem(141, 2080, torch.float32)
    check_entropy(kernels, y, m, *BY_ROW)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("shape", [(600, 16), (33, 8193), (3, 28672), (28672, 1)])
def test_entropy_of_columns(kernels: Kernels, shape: tuple[int, int], by_row: bool) -> None:
    y, m = problem(*shape, torch.float32)
    check_entropy(kernels, y, m, by_row, True)


@pytest.mark.parametrize("columns", [40, 8224])
@pytest.mark.parametrize("axes", AXES)
def test_entropy_of_zeros(kernels: Kernels, axes: tuple[bool, bool], columns: int) -> None:
    y, m = problem(6, columns, torch.float32)
    y[2], y[:, 3], m[7], y[4, 5], y[4, 6] = 0, 0, 0, 1e-39, 1e-22  # the last two: y, or y², is a denormal
    counts = y.square() * m >= torch.finfo(torch.float32).tiny
    ours = kernels.entropy_loss(y, m, *axes, 1.0)
    true, sizes = exact_entropy(torch.where(counts, y, 0), m, *axes)
    true[2][7] = sizes[2][7] = 0.0
    assert_close(ours, true, sizes)
    assert not ours[1][~counts].any() and ours[2][3] == 0 and ours[2][7] == 0
    nothing = kernels.entropy_loss(torch.zeros_like(y), m, *axes, 1.0)
    assert all(not t.any() for t in nothing)


@pytest.mark.parametrize("columns", [40, 39, 8224])
@pytest.mark.parametrize("axes", AXES)
def test_entropy_of_what_is_refused(kernels: Kernels, axes: tuple[bool, bool], columns: int) -> None:
    y, m = problem(6, columns, torch.float32)
    y[:, 3] = 0
    only_its_logarithm_overflows = float((2e38 / m[-1]).sqrt())
    for row, bad in (
        (1, torch.inf),
        (2, -torch.inf),
        (5, torch.nan),
        (3, 1e30),
        (4, only_its_logarithm_overflows),
    ):
        broken = y.clone()
        broken[row, -1] = bad
        assert kernels.entropy_loss(broken, m, *axes, 1.0)[0].isnan()
    for bad in (-0.5, torch.inf, torch.nan):
        factor = m.clone()
        factor[3] = bad  # the column of zeros, whose scores hide it
        assert kernels.entropy_loss(y, factor, *axes, 1.0)[0].isnan()


def test_the_same_every_time(library: Path) -> None:
    """Bit for bit, and in whatever order the threads take their turns."""
    for columns, axes in ((616, (True, True)), (611, BY_ROW), (4096, BY_ROW), (28672, BY_ROW)):
        y, m = problem(37, columns, torch.float32)
        kernels = Kernels(library)
        first = kernels.entropy_loss(y, m, *axes, 1.0)
        for kernels.backwards in (False, True):
            again = kernels.entropy_loss(y, m, *axes, 1.0)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize("pattern", [(1, 1), (1, 2), (2, 4), (4, 8), (1, 3), (20, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pruned(kernels: Kernels, dtype: torch.dtype, pattern: tuple[int, int], with_factor: bool) -> None:
    prune, group = pattern
    for groups, aligned in ((48, True), (83, True), (16, False)):
        if group == 32 and groups > 16:
            continue
        y, m = problem(35, groups * group, dtype, aligned)
        if groups == 48:
            y.copy_(y.mul(2).round())  # ties
        factor = m if with_factor else None
        ours = kernels.pruned_importance(y, factor, prune, group, 0.7)
        true = by_autograd(
            lambda y, m=None: pruned_importance_ref(y, m, prune=prune, group=group, scale=0.7), y, factor
        )
        assert_close(ours[: len(true)], true)
        assert torch.equal(ours[1] != 0, true[1] != 0)


@pytest.mark.parametrize("columns", [64, 67])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pruned_by_a_mask(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    y, m = problem(35, columns, dtype)
    score = y.double().square() * m
    removed = nm_mask_ref(score, columns // 3, 0)
    ours = kernels.pruned_importance(y, m, columns // 3, 1, 0.7, removed)
    true = by_autograd(lambda y, m: 0.7 * torch.where(removed, y.square() * m, 0).sum(), y, m)
    assert_close(ours, true)


def test_pruned_refuses(kernels: Kernels) -> None:
    y, m = problem(6, 40, torch.float32)
    for bad in (torch.inf, torch.nan, 1e30):
        broken = y.clone()
        broken[5, 39] = bad  # too large to be removed
        assert kernels.pruned_importance(broken, m, 2, 4, 1.0)[0].isnan()
    y[:, 3] = 0
    for bad in (-0.5, torch.inf, torch.nan):
        factor = m.clone()
        factor[3] = bad
        assert kernels.pruned_importance(y, factor, 2, 4, 1.0)[0].isnan()
