"""batched_qr and its backward against torch.linalg.qr; CholeskyQR and the retractions at large n.

Targets: 8 x 128 x 128 fp32, forward and backward, 1.5 times a loop of torch.linalg.qr on the CPU and
10 times on an H100; there also, at n = 4096, CholeskyQR 6 times and a re-based step 15 times
torch.linalg.qr.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from _harness import arguments, interleaved, report
from torch import Tensor

from drot.ops import batched_qr, cholesky_qr, rebased_backward, retract


def small(batch: int, n: int, device: str, repeats: int, save: Path | None) -> None:
    a = torch.randn(batch, n, n, device=device)
    g = torch.randn_like(a)

    def step(qr: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def run() -> object:
            leaf = a.clone().requires_grad_()
            return torch.autograd.grad(qr(leaf), leaf, g)

        return run

    timings = interleaved(
        {
            "loop of linalg.qr": step(lambda x: torch.stack([torch.linalg.qr(m)[0] for m in x])),
            "batched linalg.qr": step(lambda x: torch.linalg.qr(x)[0]),
            "batched_qr": step(lambda x: batched_qr(x)[0]),
        },
        device=device,
        repeats=repeats,
    )
    report(
        "batched_qr",
        f"{batch}x{n}x{n} fp32 forward+backward",
        timings,
        peer="loop of linalg.qr",
        target="batched_qr" if (batch, n) == (8, 128) else None,
        at_least=10 if device.startswith("cuda") else 1.5,
        # QR and Q 4/3 n³ each; backward two products and a solve, 5 n³
        flops=batch * n**3 * (8 / 3 + 5),
        device=device,
        save=save,
    )


def large(n: int, device: str, repeats: int, save: Path | None) -> None:
    """Orthogonalisation alone, from a matrix of condition ~100 as the paper's optimiser meets it, and
    the step of a re-based one, whose omega has the norm of Adam's step at a rate of 0.003."""
    a = torch.eye(n, device=device) + 0.5 / n**0.5 * torch.randn(n, n, device=device)
    q, _ = batched_qr(a)
    omega = 0.003 * torch.randn(n, n, device=device).sign().tril(-1)
    omega = omega - omega.mT
    g = torch.randn_like(a)
    timings = interleaved(
        {
            "linalg.qr": lambda: torch.linalg.qr(a),
            "batched_qr": lambda: batched_qr(a),
            "cholesky_qr": lambda: cholesky_qr(a),
            "retract cayley": lambda: retract(q, omega),
            "retract polar": lambda: retract(q, omega, method="polar"),
            "retract polar, 2 steps": lambda: retract(q, omega, method="polar", steps=2),
            "rebased_backward": lambda: rebased_backward(g, q),
        },
        device=device,
        repeats=repeats,
        warmup=1,
    )
    factors = {name: timings[name] for name in ("linalg.qr", "batched_qr", "cholesky_qr")}
    steps = {name: timing for name, timing in timings.items() if name not in ("batched_qr", "cholesky_qr")}
    cuda = device.startswith("cuda")
    for case, part, target, at_least in (
        ("factors", factors, "cholesky_qr", 6),
        ("re-based step", steps, "retract polar, 2 steps", 15),
    ):
        report(
            "batched_qr",
            f"{n}x{n} fp32 {case}",
            part,
            peer="linalg.qr",
            target=target if cuda and n == 4096 else None,
            at_least=at_least,
            device=device,
            save=save,
        )
    for method, count in (("cayley", None), ("polar", None), ("polar", 2)):
        moved = retract(q, omega, method, steps=count).double()  # type: ignore[arg-type]
        error = (moved.mT @ moved).sub_(torch.eye(n, dtype=moved.dtype, device=device)).abs().max()
        print(f"  retract {method}, steps {count}: largest |qᵀq - 1| {float(error):.1e}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--large", type=int, nargs="*", help="sizes; default 512 on CPU, 4096 on CUDA")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for batch, n in [(8, 128), (64, 32), (32, 64), (4, 256)]:
        small(batch, n, args.device, args.repeats, args.csv)
    sizes = args.large if args.large is not None else [4096 if args.device.startswith("cuda") else 512]
    for n in sizes:
        large(n, args.device, min(args.repeats, 10), args.csv)


if __name__ == "__main__":
    main()
