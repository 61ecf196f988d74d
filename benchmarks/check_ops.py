"""Checks every op on a few small inputs against its reference in fp64 on the CPU.

The cases of an op run in a process of their own. The script is short enough for compute-sanitizer, and needs
neither pytest nor a network; the tests check far more. The exit status is 1 if a result is wrong.
"""

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import torch
from torch import Tensor

from drot import ops
from drot.rotation.retraction import DIRECTIONS, STEPS, SpectralStep
from drot.rotation.tensor_cores import MARGIN, TensorCoreStep, angles

Case = tuple[str, Callable[[], tuple[Tensor, Tensor]], float]


def error(got: Tensor, want: Tensor) -> float:
    """The relative error in the Frobenius norm; for masks and integers the share of different elements."""
    got, want = got.detach().cpu(), want.detach()
    if got.shape != want.shape:
        return float("inf")
    if not want.is_floating_point():
        return float((got != want).double().mean())
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-300))


def qr_cases(device: str) -> Iterator[Case]:
    # one thread block a matrix, in shared memory or in global memory; the last shape: cuSOLVER's
    for shape, dtype in [
        ((3, 33, 33), torch.float32),
        ((2, 128, 128), torch.float32),
        ((2, 160, 160), torch.float64),
        ((256, 256), torch.float32),
        ((300, 300), torch.float32),
    ]:
        n = shape[-1]
        a = (torch.eye(n) + 0.3 / n**0.5 * torch.randn(*shape)).to(dtype)
        g = torch.randn_like(a)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-12
        exact = a.double().requires_grad_()
        q, r = ops.batched_qr_ref(exact)
        (want,) = torch.autograd.grad(q, exact, g.double())

        def factors(a: Tensor = a, q: Tensor = q, r: Tensor = r) -> tuple[Tensor, Tensor]:
            return torch.cat(ops.batched_qr(a.to(device))), torch.cat([q, r])

        def gradient(a: Tensor = a, g: Tensor = g, want: Tensor = want) -> tuple[Tensor, Tensor]:
            leaf = a.to(device).requires_grad_()
            return torch.autograd.grad(ops.batched_qr(leaf)[0], leaf, g.to(device))[0], want

        def cholesky(a: Tensor = a, q: Tensor = q) -> tuple[Tensor, Tensor]:
            return ops.cholesky_qr(a.to(device))[0], q

        name = f"{'x'.join(map(str, shape))} {dtype}"
        yield f"batched_qr {name}", factors, tolerance
        yield f"batched_qr_backward {name}", gradient, tolerance
        yield f"cholesky_qr {name}", cholesky, tolerance


def retraction_cases(device: str) -> Iterator[Case]:
    q, _ = torch.linalg.qr(torch.randn(2, 40, 40, dtype=torch.float64))
    u = torch.randn_like(q)
    u = u - u.mT

    def moved() -> tuple[Tensor, Tensor]:
        exact, start = q.clone(), q.float().to(device)
        SpectralStep(exact, DIRECTIONS["pruned"])(exact, u, 0.3)  # a step replaces its matrix
        TensorCoreStep(start, DIRECTIONS["pruned"])(
            start, u.float().to(device), angles([0.3], start.device)[0]
        )
        return start, exact

    yield "spectral step in bf16", moved, 5e-2


def score_cases(device: str) -> Iterator[Case]:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float64, 1e-11)):
        # the last shape has long rows, which are aligned to 16 bytes in fp32 and fp64 only
        for rows, columns in ((5, 64), (40, 1000), (6, 9612)):
            y = torch.randn(rows, columns).to(dtype)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            column_scale = torch.rand(columns, dtype=wide) + 0.1
            name = f"{rows}x{columns} {dtype}"
            # the entropy of a column does not depend on column_scale: its gradient is rounding error, which
            # in long rows exceeds the gradient of the entropy of the rows
            for tensors, axes in (
                ((y, column_scale), {"rows": True}),
                ((y,), {"rows": False, "columns": True}),
                ((y, column_scale) if columns <= 1000 else (y,), {"columns": True}),
            ):
                yield (
                    f"entropy_loss {name} {axes}",
                    _loss_case("entropy_loss", tensors, device, axes),
                    tolerance,
                )
            for groups in ({"prune": 2, "group": 4}, {"prune": columns // 3, "group": 0}):
                case = _loss_case("pruned_importance", (y, column_scale), device, groups)
                yield f"pruned_importance {name} {groups}", case, tolerance


def _loss_case(
    op: str, tensors: tuple[Tensor, ...], device: str, options: dict[str, int] | dict[str, bool]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """The loss and its gradients as one vector; each is divided by the norm of its reference."""

    def run() -> tuple[Tensor, Tensor]:
        exact = [t.double().requires_grad_() for t in tensors]
        loss = getattr(ops, f"{op}_ref")(*exact, **options)
        want = [loss.detach(), *torch.autograd.grad(loss, exact)]
        got = getattr(ops, f"{op}_and_grad")(*(t.to(device) for t in tensors), **options)
        # without column_scale the op returns an empty third tensor
        scaled = [(g.cpu().double() / w.norm(), w / w.norm()) for g, w in zip(got, want, strict=False)]
        return tuple(torch.cat([part.flatten() for part in parts]) for parts in zip(*scaled))  # type: ignore[return-value]

    return run


def mask_cases(device: str) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        # few different values, so that many scores are equal
        score = torch.randint(0, 9, (37, 480)).to(dtype)
        for prune, group in ((1, 2), (2, 4), (4, 8), (7, 16), (3, 5), (16, 32), (200, 0)):

            def mask(score: Tensor = score, prune: int = prune, group: int = group) -> tuple[Tensor, Tensor]:
                return ops.nm_mask(score.to(device), prune, group), ops.nm_mask_ref(score, prune, group)

            yield f"nm_mask {prune} of {group} {dtype}", mask, 0


def momentum_cases(device: str) -> Iterator[Case]:
    for shape in ((5, 5), (64, 64), (3, 100, 100)):
        product, momentum = torch.randn(2, *shape).bfloat16()

        def step(product: Tensor = product, momentum: Tensor = momentum) -> tuple[Tensor, Tensor]:
            mine, exact = momentum.clone().to(device), momentum.double()
            ops.skew_momentum(product.to(device), mine, 0.9)
            s = product.double() - product.double().mT
            return mine.cpu().double().triu(1), (0.9 * exact + s).triu(1)

        yield f"skew_momentum {shape}", step, 2**-8

        def adam(product: Tensor = product, momentum: Tensor = momentum) -> tuple[Tensor, Tensor]:
            moments = momentum.abs()
            mine = ops.skew_momentum(product.to(device), moments.to(device, copy=True), 0.9, 0.95)
            s = (product.double() - product.double().mT).triu(1)
            m, v = 0.9 * moments.double().triu(1) + s, 0.95 * moments.double().mT.triu(1) + s.square()
            return mine.cpu().double().triu(1), torch.where(v > 0, m / v.sqrt(), 0)

        yield f"skew_momentum with squares {shape}", adam, 2**-8


def step_cases(device: str) -> Iterator[Case]:
    for n in (5, 64, 100):
        squared, fourth = torch.randn(2, 3, n, n).bfloat16()

        def start(squared: Tensor = squared, fourth: Tensor = fourth) -> tuple[Tensor, Tensor]:
            exact = ops.polar_start_ref(squared.double(), fourth.double(), 7.9, -21.7, 15.1, 0.95)
            return ops.polar_start(squared.to(device), fourth.to(device), 7.9, -21.7, 15.1, 0.95).cpu(), exact

        yield f"polar_start {n}", start, 2**-6

        def turned(j: Tensor = squared) -> tuple[Tensor, Tensor]:
            angle = torch.tensor([-0.3, 0.07])
            exact = ops.turn_start_ref(j.double(), angle.double())
            return torch.cat(ops.turn_start(j.to(device), angle.to(device))).cpu(), torch.cat(exact)

        yield f"turn_start {n}", turned, 2**-8


def scale_cases(device: str) -> Iterator[Case]:
    for shape in ((2, 5, 7), (2, 130, 64)):
        product, gradient = torch.randn(shape).bfloat16(), torch.randn(shape[0], shape[2])
        for inverse in (False, True):
            exact = ops.column_scale_ref(product.double(), inverse)

            def scale(
                product: Tensor = product, inverse: bool = inverse, exact: Tensor = exact
            ) -> tuple[Tensor, Tensor]:
                return ops.column_scale(product.to(device), inverse).cpu(), exact

            def back(
                product: Tensor = product,
                gradient: Tensor = gradient,
                inverse: bool = inverse,
                exact: Tensor = exact,
            ) -> tuple[Tensor, Tensor]:
                given = (t.to(device) for t in (product, exact.float(), gradient))
                want = ops.column_scale_backward_ref(product.double(), exact, gradient.double(), inverse)
                return ops.column_scale_backward(*given, inverse).cpu(), want

            yield f"column_scale {shape} inverse={inverse}", scale, 2e-6
            yield f"column_scale_backward {shape} inverse={inverse}", back, 2**-8


def spectral_step_cases(device: str) -> Iterator[Case]:
    polynomials = [coefficient for step in STEPS for coefficient in step]
    for count, n in ((3, 16), (2, 64), (1, 80), (2, 128)):
        q = torch.linalg.qr(torch.randn(count, n, n))[0].contiguous()
        momentum = torch.randn(count, n, n).triu(1).bfloat16()
        inputs = (q, momentum, torch.randn(count, n, n), torch.tensor(0.5), angles([0.3], q.device)[0])

        def step(inputs: tuple[Tensor, ...] = inputs) -> tuple[Tensor, Tensor]:
            mine, exact = [t.to(device, copy=True) for t in inputs], [t.double() for t in inputs]
            ops.spectral_step(*mine, 0.9, polynomials, MARGIN)
            ops.spectral_step_ref(*exact, 0.9, polynomials, MARGIN)
            return mine[0].cpu().double() - inputs[0], exact[0] - inputs[0]

        yield f"spectral_step {count}x{n}", step, 0.05


def sweep_cases(device: str) -> Iterator[Case]:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-12)):
        for columns in (64, 200):  # 200 columns are swept in parts
            w = torch.randn(50, columns, dtype=dtype)
            hinv = torch.randn(columns, columns, dtype=dtype).triu(1) * 0.3 / columns**0.5
            hinv.diagonal().copy_(torch.rand(columns) + 0.5)
            removed = torch.rand(50, columns) < 0.5
            for given in (removed, None):

                def swept(
                    w: Tensor = w, hinv: Tensor = hinv, given: Tensor | None = given
                ) -> tuple[Tensor, Tensor]:
                    want = ops.sparsegpt_sweep_ref(w.double(), hinv.double(), given, 2, 4)
                    mask = None if given is None else given.to(device)
                    got = ops.sparsegpt_sweep(w.to(device), hinv.to(device), mask, 2, 4)
                    return torch.cat([t.cpu().double() for t in got]), torch.cat([t.double() for t in want])

                yield f"sparsegpt_sweep {columns} {dtype} given={given is not None}", swept, tolerance


def pack_cases(device: str) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.randn(19, 64).to(dtype)
        w = w.masked_fill(ops.nm_mask_ref(w.abs(), 2, 4), 0)

        def there(w: Tensor = w) -> tuple[Tensor, Tensor]:
            return ops.pack24(w.to(device))[1], ops.pack24_ref(w)[1]

        def and_back(w: Tensor = w) -> tuple[Tensor, Tensor]:
            return ops.unpack24(*ops.pack24(w.to(device))), w.double()

        yield f"pack24 {dtype}", there, 0
        yield f"unpack24 {dtype}", and_back, 0


def sparse_linear_cases(device: str) -> Iterator[Case]:
    # few and many tokens; a shape that tensor cores support, and one that they do not
    small = ((1, 96, 256), (11, 96, 256), (40, 96, 256), (3, 37, 72))
    # what the kernel for few tokens does with larger shapes, on a GPU of 69 to 135 multiprocessors: places of
    # its queue are filled again; more blocks than run at once; blocks share the columns, and many do
    large = ((3, 2176, 2944), (2, 11000, 704), (13, 2752, 2944), (9, 90, 5824))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        for tokens, out, columns in (*small, *(large if dtype == torch.bfloat16 else ())):
            w = torch.randn(out, columns).to(dtype)
            packed = ops.pack24(w.masked_fill(ops.nm_mask_ref(w.abs(), 2, 4), 0))
            x, bias, residual = (
                torch.randn(size).to(dtype) for size in ((tokens, columns), (out,), (tokens, out))
            )
            rotation = torch.eye(out, dtype=dtype).roll(5, 1) if out < 4096 else None  # else it is too large
            for added in ((), (bias,), (bias, residual), (None, residual, rotation)):

                def product(
                    x: Tensor = x,
                    packed: tuple[Tensor, Tensor] = packed,
                    added: tuple[Tensor | None, ...] = added,
                ) -> tuple[Tensor, Tensor]:
                    wide = [None if t is None else t.double() for t in added]
                    want = ops.sparse24_linear_ref(x.double(), packed[0].double(), packed[1], *wide)
                    there = [None if t is None else t.to(device) for t in (*added, None, None, None)][:3]
                    values, positions = (t.to(device) for t in packed)
                    compressed = ops.sparse24_compress(values, positions)
                    return ops.sparse24_linear(x.to(device), values, positions, *there, compressed), want

                yield f"sparse24_linear {tokens} {out}x{columns} {dtype} {len(added)}", product, tolerance


def experts_cases(device: str) -> Iterator[Case]:
    for numbers in ((1,), (0, 3, 0, 1), (1,) * 130, (5, 0, 70, 16), (300, 400)):
        for out, columns in ((40, 64), (256, 1024)):
            for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
                w = torch.randn(len(numbers) * out, columns)
                w = w.masked_fill(ops.nm_mask(w.abs(), 2, 4), 0).to(dtype)
                packed = [t.unflatten(0, (len(numbers), out)) for t in ops.pack24(w)]
                x = torch.randn(sum(numbers), columns).to(dtype)
                bias = torch.randn(len(numbers), out).to(dtype)
                ends = torch.tensor(numbers).cumsum(0).int()

                def products(
                    given: tuple[Tensor, ...] = (x, *packed, ends, bias),
                ) -> tuple[Tensor, Tensor]:
                    wide = [t.double() if t.is_floating_point() else t for t in given]
                    return ops.sparse24_experts(*(t.to(device) for t in given)), ops.sparse24_experts_ref(
                        *wide
                    )

                shown = numbers if len(numbers) < 9 else f"{len(numbers)} experts"
                yield f"sparse24_experts {shown} {out}x{columns} {dtype}", products, tolerance


def swiglu_cases(device: str) -> Iterator[Case]:
    for tokens, blocks, size in ((1, 3, 64), (70, 2, 64), (5, 2, 33), (20, 1, 176)):
        gate, up = (torch.randn(tokens, blocks * size) for _ in range(2))
        rotation = torch.linalg.qr(torch.randn(blocks, size, size))[0]
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
            rotated = [t.to(dtype) for t in (gate, up, rotation)]
            for given, name in ((rotated, f"{blocks}x{size}"), (rotated[:2], f"{blocks * size}")):

                def gated(given: list[Tensor] = given) -> tuple[Tensor, Tensor]:
                    want = ops.swiglu_rotate_ref(*(t.double() for t in given))
                    return ops.swiglu_rotate(*(t.to(device) for t in given)).cpu(), want

                yield f"swiglu_rotate {tokens} {name} {dtype}", gated, tolerance
    for numbers in ((0, 1, 2), (20, 0, 70, 1), (1,) * 130):
        gate, up = (torch.randn(sum(numbers), 128) for _ in range(2))
        rotation = torch.linalg.qr(torch.randn(2 * len(numbers), 64, 64))[0]
        ends = torch.tensor(numbers).cumsum(0).int()
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
            of_experts = [t.to(dtype) for t in (gate, up, rotation)]

            def each(given: list[Tensor] = of_experts, ends: Tensor = ends) -> tuple[Tensor, Tensor]:
                want = ops.swiglu_rotate_ref(*(t.double() for t in given), ends)
                return ops.swiglu_rotate(*(t.to(device) for t in given), ends.to(device)).cpu(), want

            yield f"swiglu_rotate of {len(numbers)} experts {dtype}", each, tolerance


def rope_cases(device: str) -> Iterator[Case]:
    for b, h, g, t, d in ((1, 32, 8, 1, 128), (2, 5, 1, 33, 80), (2, 2, 2, 3, 6)):
        drawn = [torch.randn(size) for size in ((b, h, t, d), (b, g, t, d), (1, t, d), (1, t, d))]
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
            given = [t.to(dtype) for t in drawn]
            for which, name in enumerate("qk"):

                def turned(given: list[Tensor] = given, which: int = which) -> tuple[Tensor, Tensor]:
                    want = ops.rope_ref(*(t.double() for t in given))[which]
                    return ops.rope(*(t.to(device) for t in given))[which].cpu(), want

                yield f"rope {name} {b}x{h}+{g}x{t}x{d} {dtype}", turned, tolerance


GROUPS = {
    "qr": qr_cases,
    "retraction": retraction_cases,
    "score": score_cases,
    "mask": mask_cases,
    "momentum": momentum_cases,
    "step": step_cases,
    "spectral_step": spectral_step_cases,
    "scale": scale_cases,
    "sweep": sweep_cases,
    "pack": pack_cases,
    "sparse_linear": sparse_linear_cases,
    "experts": experts_cases,
    "swiglu": swiglu_cases,
    "rope": rope_cases,
}


def check(name: str, device: str) -> bool:
    """Runs the cases of a group in this process, and says which are wrong; returns whether none is."""
    torch.manual_seed(0)
    count = wrong = 0
    for case, run, tolerance in GROUPS[name](device):
        count += 1
        try:
            size = error(*run())
        except Exception:
            traceback.print_exc()
            size = float("inf")
        if not size <= tolerance:
            wrong += 1
            print(f"WRONG  {case}: error {size:.1e}, at most {tolerance:g}")
    print(f"{name}: {count} cases on {device}, {wrong} wrong")
    return wrong == 0


def check_apart(name: str, device: str) -> bool:
    """`check` in a process of its own: after an illegal access a process can use its GPU no more."""
    command = [sys.executable, __file__, "--device", device, "--only", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode not in (0, 1):
        print(f"WRONG  {name}: its process ended with the status {done.returncode}", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=GROUPS, help="checks one group, in this process")
    options = parser.parse_args()
    if options.only:
        return int(not check(options.only, options.device))
    with ThreadPoolExecutor(4) as pool:
        right = list(pool.map(check_apart, GROUPS, repeat(options.device)))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
