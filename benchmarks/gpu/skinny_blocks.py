"""The skinny kernel of sparse24_linear with many blocks, against cuBLAS with the dense weight, on a GPU.

So the blocks of csrc/ops/cuda/sparse24_skinny.cuh were chosen, over weights of LLaMA's layers. nvcc compiles
skinny_blocks.cu first. A block is named by its tiles of rows, its tiles of tokens, its warps with different
rows, and the chunks in its queue. Each result is compared with fp64.

    python benchmarks/gpu/skinny_blocks.py --csv
"""

import ctypes
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCHMARKS))

from _harness import arguments, graphs, interleaved, report  # noqa: E402
from bench_sparse24_linear import COLD_BYTES, sparse_weight  # noqa: E402

from drot.ops import pack24  # noqa: E402

#: rows and columns of the weights, and whether a rotation is added
WEIGHTS = [(4096, 14336, False), (4096, 14336, True), (28672, 4096, False), (6144, 4096, False)]
WEIGHTS += [(4096, 4096, False), (8192, 28672, False)]
TOKENS = [1, 4, 8, 16, 32, 64]
TOLERANCE = 5e-3


def compiled(folder: str) -> ctypes.CDLL:
    """skinny_blocks.cu as a library for this GPU."""
    library, (major, minor) = Path(folder) / "blocks.so", torch.cuda.get_device_capability()
    command = ["nvcc", "-O3", "-std=c++20", "--expt-relaxed-constexpr", f"-arch=sm_{major}{minor}", "-shared"]
    command += ["-Xcompiler=-fPIC", "-I", str(BENCHMARKS.parent / "csrc"), "-o", str(library)]
    subprocess.run([*command, str(Path(__file__).with_suffix(".cu"))], check=True)
    found = ctypes.CDLL(str(library))
    found.name_of.restype, found.shared_bytes.restype = ctypes.c_char_p, ctypes.c_int64
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found.multiply.argtypes = [number, *[pointer] * 7, *[ctypes.c_int64] * 2, number, number, pointer]
    return found


def variants(library: ctypes.CDLL, tokens: int) -> dict[str, int]:
    """Name → number of the blocks that have room for half of the tokens at least, and fit the GPU."""
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    found, room = {}, ctypes.c_int()
    for number in itertools.count():
        name = library.name_of(number, ctypes.byref(room))
        if name is None:
            return found
        if tokens <= 2 * room.value <= max(16, 4 * tokens) and library.shared_bytes(number, tokens) <= most:
            found[name.decode()] = number


def bench(library: ctypes.CDLL, out: int, columns: int, rotate: bool, tokens: int, options: object) -> None:
    dense = sparse_weight(out, columns, torch.bfloat16, "cuda")
    values, positions = pack24(dense)
    copies = COLD_BYTES // (values.nbytes + positions.nbytes) + 1
    weights = itertools.cycle([dense.clone() for _ in range(copies)])
    packed = itertools.cycle([(values.clone(), positions.clone()) for _ in range(copies)])
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    residual = torch.randn(tokens, out, device="cuda").bfloat16() if rotate else None
    rotation = torch.randn(out, out, device="cuda").div_(out**0.5).bfloat16() if rotate else None
    y, workspace = x.new_empty(tokens, out), torch.empty(2**28, dtype=torch.uint8, device="cuda")
    wanted = x.double() @ dense.double().T
    if residual is not None and rotation is not None:
        wanted += residual.double() @ rotation.double().T
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    def linear() -> Tensor:
        product = torch.nn.functional.linear(x, next(weights))
        if residual is None or rotation is None:
            return product
        return product + torch.nn.functional.linear(residual, rotation)

    def block(number: int) -> Callable[[], None]:
        def call() -> None:
            tensors = (x, *next(packed), residual, rotation, y, workspace)
            pointers = (None if each is None else each.data_ptr() for each in tensors)
            stream = torch.cuda.current_stream().cuda_stream
            error = library.multiply(number, *pointers, columns, out, tokens, multiprocessors, stream)
            if error:
                raise RuntimeError(f"block {number} ended with CUDA error {error}")

        return call

    functions: dict[str, Callable[[], object]] = {"linear": linear}
    for name, number in variants(library, tokens).items():
        functions[name] = block(number)
        functions[name]()
        error = float((y.double() - wanted).norm() / wanted.norm())
        if not error < TOLERANCE:
            sys.exit(f"WRONG: the error of block {name} is {error:.1e}")
    timings = interleaved(graphs(functions, "cuda"), device="cuda", repeats=options.repeats)
    case = f"{out}x{columns} bfloat16, {tokens} tokens{', rotation' if rotate else ''}"
    report("skinny_blocks", case, timings, peer="linear", device="cuda", save=options.csv)


def main() -> None:
    options = arguments(__doc__).parse_args()
    if torch.device(options.device).type != "cuda":
        sys.exit("skinny_blocks.py needs a GPU")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(folder)
        for (out, columns, rotate), tokens in itertools.product(WEIGHTS, TOKENS):
            bench(library, out, columns, rotate, tokens, options)


if __name__ == "__main__":
    main()
