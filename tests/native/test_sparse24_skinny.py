"""The source of the skinny kernel of sparse24_linear, run on the CPU.

The tests show that indices, barriers and the order of the columns are right if the tensor cores arrange their
operands as the PTX manual says. They do not show that a GPU does so, nor how fast the kernel is.
"""

import ctypes

import pytest
import torch
from compiled import compiled
from torch import Tensor

from drot.ops import nm_mask_ref, pack24, sparse24_linear_ref


@pytest.fixture(scope="module")
def library():
    library = compiled("sparse24_skinny", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas")
    return ctypes.CDLL(str(library))


@pytest.fixture
def kernel(library):
    return library.skinny


def number(function, *arguments: int) -> int:
    """What a function of whole numbers returns."""
    function.restype = ctypes.c_int64
    return function(*map(ctypes.c_int64, arguments))


#: KB of shared memory of a block, beside drot's static arrays: of GPUs for consumers, and of an A100
CONSUMER, A100 = 98, 162


@pytest.mark.parametrize(
    ("block", "tokens", "rows", "stages", "kilobytes"),
    [(0, 4, 32, 4, CONSUMER), (1, 16, 128, 3, CONSUMER), (2, 32, 128, 3, CONSUMER), (3, 64, 128, 3, A100)],
)
def test_bytes_in_flight(library, block: int, tokens: int, rows: int, stages: int, kilobytes: int) -> None:
    """A block has 36 KB of W on their way at least, and its queue fits the GPUs that use it.

    Little's law for an H100: 3.35 TB/s · 1 µs / 132 multiprocessors = 25 KB; for an H200, 4.8 TB/s, 36 KB.
    """
    column_warps = 8 if rows == 32 else 256 // rows
    of_chunk = column_warps * rows * (64 // 2 * 2 + 64 // 8)  # bytes of 64 columns of the packed weight
    assert number(library.bytes_in_flight, block) == (stages - 1) * of_chunk >= 36 * 1024
    assert number(library.shared_bytes, block, tokens) <= kilobytes * 1024


@pytest.mark.parametrize(
    ("blocks", "steps", "splits"),
    [(128, 224, 1), (64, 64, 2), (32, 64, 4), (16, 64, 4), (1, 15, 1), (1, 32, 2), (500, 448, 1)],
)
def test_splits_of_an_h100(library, blocks: int, steps: int, splits: int) -> None:
    """The blocks fill its 132 multiprocessors where the columns suffice for two steps of each warp."""
    assert number(library.splits, blocks, steps, 8, 132) == splits


#: tokens, rows and columns of the weight, and what is added
CASES = [
    (1, 16, 64, ""),
    (3, 32, 192, "bias"),
    (8, 37, 576, "residual"),
    (9, 50, 128, "bias residual"),
    (16, 32, 64, "residual rotation"),
    (5, 64, 640, "bias residual rotation"),
    (11, 288, 64, "bias residual rotation"),
    (17, 48, 128, "bias"),
    (40, 64, 64, "bias residual rotation"),
    (32, 33, 64, "residual"),
    (5, 64, 2176, "bias residual rotation"),  # with many multiprocessors eight blocks share the columns
    (18, 33, 3072, "bias residual"),  # twelve
    (3, 64, 4672, "residual rotation"),  # a chunk takes the place of another twice, and the last is short
    (70, 160, 576, "bias residual rotation"),  # groups of 64 tokens, or of 32; two tiles of rows
    (24, 200, 1088, "bias"),  # 17 steps for splits of two column warps: one of them is short
]
#: multiprocessors and KB of shared memory. On more multiprocessors more blocks share the columns
GPUS = {"one": (1, CONSUMER), "large": (4, A100), "many": (999, CONSUMER), "many, large": (999, A100)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "tokens", "out", "columns", "added"),
    [
        (gpu, *case)
        for case in CASES
        for gpu in GPUS
        if case[0] > 32 or gpu == "one" or (gpu == "many" and case[2] > 128)
    ],
)
def test_product(kernel, gpu: str, tokens: int, out: int, columns: int, added: str) -> None:
    w = torch.randn(out, columns).bfloat16()
    values, positions = pack24(w.masked_fill(nm_mask_ref(torch.rand(out, columns), 2, 4), 0))
    x = torch.randn(tokens, columns).bfloat16()
    given = {
        "bias": torch.randn(out).bfloat16(),
        "residual": torch.randn(tokens, out).bfloat16(),
        "rotation": torch.linalg.qr(torch.randn(out, out))[0].bfloat16().contiguous(),
    }
    rest = [given[name] if name in added.split() else None for name in given]

    def address(t: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if t is None else t.data_ptr())

    transposed = None if rest[2] is None else rest[2].T.contiguous()  # as the kernel reads the rotation
    want = sparse24_linear_ref(
        x.double(), values.double(), positions, *(None if t is None else t.double() for t in rest)
    )
    sizes = [ctypes.c_int64(n) for n in (columns, out, tokens, *GPUS[gpu])]
    for backwards, early in ((False, False), (True, True)):
        y = torch.full((tokens, out), torch.nan, dtype=torch.bfloat16)
        tensors = [address(t) for t in (x, values, positions, *rest[:2], transposed, y)]
        kernel(*tensors, *sizes, ctypes.c_bool(backwards), ctypes.c_bool(early))
        tolerance = 2**-8 * float(want.square().mean().sqrt())
        torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=tolerance)


#: rows of each expert, the rows and columns of a weight
EXPERTS = [
    ((1,), 16, 64),
    ((0, 1, 0, 0, 1), 33, 128),
    ((3, 0, 9, 1), 40, 192),  # the mean is small, and an expert has more rows than a block
    ((0, 16, 20, 0, 7), 48, 64),
    ((30, 40, 1), 32, 64),
    ((0, 64, 65, 129, 0), 130, 128),
    ((1,) * 300, 16, 64),  # more experts than a block has threads
    ((0,) * 270 + (2, 0, 1), 16, 64),
    ((8, 8, 16, 0, 4), 16, 64),  # experts that begin at a multiple of the rows of a block
]


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [CONSUMER, A100])
@pytest.mark.parametrize(("numbers", "out", "columns"), EXPERTS, ids=str)
def test_experts(library, numbers: tuple[int, ...], out: int, columns: int, kilobytes: int) -> None:
    """The product of each expert with its rows, and no other."""
    experts, rows = len(numbers), sum(numbers)
    w = torch.randn(experts * out, columns).bfloat16()
    w.masked_fill_(nm_mask_ref(torch.rand(w.shape), 2, 4), 0)
    values, positions = pack24(w)
    x, bias = torch.randn(rows, columns).bfloat16(), torch.randn(experts, out).bfloat16()
    ends = torch.tensor(numbers).cumsum(0).int()
    weights = w.double().unflatten(0, (experts, out))
    products = [part @ of.T for part, of in zip(x.double().split(numbers), weights, strict=True)]
    for added, backwards in ((None, False), (bias, True)):
        y = torch.full((rows, out), torch.nan, dtype=torch.bfloat16)
        addresses = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (x, values, positions)]
        addresses += [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (added, y, ends)]
        sizes = [ctypes.c_int64(n) for n in (experts, columns, out, rows, kilobytes)]
        library.skinny_experts(*addresses, *sizes, ctypes.c_bool(backwards), ctypes.c_bool(not backwards))
        of_rows = 0 if added is None else bias.double().repeat_interleave(torch.tensor(numbers), 0)
        want = torch.cat(products) + of_rows
        tolerance = 2**-8 * float(want.square().mean().sqrt())
        torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=tolerance)


@pytest.mark.parametrize("last", [-5, 0, 2, 10_000])
def test_wrong_ends_stay_inside(library, last: int) -> None:
    """Whatever the numbers of rows, nothing outside of the tensors is read or written."""
    w = torch.randn(4 * 16, 64).bfloat16().masked_fill(nm_mask_ref(torch.rand(64, 64), 2, 4), 0)
    values, positions = pack24(w)
    x = torch.randn(6, 64).bfloat16()
    guarded = torch.full((3, 6, 16), torch.nan, dtype=torch.bfloat16)
    ends = torch.tensor([3, 9_999, 1, last], dtype=torch.int32)
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (x, values, positions)]
    addresses += [ctypes.c_void_p(t) for t in (None, guarded[1].data_ptr(), ends.data_ptr())]
    sizes = [ctypes.c_int64(n) for n in (4, 64, 16, 6, CONSUMER)]
    library.skinny_experts(*addresses, *sizes, ctypes.c_bool(False), ctypes.c_bool(True))
    assert bool(guarded[0].isnan().all()) and bool(guarded[2].isnan().all())
