"""sparse24_experts against fp64 products of each expert with its rows, and what torch expects of an op."""

import os
import subprocess
import sys

import pytest
import torch
from same_bytes import with_threads
from torch import Tensor

from drot.ops import pack24, sparse24_experts, sparse24_experts_ref, sparse24_linear, unpack24

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
#: rows of each expert: no expert has more than a few, or some do, or one has all
NUMBERS = [(1,), (0, 1, 0, 3, 2), (6, 7, 0, 1), (0, 0, 40), (70, 1, 0, 300), (1,) * 140, (0, 0)]
Problem = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def problem(numbers: tuple[int, ...], out: int, columns: int, dtype: torch.dtype, device: str) -> Problem:
    """x, values, positions, ends, bias. The groups of a weight hold zero to two non-zeros."""
    experts = len(numbers)
    w = torch.randn(experts * out, columns // 4, 4)
    keep = torch.rand(w.shape).argsort(-1) < torch.randint(0, 3, (*w.shape[:-1], 1))
    packed = pack24((w * keep).reshape(experts * out, columns).to(device, dtype))
    values, positions = (t.unflatten(0, (experts, out)) for t in packed)
    x, bias = (
        torch.randn(sum(numbers), columns).to(device, dtype),
        torch.randn(experts, out).to(device, dtype),
    )
    return x, values, positions, torch.tensor(numbers, device=device).cumsum(0).int(), bias


def exact(x: Tensor, values: Tensor, positions: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """By the dense weight of the expert of each row."""
    of_rows = torch.bucketize(torch.arange(len(x), device=x.device), ends.long(), right=True)
    dense = unpack24(values.flatten(0, 1), positions.flatten(0, 1)).double().unflatten(0, values.shape[:2])
    y = torch.einsum("ri,roi->ro", x.double(), dense[of_rows])
    return y if bias is None else y + bias.double()[of_rows]


def assert_near(got: Tensor, want: Tensor, factor: float = 1.0) -> None:
    """Checks the error against that of sums in fp32 and one rounding to the dtype."""
    assert got.shape == want.shape
    eps = torch.finfo(got.dtype).eps
    size = want.square().mean().sqrt() + 1e-30
    assert float(((got.double() - want).abs() / (want.abs() + size)).max()) < factor * (0.6 * eps + 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "columns"), [(1, 8), (37, 72), (130, 192)])
@pytest.mark.parametrize("numbers", [case for case in NUMBERS if sum(case)], ids=lambda n: f"{n[:5]}")
def test_products(numbers, out: int, columns: int, dtype: torch.dtype, device: str) -> None:
    *given, bias = problem(numbers, out, columns, dtype, device)
    factor = 1.0 if device == "cpu" else 2.0  # what no kernel of drot supports is multiplied by cuBLAS
    for arguments in (given, [*given, bias]):
        want = exact(*arguments)
        assert_near(sparse24_experts(*arguments), want, factor)
        wide = [t.double() if t.is_floating_point() else t for t in arguments]
        torch.testing.assert_close(sparse24_experts_ref(*wide), want)


@pytest.mark.slow
def test_the_instruction_sets_agree() -> None:
    """In another process: a process chooses its instruction set once."""
    if os.environ.get("DROT_SIMD") == "baseline":
        pytest.skip("this is the run without AVX")
    pytest_here = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command = [*pytest_here, "-k", "test_products and 130", __file__]
    done = subprocess.run(
        command, env={**os.environ, "DROT_SIMD": "baseline"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_of_each_expert_alone(dtype: torch.dtype) -> None:
    """On a CPU, with any number of threads."""
    numbers = (2, 0, 9, 1, 6)
    x, values, positions, ends, bias = problem(numbers, 130, 1032, dtype, "cpu")
    weights = zip(x.split(numbers), values, positions, bias, strict=True)
    want = torch.cat([sparse24_linear(*of_expert) for of_expert in weights])
    for threads in (1, 2, 3):
        with with_threads(threads):
            assert torch.equal(sparse24_experts(x, values, positions, ends, bias), want)


def test_nothing(device: str) -> None:
    for numbers, out, columns in (((0, 0), 3, 16), ((2, 1), 0, 16), ((), 4, 8)):
        *given, bias = problem(numbers, out, columns, torch.float32, device)
        assert sparse24_experts(*given, bias).shape == (sum(numbers), out)
    *given, bias = problem((2, 1), 5, 0, torch.float32, device)
    assert torch.equal(sparse24_experts(*given, bias), bias[[0, 0, 1]])


def test_non_contiguous(device: str) -> None:
    given = problem((1, 0, 8), 40, 64, torch.bfloat16, device)
    want = exact(*given)
    swapped = [t.mT.contiguous().mT if t.dim() > 1 else torch.stack([t, t], -1)[:, 0] for t in given]
    assert_near(sparse24_experts(*swapped), want)
    unaligned = given[0].new_zeros(given[0].numel() + 1)[1:].view_as(given[0]).copy_(given[0])
    assert_near(sparse24_experts(unaligned, *given[1:]), want)


WRONG = {
    "values must be .*experts, out, in/2": {1: torch.zeros(6, 8)},
    "positions must be": {2: torch.zeros(2, 3, 3, dtype=torch.uint8)},
    "positions must be one of": {2: torch.zeros(2, 3, 2)},
    r"x must be \[rows, 16\]": {0: torch.zeros(3, 8)},
    "x must have the dtype of values": {0: torch.zeros(3, 16).half()},
    r"ends must be \[2\]": {3: torch.tensor([3], dtype=torch.int32)},
    "ends must be one of Int, got Long": {3: torch.tensor([1, 3])},
    "ends must not descend, got 1 for expert 1": {3: torch.tensor([2, 1], dtype=torch.int32)},
    "ends must not descend, got -1 for expert 0": {3: torch.tensor([-1, 3], dtype=torch.int32)},
    "ends must end with the 3 rows of x, got 2": {3: torch.tensor([1, 2], dtype=torch.int32)},
    r"bias must be \[2, 3\]": {4: torch.zeros(3)},
    "bias must have the dtype of values": {4: torch.zeros(2, 3).half()},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message: str) -> None:
    given = list(problem((1, 2), 3, 16, torch.float32, "cpu"))
    for at, tensor in WRONG[message].items():
        given[at] = tensor
    with pytest.raises(ValueError, match=message):
        sparse24_experts(*given)


def test_backward_is_refused(device: str) -> None:
    x, *rest = problem((1, 2), 3, 64, torch.float32, device)
    with pytest.raises(RuntimeError, match="not implemented"):
        sparse24_experts(x.requires_grad_(), *rest).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_accepts_the_op_and_compiles_it(dtype: torch.dtype, device: str) -> None:
    given = problem((1, 0, 4), 40, 64, dtype, device)
    for arguments in (given, given[:4]):
        torch.library.opcheck(torch.ops.drot.sparse24_experts.default, arguments)
    compiled = torch.compile(lambda *a: 2 * sparse24_experts(*a), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), 2 * sparse24_experts(*given))


@pytest.mark.parametrize("numbers", [(1, 0, 4), (130, 0, 300)])
def test_a_graph_holds_it(numbers: tuple[int, ...], device: str) -> None:
    """A CUDA graph computes the experts of the ends that it finds when it runs."""
    if device == "cpu":
        pytest.skip("the CPU has no graphs")
    given = problem(numbers, 40, 64, torch.bfloat16, device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse24_experts(*given)
    other = torch.tensor([0, 2, sum(numbers)], dtype=torch.int32, device=device)
    given[3].copy_(other)
    graph.replay()
    assert_near(y, exact(*given))
