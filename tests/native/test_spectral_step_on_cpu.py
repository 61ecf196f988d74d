"""The CUDA kernel of spectral_step, run on a CPU (block_on_cpu.h), against fp64 and the path of products.

The tests cover what the source determines: indices, barriers, signs and transpositions, in both orders of the
threads. They do not show that a GPU arranges the operands of its tensor cores as the PTX manual says, nor how
fast the kernel is.
"""

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import compiled_kernels
from torch import Tensor

from drot.model.rotation import orthogonality_error
from drot.ops import spectral_step_ref
from drot.rotation.retraction import DIRECTIONS, STEPS
from drot.rotation.tensor_cores import MARGIN, TensorCoreStep, angles, polar_factor

pytestmark = pytest.mark.slow
POLYNOMIALS = tuple(itertools.chain.from_iterable(STEPS))
NUMBERS = (0.9, POLYNOMIALS, MARGIN)  # decay, polynomials, margin
SM_86 = 98 * 1024  # bytes that Launcher::shared_memory() returns on the GPUs that have least
TURN = angles([0.5], torch.device("cpu"))[0]
ONE = torch.tensor(1.0)
Step = Callable[..., None]


def between_nans(t: Tensor) -> Tensor:
    store = torch.full((t.numel() + 128,), torch.nan, dtype=t.dtype)
    return store[64:-64].view(t.shape).copy_(t)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    path = compiled_kernels("spectral_step")
    library = ctypes.CDLL(str(path))
    library.spectral_step.restype = ctypes.c_char_p
    return library


def step_of(library: ctypes.CDLL, backwards: bool) -> Step:
    """The op as the dispatcher calls it. Each tensor lies between NaNs, which must stay."""

    def call(*tensors_and_numbers: Any) -> None:
        *tensors, decay, polynomials, margin = tensors_and_numbers
        copies = [between_nans(t) for t in tensors]
        complaint = library.spectral_step(
            backwards,
            ctypes.c_int64(SM_86),
            *(ctypes.c_void_p(t.data_ptr()) for t in copies),
            *(ctypes.c_int64(size) for size in tensors[0].shape[:2]),
            ctypes.c_double(decay),
            (ctypes.c_double * len(polynomials))(*polynomials),
            ctypes.c_int64(len(polynomials)),
            ctypes.c_double(margin),
        )
        assert complaint == b"", complaint
        for given, copy in zip(tensors, copies, strict=True):
            margins = copy._base
            assert margins is not None and margins[:64].isnan().all() and margins[-64:].isnan().all()
            given.copy_(copy)

    return call


@pytest.fixture(params=[False, True], ids=["upwards", "backwards"])
def step(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Step:
    return step_of(library, request.param)


def orthogonal(count: int, n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(count, n, n, dtype=torch.float64))[0]


def skew(count: int, n: int, smallest: float) -> Tensor:
    """Skew-symmetric [count, n, n] in fp64 with singular values from `smallest` to 1."""
    values = torch.linspace(smallest, 1, n // 2, dtype=torch.float64)
    blocks = torch.zeros(n, n, dtype=torch.float64)
    at = 2 * torch.arange(n // 2)
    blocks[at, at + 1], blocks[at + 1, at] = values, -values
    basis = orthogonal(count, n)
    return basis @ blocks @ basis.mT


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a matrix of the stack, in the Frobenius norm."""
    difference = (found.double() - expected).flatten(1).norm(dim=1)
    return float((difference / expected.flatten(1).norm(dim=1)).max())


def case(n: int, count: int) -> tuple[Tensor, ...]:
    """q, momentum, gradient and unit. u is well-conditioned, because bf16 is good to 1 % of J only there."""
    q = orthogonal(count, n)
    s = skew(count, n, 0.5)
    symmetric = torch.randn(count, n, n, dtype=torch.float64)
    gradient = q @ (s + 0.2 / n**0.5 * (symmetric + symmetric.mT))
    momentum = (s + 0.1 * skew(count, n, 0.5)).triu(1).bfloat16()
    momentum += torch.where(torch.ones(n, n).tril().bool(), torch.nan, 0)  # is not to be read
    # 1 - qᵀq is as large as the turn
    q = (q + 0.2 / n**0.5 * torch.randn(count, n, n)).float()
    return q, momentum, gradient.float().contiguous(), torch.tensor(0.5)


def exact_step(q: Tensor, momentum: Tensor, gradient: Tensor, unit: Tensor, angle: Tensor) -> list[Tensor]:
    """q and the momentum after the step in fp64."""
    doubles = [t.double() for t in (q, momentum, gradient, unit, angle)]
    spectral_step_ref(*doubles, *NUMBERS)
    return doubles[:2]


@pytest.mark.parametrize(
    ("n", "count", "angle"),
    [
        *((16, 3, a) for a in (TURN, torch.zeros(2), torch.tensor([0.0, 0.7]), torch.tensor([0.7, 0.0]))),
        *((48, 1, TURN), (64, 3, TURN)),
    ],
)
def test_each_term_is_the_term_in_fp64(step: Step, n: int, count: int, angle: Tensor) -> None:
    check_step(step, n, count, angle)


@pytest.mark.parametrize(("n", "count"), [(80, 1), (128, 3)])
def test_a_step_is_the_step_in_fp64(step: Step, n: int, count: int) -> None:
    check_step(step, n, count, TURN)


def check_step(step: Step, n: int, count: int, angle: Tensor) -> None:
    q, momentum, gradient, unit = case(n, count)
    moved, new = q.clone(), momentum.clone()
    step(moved, new, gradient, unit, angle, *NUMBERS)
    want, want_new = exact_step(q, momentum, gradient, unit, angle)
    assert relative_error(moved - q, want - q.double()) < 0.02
    assert relative_error(new.triu(1), want_new.triu(1)) < 2**-8
    assert torch.equal(new.tril().view(torch.int16), momentum.tril().view(torch.int16))


def test_polar_factor_of_the_path_of_products(step: Step) -> None:
    """With q = 1 and the factors 1 and 0 of J and J², the new q is 1 + J."""
    u = skew(2, 48, 0.02)
    q, momentum = torch.eye(48).repeat(2, 1, 1), torch.zeros(2, 48, 48, dtype=torch.bfloat16)
    gradient = (0.5 * u).float().bfloat16().float()  # u is rounded to bf16 once, by both
    step(q, momentum, gradient, ONE, torch.tensor([1.0, 0.0]), 0.0, POLYNOMIALS, MARGIN)
    j = q.double() - torch.eye(48)
    assert relative_error(j, polar_factor((2 * gradient).bfloat16())) < 0.02
    assert torch.equal(j, -j.mT)


@pytest.mark.parametrize(
    "polynomials",
    [(1.5, 0.5, 0.0), (2.0, -1.4, 0.4), (1.9, -1.3, 0.4, 1.5, -0.5, 0.0), (*POLYNOMIALS, 1.5, -0.5, 0.0)],
)
def test_any_polynomials(step: Step, polynomials: tuple[float, ...]) -> None:
    q, momentum, gradient, unit = case(32, 1)
    want, m = q.double(), momentum.double()
    spectral_step_ref(want, m, gradient.double(), unit.double(), TURN.double(), 0.5, polynomials, 0.8)
    moved = q.clone()
    step(moved, momentum, gradient, unit, TURN, 0.5, polynomials, 0.8)
    assert relative_error(moved - q, want - q.double()) < 0.02


def test_many_steps_lose_no_more_orthogonality_than_the_path_of_products(library: ctypes.CDLL) -> None:
    """The gradients are random: u has small singular values, where the polynomials multiply rounding."""
    step = step_of(library, backwards=False)
    q = orthogonal(1, 48).float().contiguous()
    ours, theirs, momentum = q.clone(), q.clone(), torch.zeros(1, 48, 48, dtype=torch.bfloat16)
    path = TensorCoreStep(q, DIRECTIONS["pruned"])
    for _ in range(20):
        gradient = torch.randn(1, 48, 48)
        path(theirs, gradient, TURN)
        assert path._unit is not None
        step(ours, momentum, gradient, path._unit, TURN, *NUMBERS)
        assert orthogonality_error(ours) < 0.01
    assert orthogonality_error(ours) < 1.5 * orthogonality_error(theirs)
    assert (ours - theirs).norm() < 0.5 * (ours - q).norm()


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_small_and_large_gradients(step: Step, scale: float) -> None:
    q, _, gradient, unit = case(16, 1)
    results = []
    for factor in (1.0, scale):
        moved, momentum = q.clone(), torch.zeros(1, 16, 16, dtype=torch.bfloat16)
        step(moved, momentum, factor * gradient, unit, TURN, *NUMBERS)
        results.append(moved)
    assert relative_error(results[1] - q, (results[0] - q).double()) < 0.02


def test_nothing_to_turn(step: Step) -> None:
    q = orthogonal(1, 16).float().contiguous()
    moved, momentum, gradient = q.clone(), torch.zeros(1, 16, 16, dtype=torch.bfloat16), torch.zeros_like(q)
    step(moved, momentum, gradient, ONE, TURN, *NUMBERS)
    assert (moved - q).abs().max() < 2**-8 and not momentum.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_its_q_alone(step: Step, bad: float) -> None:
    q, _, gradient, unit = case(16, 3)
    gradient[1, 3, 3] = bad
    moved, momentum = q.clone(), torch.zeros(3, 16, 16, dtype=torch.bfloat16)
    step(moved, momentum, gradient, unit, TURN, *NUMBERS)
    assert moved[1].isnan().all() and moved[[0, 2]].isfinite().all()
