"""batched_qr and its backward pass against torch.linalg.qr; CholeskyQR and a spectral step for large n.

Targets: 8 x 128 x 128 fp32, forward and backward, is 1.5 times as fast as a loop of torch.linalg.qr on the
CPU and 10 times as fast on an H100. On an H100 CholeskyQR is 6 times as fast as torch.linalg.qr for n = 4096.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from _harness import arguments, interleaved, report
from torch import Tensor

from drot.model.rotation import orthogonality_error
from drot.ops import batched_qr, cholesky_qr
from drot.rotation.optimizers import FastOptimizer


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
        # R and Q 4/3 n³ each; the backward pass, two products and a solve, 5 n³
        flops=batch * n**3 * (8 / 3 + 5),
        device=device,
        save=save,
    )


def large(n: int, device: str, repeats: int, save: Path | None) -> None:
    """Times a spectral step, and QR of a matrix with condition number ~100, as in the paper's optimiser."""
    a = torch.eye(n, device=device) + 0.5 / n**0.5 * torch.randn(n, n, device=device)
    gradient = torch.randn(1, n, n, device=device)
    optimizer = FastOptimizer([batched_qr(a)[0][None]], lr=0.3, steps=100_000, objective="pruned")
    timings = interleaved(
        {
            "linalg.qr": lambda: torch.linalg.qr(a),
            "batched_qr": lambda: batched_qr(a),
            "cholesky_qr": lambda: cholesky_qr(a),
            "spectral step": lambda: optimizer.step([gradient]),
        },
        device=device,
        repeats=repeats,
        warmup=1,
    )
    report(
        "batched_qr",
        f"{n}x{n} fp32",
        timings,
        peer="linalg.qr",
        target="cholesky_qr" if device.startswith("cuda") and n == 4096 else None,
        at_least=6,
        device=device,
        save=save,
    )
    print(f"  spectral step: largest |qᵀq - 1| {orthogonality_error(optimizer.matrices[0]):.1e}")


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
