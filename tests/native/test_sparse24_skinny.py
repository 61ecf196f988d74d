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
