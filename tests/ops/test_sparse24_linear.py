"""sparse24_linear against fp64 products with the unpacked weight."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drot._C import cpu_instructions
from drot.ops import pack24, sparse24_compress, sparse24_linear, sparse24_linear_ref, unpack24

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOKENS = [1, 2, 3, 4, 5, 6, 7, 17, 33, 50, 64, 300]
#: which of bias, residual and rotation are given
ADDED = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)]


def packed(out: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A random packed 2:4 weight. Its groups hold zero to two non-zeros, at all positions."""
    w = torch.randn(out, columns // 4, 4)
    keep = torch.rand(w.shape).argsort(-1) < torch.randint(0, 3, (*w.shape[:-1], 1))
    return pack24((w * keep).reshape(out, columns).to(device, dtype))


def problem(tokens: int, out: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns x, values, positions, bias, residual, rotation."""
    made = [torch.randn(tokens, columns), torch.randn(out), torch.randn(tokens, out)]
    x, bias, residual = (t.to(device, dtype) for t in made)
    rotation = torch.linalg.qr(torch.randn(out, out))[0].to(device, dtype)
    return [x, *packed(out, columns, dtype, device), bias, residual, rotation]


def exact(x: Tensor, values: Tensor, positions: Tensor, *added: Tensor | None) -> Tensor:
    wide = [None if t is None else t.double() for t in added]
    return sparse24_linear_ref(x.double(), values.double(), positions, *wide)


def assert_near(got: Tensor, want: Tensor, factor: float = 1.0) -> None:
    """Checks the error against that of sums in fp32 and one rounding to the dtype."""
    assert got.shape == want.shape
    if not got.numel():
        return
    eps = torch.finfo(got.dtype).eps
    size = want.square().mean().sqrt() + 1e-30
    error = (got.double() - want).abs()
    assert float((error / (want.abs() + size)).max()) < factor * (0.6 * eps + 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("out", "columns"), [(1, 8), (37, 72), (130, 1160), (64, 2048)])
def test_product(out: int, columns: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    x, values, positions, *_ = problem(tokens, out, columns, dtype, device)
    want = x.double() @ unpack24(values, positions).double().mT
    # cuBLAS, which multiplies what no kernel of drot supports, may round sums of parts to the dtype
    assert_near(sparse24_linear(x, values, positions), want, factor=1.0 if device == "cpu" else 2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 16, 19])
@pytest.mark.parametrize("chosen", ADDED)
def test_what_is_added(chosen: tuple[int, int, int], tokens: int, dtype: torch.dtype, device: str) -> None:
    x, values, positions, *rest = problem(tokens, 70, 264, dtype, device)
    added = [t if choice else None for t, choice in zip(rest, chosen, strict=True)]
    got = sparse24_linear(x, values, positions, *added)
    # on a GPU the dense and the cuSPARSELt product are rounded before the residual and the bias are added
    assert_near(got, exact(x, values, positions, *added), factor=1.0 if device == "cpu" else 3.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 8, 16, 100])
def test_compressed(tokens: int, dtype: torch.dtype, device: str) -> None:
    x, values, positions, bias, residual, rotation = problem(tokens, 64, 256, dtype, device)
    compressed = sparse24_compress(values, positions)
    assert compressed.dtype == torch.uint8
    assert compressed.numel() == 0 or device != "cpu"
    for added in ((), (bias,), (bias, residual), (None, residual, rotation)):
        padded = (*added, *[None] * (3 - len(added)))
        got = sparse24_linear(x, values, positions, *padded, compressed)
        assert_near(got, exact(x, values, positions, *added), factor=1.0 if device == "cpu" else 3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "out", "columns", "rotate"),
    [
        (3, 2176, 2944, True),  # each place of the queue is filled again, by the rotation too
        (2, 11000, 704, False),  # more blocks than run at once, the last of them with few rows
        (13, 2752, 2944, True),  # several blocks share the columns, of the rotation too
        (9, 90, 5824, False),  # so do many
    ],
)
def test_shapes_of_the_skinny_kernel(
    tokens: int, out: int, columns: int, rotate: bool, dtype: torch.dtype, device: str
) -> None:
    """What the small sizes of the other tests leave out on a GPU of 69 to 135 multiprocessors."""
    x = torch.randn(tokens, columns).to(device, dtype)
    values, positions = packed(out, columns, dtype, device)
    bias, residual = torch.randn(out).to(device, dtype), torch.randn(tokens, out).to(device, dtype)
    q = torch.randn(out, out) / out**0.5 if rotate else None
    rotation = None if q is None else q.to(device, dtype).t()
    got = sparse24_linear(x, values, positions, bias, residual, rotation)
    assert_near(got, exact(x, values, positions, bias, residual, rotation), factor=1.0)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 20, 200])
def test_autocast(tokens: int, dtype: torch.dtype, autocast: torch.dtype, device: str) -> None:
    """The result has the bytes that it has without autocast."""
    # with 72 rows the kernel for few tokens leaves the rotation to a product of torch
    given = problem(tokens, 72, 256, dtype, device)
    want = sparse24_linear(*given)
    with torch.autocast(device, autocast):
        assert torch.equal(sparse24_linear(*given), want)


def test_compressed_for_another_weight(device: str) -> None:
    # of a shape for which no test before has chosen an algorithm: the choice tries cuSPARSELt
    x, values, positions, *_ = problem(100, 96, 320, torch.bfloat16, device)
    compressed = sparse24_compress(values, positions)
    if compressed.numel() == 0:
        pytest.skip("cuSPARSELt cannot be used here")
    with pytest.raises(ValueError, match="compressed must hold"):
        sparse24_linear(x, values, positions, compressed=compressed[:-16])


@pytest.mark.parametrize(
    "sizes",
    # the blocks of the kernel for few tokens for 32 and for 64 of them, and two groups of tokens; on a GPU of
    # many multiprocessors several blocks share the columns
    [(50, 128, 256), (24, 128, 2048), (40, 256, 4096), (100, 128, 2048)],
)
def test_every_algorithm_of_a_gpu(sizes: tuple[int, int, int], device: str, tmp_path) -> None:
    """The tuning cache gets the fastest algorithm; the others, written into that file, are as accurate."""
    if device == "cpu":
        pytest.skip("the CPU has no tuning cache")
    script = (
        "import sys, torch\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_sparse24_linear import assert_near, exact, problem\n"
        "from drot.ops import sparse24_compress, sparse24_linear\n"
        "torch.manual_seed(0)\n"
        f"given = problem(*{sizes}, torch.bfloat16, 'cuda')\n"
        "compressed = sparse24_compress(*given[1:3])\n"
        "assert_near(sparse24_linear(*given, compressed), exact(*given), factor=3.0)\n"
    )
    file = tmp_path / "measured.txt"

    def run() -> None:
        command = [sys.executable, "-P", "-c", script, str(Path(__file__).parent)]
        subprocess.run(command, env={**os.environ, "DROT_CACHE": str(tmp_path)}, check=True)

    run()
    (line,) = file.read_text().splitlines()
    key, chosen = line.split("\t")
    algorithms = key.split(": ")[-1].split()
    assert chosen.split()[0] in algorithms and {"skinny", "dense"} <= set(algorithms)
    for algorithm in set(algorithms) - {chosen.split()[0]}:
        file.write_text(f"{key}\t{algorithm}{' 0 1 0 0' if algorithm == 'cusparselt' else ''}\n")
        run()
        assert len(file.read_text().splitlines()) == 1


@pytest.mark.parametrize("tokens", [40, 130, 520])
def test_several_parts_of_a_large_weight(tokens: int, device: str) -> None:
    """More rows, columns and tokens than are multiplied together on a CPU with AMX."""
    given = problem(tokens, 530, 1096, torch.bfloat16, device)
    assert_near(sparse24_linear(*given), exact(*given), factor=1.0 if device == "cpu" else 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["baseline", "avx512"])
def test_the_instruction_sets_agree(level: str) -> None:
    """Tests of this file without AVX, or without AMX, in another process: a process chooses its instruction
    set once.
    """
    if os.environ.get("DROT_SIMD") == level:
        pytest.skip(f"this is the run with {level}")
    if level == "avx512" and "AMX" not in cpu_instructions():
        pytest.skip("this CPU has no AMX, so the other tests leave it out")
    chosen = "test_product or test_what_is_added or test_memory_beside_x_is_not_read or several_parts"
    # -P: imports the installed drot, not the working directory, which may not be built
    pytest_here = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command = [*pytest_here, "-k", chosen, __file__]
    done = subprocess.run(command, env={**os.environ, "DROT_SIMD": level}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (0, 24), (2, 0, 24)])
def test_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    values, positions = packed(9, 24, torch.bfloat16, device)
    x = torch.randn(shape).to(device, torch.bfloat16)
    residual = torch.randn(*shape[:-1], 9).to(device, torch.bfloat16)
    got = sparse24_linear(x, values, positions, None, residual)
    assert_near(got, exact(x, values, positions, None, residual))


@pytest.mark.parametrize(("out", "columns"), [(0, 16), (5, 0), (0, 0)])
def test_empty_weight(out: int, columns: int, device: str) -> None:
    values, positions = pack24(torch.zeros(out, columns, device=device))
    bias = torch.randn(out, device=device)
    got = sparse24_linear(torch.randn(3, columns, device=device), values, positions, bias)
    assert torch.equal(got, bias.expand(3, out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_non_contiguous(tokens: int, dtype: torch.dtype, device: str) -> None:
    x, values, positions, bias, residual, rotation = problem(tokens, 40, 64, dtype, device)
    want = exact(x, values, positions, bias, residual, rotation)
    wide = torch.randn(tokens, 131, device=device).to(dtype)
    wide[:, 3:67] = x
    for view in (wide[:, 3:67], x.mT.contiguous().mT, torch.stack([x, x], -1)[..., 1]):
        got = sparse24_linear(
            view,
            values.mT.contiguous().mT,
            positions.mT.contiguous().mT,
            torch.stack([bias, bias], -1)[:, 0],
            residual.mT.contiguous().mT,
            rotation.mT.contiguous().mT,
        )
        assert_near(got, want, factor=1.0 if device == "cpu" else 3.0)
    assert_near(sparse24_linear(x[:1].expand(tokens, 64), values, positions, bias)[-1:],
                exact(x[:1], values, positions, bias))  # fmt: skip


def test_memory_beside_x_is_not_read(device: str) -> None:
    """A NaN beside the rows of x does not reach the result: no vector reads there."""
    for tokens, dtype in itertools.product((1, 5, 40), (torch.float32, torch.bfloat16)):
        x, values, positions, *_ = problem(tokens, 33, 24, dtype, device)
        around = torch.full((tokens, 56), torch.nan, dtype=dtype, device=device)
        around[:, 8:32] = x
        assert_near(sparse24_linear(around[:, 8:32], values, positions), exact(x, values, positions))


def test_non_finite_values_reach_the_result(device: str) -> None:
    x, values, positions, *_ = problem(2, 16, 64, torch.bfloat16, device)
    values[3, 5], values[4, 0] = torch.inf, torch.nan
    got = sparse24_linear(x, values, positions)
    want = x.float() @ unpack24(values, positions).float().mT
    assert torch.equal(got.isfinite(), want.isfinite())


def test_result_is_the_same_again(device: str) -> None:
    x, values, positions, *added = problem(16, 128, 1024, torch.bfloat16, device)
    first = sparse24_linear(x, values, positions, *added)
    assert torch.equal(first, sparse24_linear(x, values, positions, *added))
    # the result does not depend on the number of threads
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(first, sparse24_linear(x, values, positions, *added))
    finally:
        torch.set_num_threads(before)


def test_wrong_input(device: str) -> None:
    x, values, positions, bias, residual, rotation = problem(2, 4, 16, torch.float32, device)

    def refused(message: str, *arguments: Tensor | None) -> None:
        with pytest.raises(ValueError, match=message):
            sparse24_linear(*arguments)  # type: ignore[arg-type]

    refused(
        r"x must be \[\.\.\., 16\], two columns for each of values, got \[2, 8\]", x[:, :8], values, positions
    )
    refused(r"x must be \[\.\.\., 16\].*got \[\]", x[0, 0], values, positions)
    refused("x must have the dtype of values, Float, got Half", x.half(), values, positions)
    refused("values must be one of BFloat16, Half, Float, got Double", x.double(), values.double(), positions)
    refused(r"values must have a multiple of 4 columns, got \[4, 6\]", x[:, :12], values[:, :6], positions)
    refused(r"positions must be \[4, 2\], got \[4, 1\]", x, values, positions[:, :1])
    refused("positions must be one of Byte, got Int", x, values, positions.int())
    refused(
        r"bias must be \[4\], one value for each row of values, got \[3\]", x, values, positions, bias[:3]
    )
    refused("bias must have the dtype of values", x, values, positions, bias.bfloat16())
    refused(r"residual must be \[2, 4\], the shape of the result, got \[1, 4\]",
            x, values, positions, None, residual[:1])  # fmt: skip
    refused("rotation must come with a residual", x, values, positions, None, None, rotation)
    refused(r"rotation must be \[4, 4\], got \[4, 3\]", x, values, positions, None, residual, rotation[:, :3])
    refused("rotation must have the dtype of values", x, values, positions, None, residual, rotation.half())
    refused("compressed must be one of Byte", x, values, positions, None, None, None, bias)
    with pytest.raises(ValueError, match=r"positions must be \[4, 2\], got \[4, 1\]"):
        sparse24_compress(values, positions[:, :1])


def test_backward_is_refused(device: str) -> None:
    x, values, positions, *_ = problem(2, 4, 16, torch.float32, device)
    y = sparse24_linear(x.requires_grad_(), values, positions)
    with pytest.raises(RuntimeError, match="derivative for drot::sparse24_linear is not implemented"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_opcheck(dtype: torch.dtype, device: str) -> None:
    for tokens in (3, 20):
        x, values, positions, *added = problem(tokens, 24, 64, dtype, device)
        torch.library.opcheck(torch.ops.drot.sparse24_linear.default, (x, values, positions))
        torch.library.opcheck(torch.ops.drot.sparse24_linear.default, (x, values, positions, *added))
        torch.library.opcheck(torch.ops.drot.sparse24_linear.default, (x[None], values, positions))


@pytest.mark.slow
def test_compile(device: str) -> None:
    x, values, positions, *added = problem(5, 32, 64, torch.float32, device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: Tensor, *rest: Tensor) -> Tensor:
        return torch.relu(sparse24_linear(x * 2, *rest))

    want = exact(x * 2, values, positions, *added).relu()
    assert_near(layer(x, values, positions, *added), want)
