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
from compiled import compiled
from torch import Tensor

from drot.rotation.retraction import STEPS
from drot.rotation.tensor_cores import MARGIN, angles

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
    path = compiled(
        "spectral_step",
        *("-shared", "-fPIC", "-Wno-unknown-pragmas"),
        "-U_FORTIFY_SOURCE",  # its longjmp stays on one stack
        "-fno-sanitize-recover=undefined",
        sanitizer="undefined",
    )
    library = ctypes.CDLL(str(path))
    library.spectral_step.restype = ctypes.c_char_p
    return library


@pytest.fixture(params=[False, True], ids=["upwards", "backwards"])
def step(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Step:
    """The op as the dispatcher calls it. Each tensor lies between NaNs, which must stay."""

    def call(*tensors_and_numbers: Any) -> None:
        *tensors, decay, polynomials, margin = tensors_and_numbers
        copies = [between_nans(t) for t in tensors]
        complaint = library.spectral_step(
            request.param,
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


@pytest.mark.parametrize(("n", "count"), [(16, 3), (48, 1), (64, 3), (80, 1), (128, 1), (128, 3)])
def test_a_step_is_the_step_in_fp64(step: Step, n: int, count: int) -> None:
    q = orthogonal(count, n) + 0.1 / n**0.5 * torch.randn(count, n, n)  # so that 1 - qᵀq is not small
    symmetric = torch.randn(count, n, n, dtype=torch.float64)
    # u, for a momentum of about the size of S, is well-conditioned: bf16 is then good to a few percent of J
    s = skew(count, n, 0.5)
    gradient = torch.linalg.inv(q.mT) @ (0.5 * s + 0.02 * (symmetric + symmetric.mT))
    momentum = (s + 0.1 / n**0.5 * skew(count, n, 0.5)).triu(1).bfloat16()
    momentum += torch.full((n, n), torch.nan).tril().nan_to_num(nan=torch.nan)  # must not be read
    raise NotImplementedError
