"""The source of the CUDA kernels of entropy_loss and pruned_importance, run by CPU threads.

It shows that indices, barriers, shuffles and edges are right, where no GPU is; not how fast they are.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from drot.ops import entropy_loss_ref, nm_mask_ref, pruned_importance_ref

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("c++")
DTYPES = [torch.float32, torch.float64]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    library = tmp_path_factory.mktemp("kernels") / "score_kernels.so"
    includes = [f"-I{path}" for path in (HERE, HERE.parent.parent / "csrc", *include_paths())]
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    command = [str(COMPILER), *flags, *includes, str(HERE / "score_kernels.cpp"), "-o", str(library)]
    build = subprocess.run(command, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    return ctypes.CDLL(str(library))


def call(kernels, name, y, m, *arguments, scale):
    """loss, dy, dm of a function that ends in (..., scale, dy, dm)."""
    function = getattr(kernels, f"{name}_{str(y.dtype).removeprefix('torch.')}")
    function.restype = ctypes.c_double
    dy, dm = torch.full_like(y, torch.nan), torch.full_like(y[0], torch.nan)

    def native(argument):
        if isinstance(argument, torch.Tensor):
            return ctypes.c_void_p(argument.data_ptr())
        return argument if isinstance(argument, bool | None) else ctypes.c_int64(argument)

    rows, columns = y.shape
    before = [native(y), native(m), *(native(a) for a in arguments if isinstance(a, torch.Tensor | None))]
    rest = [ctypes.c_bool(a) if isinstance(a, bool) else ctypes.c_int64(a)
            for a in arguments if not isinstance(a, torch.Tensor | None)]  # fmt: skip
    loss = function(
        *before,
        ctypes.c_int64(rows),
        ctypes.c_int64(columns),
        *rest,
        ctypes.c_double(scale),
        native(dy),
        native(dm),
    )
    return loss, dy, dm


def problem(rows, columns, dtype, with_factor):
    y = torch.randn(rows, columns, dtype=dtype)
    y[:, columns // 3] = 0
    y[rows // 2] = 0
    return y, torch.rand(columns, dtype=dtype) + 0.1 if with_factor else None


def expected(reference, y, m, **options):
    leaves = [y.double().requires_grad_()] + ([] if m is None else [m.double().requires_grad_()])
    loss = reference(*leaves, **options)
    grads = torch.autograd.grad(loss, leaves)
    return loss.detach(), grads[0].detach(), grads[1] if len(grads) > 1 else None


def assert_equal(got, want, y, m):
    eps = torch.finfo(y.dtype).eps
    assert got[0] == pytest.approx(float(want[0]), rel=64 * eps)
    torch.testing.assert_close(
        got[1].double(), want[1], rtol=64 * eps, atol=64 * eps * float(want[1].abs().max())
    )
    if m is not None:  # sums over a column may cancel
        size = (y.double() * want[1] / (2 * m.double())).abs().sum(0).max().detach()
        torch.testing.assert_close(got[2].double(), want[2], rtol=0, atol=64 * eps * float(size) + 1e-300)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(7, 4), (1, 1000), (5, 1024), (2, 516)])
def test_entropy_of_rows_in_registers(kernels, rows, columns, with_factor, dtype):
    y, m = problem(rows, columns, dtype, with_factor)
    got = call(kernels, "held", y, m, scale=0.7)
    assert_equal(got, expected(entropy_loss_ref, y, m, scale=0.7), y, m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "vectors", "chunk"),
    [(9, 1100, True, 4), (5, 301, False, 5), (1, 1, False, 1), (33, 36, True, 16)],
)
def test_entropy_in_passes(kernels, rows, columns, vectors, chunk, with_factor, axes, dtype):
    y, m = problem(rows, columns, dtype, with_factor)
    got = call(kernels, "passes", y, m, *axes, vectors, chunk, scale=1.3)
    want = expected(entropy_loss_ref, y, m, rows=axes[0], columns=axes[1], scale=1.3)
    assert_equal(got, want, y, m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_factor", [True, False])
@pytest.mark.parametrize(
    ("prune", "group", "held"),
    [
        (1, 2, True),
        (2, 4, True),
        (4, 8, True),
        (1, 3, False),
        (5, 7, False),
        (16, 32, False),
        (2, 4, False),
        (1, 1, True),
    ],
)
def test_pruned_importance_of_groups(kernels, prune, group, held, with_factor, dtype):
    y, m = problem(6, group * 75, dtype, with_factor)
    y[1] = y[1].round()  # ties
    got = call(kernels, "pruned", y, m, None, prune, group, not held, 4, scale=0.5)
    assert_equal(got, expected(pruned_importance_ref, y, m, prune=prune, group=group, scale=0.5), y, m)


def test_pruned_importance_of_rows(kernels):
    y, m = problem(6, 300, torch.float32, True)
    removed = nm_mask_ref(y * (y * m), 77, 0)
    got = call(kernels, "pruned", y, m, removed, 77, 1, False, 4, scale=0.5)
    assert_equal(got, expected(pruned_importance_ref, y, m, prune=77, group=0, scale=0.5), y, m)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_input_makes_the_loss_nan(kernels, bad):
    for place in ("y", "m"):
        y, m = problem(5, 64, torch.float32, True)
        if place == "y":
            y[3, 5] = bad
        else:
            m[5] = bad
        for got in (
            call(kernels, "held", y, m, scale=1.0),
            call(kernels, "passes", y, m, True, True, True, 2, scale=1.0),
            call(kernels, "pruned", y, m, None, 2, 4, False, 2, scale=1.0),
            call(kernels, "pruned", y, m, None, 2, 4, True, 2, scale=1.0),
        ):
            assert got[0] != got[0]


def test_a_negative_factor_makes_the_loss_nan(kernels):
    y, m = problem(5, 64, torch.float32, True)
    m[63] = -0.5
    assert all(
        loss != loss
        for loss, _, _ in (
            call(kernels, "held", y, m, scale=1.0),
            call(kernels, "passes", y, m, True, False, True, 2, scale=1.0),
            call(kernels, "pruned", y, m, None, 2, 4, False, 2, scale=1.0),
            call(kernels, "pruned", y, m, None, 2, 4, True, 2, scale=1.0),
        )
    )
