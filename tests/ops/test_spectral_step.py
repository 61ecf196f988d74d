"""spectral_step: its input and its values. On a CPU the op is its reference.

tests/native/test_spectral_step_on_cpu.py compares the values of the GPU's kernel on a CPU.
"""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from drot.model.rotation import orthogonality_error
from drot.ops import spectral_step, spectral_step_ref
from drot.rotation.retraction import DIRECTIONS, LAST_STEPS, STEPS, SpectralStep
from drot.rotation.tensor_cores import MARGIN, angles

POLYNOMIALS = list(chain.from_iterable(STEPS))
NUMBERS = (0.9, POLYNOMIALS, MARGIN)  # decay, polynomials, margin
THETA = 0.3


def case(count: int, n: int, device: str = "cpu") -> list[Tensor]:
    """q, momentum, gradient, unit and angle."""
    q = torch.linalg.qr(torch.randn(count, n, n))[0].contiguous()
    momentum = torch.randn(count, n, n).triu(1).bfloat16()
    tensors = [q, momentum, torch.randn(count, n, n), torch.tensor(0.5), angles([THETA], q.device)[0]]
    return [t.to(device) for t in tensors]


@pytest.mark.parametrize(
    ("n", "count"),
    [
        *((16, 1), (48, 3), (64, 2), (80, 1), (112, 2), (128, 3)),
        pytest.param(128, 200, marks=pytest.mark.slow),
    ],
)
def test_values(n: int, count: int, device: str) -> None:
    tensors = case(count, n, device)
    exact = [t.double() for t in tensors]
    before = exact[0].clone()
    spectral_step_ref(*exact, *NUMBERS)
    spectral_step(*tensors, *NUMBERS)
    for found, expected, tolerance in (
        (tensors[0].double() - before, exact[0] - before, 0.05),
        (tensors[1].double().triu(1), exact[1].triu(1), 2**-7),
    ):
        error = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert float(error.max()) < tolerance
    assert orthogonality_error(tensors[0]) < 0.01


def test_autocast_changes_nothing(device: str) -> None:
    tensors = case(2, 16, device)
    plain = [t.clone() for t in tensors]
    spectral_step(*plain, *NUMBERS)
    with torch.autocast(device, torch.bfloat16):
        spectral_step(*tensors, *NUMBERS)
    assert all(map(torch.equal, tensors, plain))
    assert not tensors[1].tril().any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_repeats_the_step_cuda() -> None:
    tensors, again = case(2, 64, "cuda"), case(2, 64, "cuda")
    for mine, theirs in zip(tensors, again, strict=True):
        theirs.copy_(mine)
    start = [t.clone() for t in tensors[:2]]
    graph = torch.cuda.CUDAGraph()
    spectral_step(*tensors, *NUMBERS)  # loads the kernel, which a capture must not do
    with torch.cuda.graph(graph):
        spectral_step(*tensors, *NUMBERS)
    for t, first in zip(tensors, start, strict=False):
        t.copy_(first)
    for _ in range(3):
        graph.replay()
        spectral_step(*again, *NUMBERS)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, again, strict=True))


def test_nan_reaches_q(device: str) -> None:
    tensors = case(3, 64, device)
    tensors[2][1, 5, 7] = torch.nan
    spectral_step(*tensors, *NUMBERS)
    assert tensors[0][1].isnan().all() and tensors[0][[0, 2]].isfinite().all()


def test_other_strides_of_the_gradient(device: str) -> None:
    tensors = case(2, 48, device)
    other = [t.clone() for t in tensors]
    other[2] = tensors[2].mT.contiguous().mT
    spectral_step(*tensors, *NUMBERS)
    spectral_step(*other, *NUMBERS)
    assert torch.equal(tensors[0], other[0])


def test_no_matrices(device: str) -> None:
    spectral_step(*case(0, 16, device), *NUMBERS)


@pytest.mark.slow
def test_torch_accepts_the_op_and_compiles_it(device: str) -> None:
    tensors = case(2, 48, device)
    torch.library.opcheck(torch.ops.drot.spectral_step.default, (*tensors, *NUMBERS))
    mine, theirs = ([t.clone() for t in tensors] for _ in range(2))
    step = torch.compile(lambda *t: spectral_step(*t, *NUMBERS), fullgraph=True, backend="aot_eager")
    step(*mine)
    spectral_step(*theirs, *NUMBERS)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not torch.equal(mine[0], tensors[0])


def test_reference_follows_the_step_in_fp64() -> None:
    """SpectralStep has the same polynomials but another norm. For a narrow spectrum J is the same."""
    q, _, _, unit, angle = (t.double() for t in case(2, 32))
    basis = torch.linalg.qr(torch.randn(2, 32, 32).double())[0]
    blocks = torch.block_diag(*[torch.tensor([[0.0, v], [-v, 0.0]]) for v in torch.linspace(0.9, 1, 16)])
    gradient = q @ (basis @ blocks.double() @ basis.mT)
    moved, other, momentum = q.clone(), q.clone(), torch.zeros_like(q)
    exact, polynomials = SpectralStep(other, DIRECTIONS["pruned"]), list(chain(*STEPS, *LAST_STEPS))
    for _ in range(2):
        spectral_step_ref(moved, momentum, gradient, unit, angle, 0.9, polynomials, MARGIN)
        exact(other, gradient, THETA)
    assert (moved - other).norm() < 0.01 * (other - q).norm()
    assert not momentum.tril().any() and momentum.any()


def test_fake_kernel() -> None:
    tensors = [t.to("meta") for t in case(2, 16)]
    assert spectral_step(*tensors, *NUMBERS) is None


def with_replaced(position: int, value: Any) -> list[Any]:
    arguments = [*case(2, 16), *NUMBERS]
    arguments[position] = value
    return arguments


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, zeros(16, 16), r"q must be \[count, n, n\], got \[16, 16\]"),
        (0, zeros(2, 16, 32), r"q must be \[count, n, n\], got \[2, 16, 32\]"),
        (0, zeros(2, 24, 24), "n must be a multiple of 16 from 16 to 128, got 24"),
        (0, zeros(2, 0, 0), "n must be a multiple of 16 from 16 to 128, got 0"),
        (0, zeros(2, 144, 144), "n must be a multiple of 16 from 16 to 128, got 144"),
        (0, zeros(2, 16, 16).double(), "q must be one of Float, got Double"),
        (0, zeros(2, 16, 16).mT, "q must be contiguous"),
        (1, zeros(2, 16, 16), "momentum must be one of BFloat16, got Float"),
        (1, zeros(3, 16, 16).bfloat16(), r"momentum must have the shape of q, .*, got \[3, 16, 16\]"),
        (1, zeros(2, 16, 16).bfloat16().mT, "momentum must be contiguous"),
        (2, zeros(2, 16, 16).half(), "gradient must be one of Float, got Half"),
        (2, zeros(1, 16, 16), "gradient must have the shape of q"),
        (3, zeros(1), r"unit must be a tensor of no dimensions, got \[1\]"),
        (3, zeros().double(), "unit must be one of Float, got Double"),
        (4, zeros(3), r"angle must be \[2\], got \[3\]"),
        (4, zeros(2).double(), "angle must be one of Float, got Double"),
        (5, float("nan"), "decay must be finite, got nan"),
        (6, [], "polynomials must hold a, b and c of 1 to 8 polynomials, got 0 numbers"),
        (6, [1.0, 2.0], "got 2 numbers"),
        (6, [1.0] * 27, "got 27 numbers"),
        (6, [1.0, float("inf"), 0.0], "polynomials must be finite"),
        (6, [1.0, -1.0, -1.0, 1.0, -1.0, -1.0], "c of every polynomial but the first must be at least 0"),
        (7, 0.0, "margin must be above 0 and finite, got 0"),
        (7, float("inf"), "margin must be above 0 and finite, got inf"),
    ],
)
def test_wrong_input(position: int, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spectral_step(*with_replaced(position, value))
