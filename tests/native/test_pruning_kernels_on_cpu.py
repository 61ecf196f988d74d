"""The CUDA kernels of sparsegpt_sweep, nm_mask, pack24 and unpack24, run on a CPU (block_on_cpu.h).

The sweep is compared with a loop in fp64, the other kernels with the references of their ops.

The tests cover what the sources determine: indices, edges, barriers, alignment and the launch code, in both
orders of the threads. They do not cover the arithmetic and the memory of a GPU, nor whether what must be
atomic is.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from compiled import compiled_kernels
from torch import Tensor

from drot.ops import nm_mask_ref, pack24_ref, unpack24_ref

pytestmark = pytest.mark.slow
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
UNWRITTEN = {torch.uint8: 2, torch.int64: -1}  # NaN for floats; to read a bool of 2 ends the process
MARGIN = 64


class Placed(NamedTuple):
    """A matrix in memory that the kernels may not touch beside it."""

    store: Tensor
    matrix: Tensor

    def intact(self) -> bool:
        """Whether nothing beside the matrix was written."""
        value = unwritten(self.matrix.dtype)
        stray = self.store.clone()
        stray.as_strided(
            self.matrix.shape,
            self.matrix.stride(),
            self.matrix.storage_offset() - self.store.storage_offset(),
        ).fill_(value)
        return bool((stray.isnan() if math.isnan(value) else stray == value).all())


def unwritten(dtype: torch.dtype) -> float:
    return UNWRITTEN.get(dtype, math.nan)


def placed(t: Tensor, left: int = 0) -> Placed:
    """A copy of the matrix t, after whose last value a page begins that can be neither read nor written.

    Before the matrix, and in `left` columns left of each row, lie values `unwritten`: a kernel that reads
    them returns another result.
    """
    rows, columns = t.shape
    count = MARGIN + rows * (left + columns)
    room = -(-count * t.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = torch.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), dtype=t.dtype)
    guard = ctypes.c_void_p(pages.data_ptr() + room)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    end = room // t.itemsize
    store = pages[end - count : end].fill_(unwritten(t.dtype))
    matrix = store[MARGIN:].view(rows, left + columns)[:, left:]
    matrix.copy_(t)
    return Placed(store, matrix)


def blank(rows: int, columns: int, dtype: torch.dtype, left: int = 0) -> Placed:
    return placed(torch.full((rows, columns), unwritten(dtype), dtype=dtype), left)


def name_of(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode()


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(INTEGERS[t.itemsize])


class Kernels:
    """The kernels, for matrices that are placed apart (see `placed`)."""

    def __init__(self, library: ctypes.CDLL, backwards: bool) -> None:
        self._library, self._backwards = library, backwards

    def _call(
        self,
        name: str,
        dtype: torch.dtype,
        given: Sequence[Placed | None],
        results: Sequence[Placed | None],
        *numbers: int,
    ) -> None:
        call = getattr(self._library, name)
        call.restype = ctypes.c_char_p
        complaint = call(
            self._backwards,
            name_of(dtype),
            *(ctypes.c_void_p(None if t is None else t.matrix.data_ptr()) for t in (*given, *results)),
            *map(ctypes.c_int64, numbers),
        )
        assert complaint == b"", complaint
        assert all(t is None or t.intact() for t in results)

    def sweep_widest(self, dtype: torch.dtype) -> int:
        """The most columns that the op gives to the kernel."""
        return int(self._library.sweep_widest(name_of(dtype)))

    def sweep(
        self, w: Tensor, hinv: Tensor, removed: Tensor | None, prune: int, group: int, batch: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The strides of w, of hinv and of the results differ. The lower triangle of hinv is NaN.

        batch: the number of problems, whose matrices lie one below the other.
        """
        rows, columns = w.shape
        triangle = torch.ones(columns, columns).triu().bool().repeat(batch, 1)
        upper = torch.where(triangle, hinv, math.nan)
        placed_w, placed_hinv = placed(w, left=5), placed(upper, left=3)
        results = [blank(rows, columns, dtype, left=8) for dtype in (w.dtype, w.dtype, torch.uint8)]
        mask = None if removed is None else placed(removed.to(torch.uint8), left=8)
        strides = (t.matrix.stride(0) for t in (placed_w, placed_hinv, results[0]))
        self._call(
            "sweep",
            w.dtype,
            [placed_w, placed_hinv, mask],
            results,
            *strides,
            rows // batch,
            columns,
            prune,
            group,
            batch,
        )
        pruned, error, gone = (t.matrix for t in results)
        return pruned, error, as_bool(gone)

    def mask(self, score: Tensor, prune: int, group: int) -> Tensor:
        """nm_mask; group = 0 stands for the whole row."""
        removed = blank(*score.shape, torch.uint8)
        name = "mask_groups" if group else "mask_rows"
        numbers = (score.numel() // group, group) if group else score.shape
        self._call(name, score.dtype, [placed(score)], [removed], *numbers, prune)
        return as_bool(removed.matrix)

    def pack24(self, w: Tensor) -> tuple[Tensor, Tensor, int]:
        """Values, positions and the first row that is not 2:4."""
        rows, columns = w.shape
        values, positions = blank(rows, columns // 2, w.dtype), blank(rows, columns // 8, torch.uint8)
        bad = placed(torch.tensor([[rows]]))
        size = (rows * columns // 8, columns // 8)
        self._call("pack24", w.dtype, [placed(w)], [values, positions, bad], *size)
        return values.matrix, positions.matrix, int(bad.matrix)

    def unpack24(self, values: Tensor, positions: Tensor, check: bool = True) -> tuple[Tensor, int]:
        """The weight, and the first row whose positions do not ascend."""
        rows, columns = values.shape
        w, bad = blank(rows, 2 * columns, values.dtype), placed(torch.tensor([[rows]]))
        self._call(
            "unpack24",
            values.dtype,
            [placed(values), placed(positions)],
            [w, bad if check else None],
            positions.numel(),
            positions.shape[1],
        )
        return w.matrix, int(bad.matrix)


def as_bool(flags: Tensor) -> Tensor:
    assert bool((flags <= 1).all())
    return flags == 1


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    path = compiled_kernels("pruning_kernels_on_cpu")
    return ctypes.CDLL(str(path))


@pytest.fixture(params=[False, True], ids=["upwards", "backwards"])
def kernels(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Kernels:
    return Kernels(library, request.param)


class Swept(NamedTuple):
    pruned: Tensor
    error: Tensor
    removed: Tensor
    score: Tensor  # by which the mask was chosen, or would have been


def sparsegpt(w: Tensor, hinv: Tensor, removed: Tensor | None, prune: int, group: int) -> Swept:
    """SparseGPT in fp64. Where a mask is given, `group` only says when the scores are computed.

    The loop gathers what all columns to the left subtract from a column when it reaches it. The kernel
    subtracts what a column gives from all columns to the right of it.
    """
    w, u, columns = w.double(), hinv.double(), w.shape[1]
    pruned, error, score = (torch.zeros_like(w) for _ in range(3))
    mask = torch.zeros_like(w, dtype=torch.bool) if removed is None else removed.clone()
    for j in range(columns):
        if group and j % group == 0:
            span = slice(j, j + group)
            updated = w[:, span] - error[:, :j] @ u[:j, span]
            score[:, span] = (updated / u.diagonal()[span]) ** 2
            if removed is None:
                order = score[:, span].sort(dim=1, stable=True).indices[:, :prune]
                mask[:, span].scatter_(1, order, True)
        updated = w[:, j] - error[:, :j] @ u[:j, j]
        error[:, j] = torch.where(mask[:, j], updated / u[j, j], 0)
        pruned[:, j] = torch.where(mask[:, j], 0, updated)
    return Swept(pruned, error, mask, score)


def sweep_problem(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """w, and Hinv, the upper Cholesky factor of the inverse of a Hessian."""
    x = torch.randn(2 * columns + 3, columns, dtype=torch.float64)
    hessian = x.T @ x / len(x)
    hinv = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    return torch.randn(rows, columns).to(dtype), hinv.to(dtype)


# rows, columns, prune, group; groups of 3, 5, 21 and 31 lie in two registers of some lanes
SWEEPS = [
    (1, 1, 1, 1),
    (33, 24, 2, 4),
    (5, 90, 3, 5),
    (31, 96, 1, 3),
    (70, 96, 4, 8),
    (6, 93, 7, 31),
    (2, 64, 16, 32),
    (9, 32, 1, 2),
    (3, 40, 0, 4),
    (3, 40, 4, 4),
]
WIDE_SWEEPS = [(37, 128, 2, 4), (4, 128, 16, 32), (3, 127, 1, 1), (3, 126, 11, 21)]  # too wide in fp64
SWEEP_CASES = [
    *((size, dtype) for size in SWEEPS for dtype in (torch.float32, torch.float64)),
    *((size, torch.float32) for size in WIDE_SWEEPS),
]


def assert_swept(got: tuple[Tensor, Tensor, Tensor], true: Swept) -> None:
    tolerance = (
        {"rtol": 2e-4, "atol": 2e-5} if got[0].dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    )
    assert torch.equal(got[2], true.removed)
    for value, expected in zip(got[:2], true[:2], strict=True):
        torch.testing.assert_close(value.double(), expected, **tolerance)
    assert bool((got[0][got[2]] == 0).all()) and bool((got[1][~got[2]] == 0).all())


@pytest.mark.parametrize(("size", "dtype"), SWEEP_CASES[::3])
def test_sweep_chooses(size: tuple[int, ...], dtype: torch.dtype, kernels: Kernels) -> None:
    rows, columns, prune, group = size
    w, hinv = sweep_problem(rows, columns, dtype)
    got = kernels.sweep(w, hinv, None, prune, group)
    # fp32 may swap nearly equal scores: the values are compared for the kernel's mask
    true = sparsegpt(w, hinv, got[2], prune, group)
    assert_swept(got, true)
    removed, score = (t.view(rows, -1, group) for t in (got[2], true.score))
    assert bool((removed.sum(-1) == prune).all())
    largest = score.masked_fill(~removed, 0).amax(-1)
    smallest = score.masked_fill(removed, torch.inf).amin(-1)
    assert bool((largest <= smallest * (1 + 1e-3)).all())


@pytest.mark.parametrize(("size", "dtype"), SWEEP_CASES)
def test_sweep_of_exact_numbers(size: tuple[int, ...], dtype: torch.dtype, kernels: Kernels) -> None:
    """Small multiples of powers of two: nothing is rounded, many scores are equal, and the mask is exact."""
    rows, columns, prune, group = size
    w = torch.randint(-3, 4, (rows, columns)).to(dtype)
    factor = torch.randint(-2, 3, (columns, columns)) * (torch.rand(columns, columns) < 2 / columns) / 2
    hinv = (factor.triu(1) + torch.diag(2.0 ** torch.randint(-1, 2, (columns,)))).to(dtype)
    got = kernels.sweep(w, hinv, None, prune, group)
    true = sparsegpt(w, hinv, None, prune, group)
    for value, expected in zip(got, true[:3], strict=True):
        assert torch.equal(value.to(expected.dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (33, 17), (64, 32), (5, 33), (70, 96), (31, None), (32, None)]
)
def test_sweep_follows_a_given_mask(
    rows: int, columns: int | None, dtype: torch.dtype, kernels: Kernels
) -> None:
    """columns: None for the most that the op gives to the kernel."""
    columns = columns or kernels.sweep_widest(dtype)
    w, hinv = sweep_problem(rows, columns, dtype)
    removed = torch.rand(rows, columns) < 0.5
    removed[0] = True
    removed[rows // 2] = rows == 1
    assert_swept(kernels.sweep(w, hinv, removed, 0, 0), sparsegpt(w, hinv, removed, 0, 0))


@pytest.mark.parametrize("given", [False, True])
def test_sweep_of_a_batch(given: bool, kernels: Kernels) -> None:
    problems = [sweep_problem(37, 48, torch.float64) for _ in range(3)]
    w, hinv = (torch.cat(parts) for parts in zip(*problems, strict=True))
    removed = torch.rand(len(w), 48) < 0.5 if given else None
    together = kernels.sweep(w, hinv, removed, 2, 4, batch=3)
    for i, (of_one, hinv_of_one) in enumerate(problems):
        rows = slice(37 * i, 37 * (i + 1))
        alone = kernels.sweep(of_one, hinv_of_one, None if removed is None else removed[rows], 2, 4)
        assert all(torch.equal(a[rows], b) for a, b in zip(together, alone, strict=True))


def test_sweep_keeps_nan_in_its_row(kernels: Kernels) -> None:
    w, hinv = sweep_problem(40, 48, torch.float32)
    clean = kernels.sweep(w, hinv, None, 2, 4)
    w[34, 3] = math.nan
    got = kernels.sweep(w, hinv, None, 2, 4)
    rest = torch.arange(40) != 34
    assert all(torch.equal(a[rest], b[rest]) for a, b in zip(got, clean, strict=True))
    # NaN is larger than every number, so it stays
    assert not got[2][34, 3] and got[0][34, 3].isnan() and got[0][34, 4:].isfinite().all()


def scores(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of four kinds in turn: few distinct values, normal numbers, any bits at all, one number."""
    kinds = [
        torch.randint(-2, 3, (rows, columns)).to(dtype),
        torch.randn(rows, columns).to(dtype),
        torch.randint(-(2**63), 2**63 - 1, (rows, columns)).to(INTEGERS[dtype.itemsize]).view(dtype),
        torch.full((rows, columns), -1.5, dtype=dtype),
    ]
    # of the few values, some are -0, NaN and ±inf
    for value, share in ((-0.0, 0.2), (math.nan, 0.1), (math.inf, 0.1), (-math.inf, 0.1)):
        kinds[0] = torch.where(torch.rand(rows, columns) < share, value, kinds[0])
    kind = torch.arange(rows) % len(kinds)
    return torch.stack(kinds)[kind, torch.arange(rows)]


@pytest.mark.parametrize(
    ("group", "dtype"),
    [
        *((group, torch.float32) for group in (1, 2, 3, 4, 5, 8, 13, 16, 31, 32)),
        *((group, dtype) for group in (4, 31) for dtype in DTYPES if dtype != torch.float32),
    ],
)
def test_mask_of_groups(group: int, dtype: torch.dtype, kernels: Kernels) -> None:
    for groups in (1, 37):
        score = scores(8, groups * group, dtype)
        for prune in {1, group // 2 or 1, group - 1 or 1, group}:
            assert torch.equal(kernels.mask(score, prune, group), nm_mask_ref(score, prune, group))


@pytest.mark.parametrize("group", [2, 3, 4, 8, 16])
def test_a_thread_takes_several_groups(group: int, kernels: Kernels) -> None:
    """The grid has at most 32 blocks of 256 threads for the one multiprocessor."""
    score = scores(4, (2 * 32 * 256 + 300) // 4 * group, torch.float32)
    assert torch.equal(kernels.mask(score, 1, group), nm_mask_ref(score, 1, group))


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        *((columns, torch.float32) for columns in (1, 31, 33, 1024, 1025, 3100)),
        *((1000, torch.bfloat16), (1025, torch.bfloat16), (5, torch.float16), (1000, torch.float64)),
    ],
)
def test_mask_of_rows(columns: int, dtype: torch.dtype, kernels: Kernels) -> None:
    score = scores(8, columns, dtype)
    for prune in {1, columns // 3 or 1, columns - 1 or 1, columns}:
        assert torch.equal(kernels.mask(score, prune, 0), nm_mask_ref(score, prune, 0))


def sparse24(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A random 2:4 matrix. Its groups hold zero to two non-zeros, at all positions; some zeros are -0."""
    w = torch.randn(rows, columns // 4, 4)
    w[torch.rand(w.shape) < 0.1] = math.nan
    w[torch.rand(w.shape) < 0.1] = -math.inf
    keep = torch.rand(w.shape).argsort(-1) < torch.randint(0, 3, (*w.shape[:-1], 1))
    zero = torch.where(torch.rand(w.shape) < 0.3, -0.0, 0.0)
    return torch.where(keep, w, zero).reshape(rows, columns).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 8), (3, 24), (65, 136), (256, 64)])
def test_pack24_and_back(shape: tuple[int, int], dtype: torch.dtype, kernels: Kernels) -> None:
    w = sparse24(*shape, dtype)
    values, positions, bad = kernels.pack24(w)
    true_values, true_positions = pack24_ref(w)
    assert torch.equal(bits(values), bits(true_values)) and torch.equal(positions, true_positions)
    assert bad == shape[0]
    back, bad = kernels.unpack24(values, positions)
    assert torch.equal(bits(back), bits(unpack24_ref(values, positions)))
    # the packed form loses the sign of zeros
    assert torch.equal(bits(back + 0.0), bits(w + 0.0))
    assert bad == shape[0]


ROWS, COLUMNS = 300, 136  # 17 bytes of positions to a row, 20 blocks
FAULTS = [[(0, 0)], [(299, 132)], [(3, 8), (4, 0)], [(200, 4), (199, 128), (280, 0)], [(240, 0), (240, 4)]]


@pytest.mark.parametrize("faults", FAULTS)
def test_pack24_names_the_first_faulty_row(faults: list[tuple[int, int]], kernels: Kernels) -> None:
    """faults: row and first column of a group with three non-zeros."""
    w = sparse24(ROWS, COLUMNS, torch.bfloat16)
    for row, column in faults:
        w[row, column : column + 4] = torch.tensor([1, 2, 0, 3])
    assert kernels.pack24(w)[2] == min(row for row, _ in faults)


@pytest.mark.parametrize(
    ("faults", "pair"), list(zip(FAULTS, (0b0000, 0b1010, 0b0001, 0b0110, 0b0000), strict=True))
)
def test_unpack24_names_the_first_faulty_row(
    faults: list[tuple[int, int]], pair: int, kernels: Kernels
) -> None:
    """pair: the positions of a faulty group."""
    values, positions = pack24_ref(sparse24(ROWS, COLUMNS, torch.bfloat16))
    for row, column in faults:
        shift = column % 8  # a group has four columns and four bits
        positions[row, column // 8] &= 0b11110000 >> shift
        positions[row, column // 8] |= pair << shift
    assert kernels.unpack24(values, positions)[1] == min(row for row, _ in faults)
    kernels.unpack24(values, positions, check=False)
