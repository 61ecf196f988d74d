"""entropy_loss with its gradients against eager autograd, torch.compile, and a copy of the weight.

`copy` writes into memory that is there, `clone` into new memory, as the op does.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from _harness import Timing, arguments, interleaved, keep_pages, report
from torch import Tensor

from drot.ops import entropy_loss_and_grad, entropy_loss_ref

AXES = {
    "rows": {"rows": True, "columns": False},
    "columns": {"rows": False, "columns": True},
    "both": {"rows": True, "columns": True},
}


def backward(loss: Callable[..., Tensor], y: Tensor, m: Tensor | None, **axes: bool) -> tuple[Tensor, ...]:
    """Forward and backward by autograd: dy, and dm with a factor."""
    return torch.autograd.grad(loss(y, m, **axes), [y] if m is None else [y, m])


def compare(timings: dict[str, Timing], peer: str, at_least: float) -> None:
    """A line for one more peer of a goal."""
    ratio = timings[peer].median / timings["drot"].median
    slower = "  slower" if ratio < 1 else ""
    met = "met" if ratio >= at_least else "MISSED"
    print(f"  drot {ratio:6.2f} x {peer}{slower}  target {at_least:g}: {met}")


def bench(rows: int, columns: int, dtype: torch.dtype, options: argparse.Namespace) -> None:
    device = options.device
    y = torch.randn(rows, columns, device=device).to(dtype)
    factor = torch.rand(columns, device=device) + 0.1
    out = torch.empty_like(y)
    for name, axes in AXES.items():
        for m in (None, factor):
            torch.compiler.reset()
            leaf, leaf_m = y.clone().requires_grad_(), None if m is None else m.clone().requires_grad_()
            functions = {
                "eager": partial(backward, entropy_loss_ref, leaf, leaf_m, **axes),
                "torch.compile": partial(backward, torch.compile(entropy_loss_ref), leaf, leaf_m, **axes),
                "copy": partial(out.copy_, y),
                "clone": y.clone,
                "drot": partial(entropy_loss_and_grad, y, m, **axes),
            }
            timings = interleaved(functions, device=device, repeats=options.repeats, warmup=2)
            case = f"{rows}x{columns} {str(dtype).removeprefix('torch.')} {name}"
            report(
                "entropy_loss",
                case + (" with m" if m is not None else ""),
                timings,
                peer="eager",
                target="drot",
                at_least=5,
                # Y is read once and dY written once, which is what a copy moves; by column Y is read
                # twice, which does not count as it is no work that was asked for
                bytes_moved=2 * rows * columns * y.element_size(),
                device=device,
                save=options.csv,
            )
            compare(timings, "torch.compile", 2 if device == "cpu" else 3)
            for peer in ("copy", "clone"):
                compare(timings, peer, 0.7 if device == "cpu" else 0.85)


def main() -> None:
    options = arguments(__doc__).parse_args()
    keep_pages()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        bench(4096, 4096, dtype, options)
    if torch.device(options.device).type == "cuda":  # the weights of a LLaMA-3-8B layer, as one matrix
        bench(53248, 4096, torch.bfloat16, options)


if __name__ == "__main__":
    main()
