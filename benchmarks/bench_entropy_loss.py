"""entropy_loss with its gradients against eager autograd, torch.compile, and a copy of the weight.

`copy` writes into existing memory. `clone` allocates its result, as the op does.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from _harness import arguments, compare, graphs, interleaved, keep_pages, report
from torch import Tensor

from drot.ops import entropy_loss_and_grad, entropy_loss_ref

AXES = {
    "rows": {"rows": True, "columns": False},
    "columns": {"rows": False, "columns": True},
    "both": {"rows": True, "columns": True},
}


def backward(
    loss: Callable[..., Tensor], y: Tensor, column_scale: Tensor | None, **axes: bool
) -> tuple[Tensor, ...]:
    """Forward and backward pass by autograd: returns dy and, with a column_scale, dcolumn_scale."""
    inputs = [y] if column_scale is None else [y, column_scale]
    return torch.autograd.grad(loss(y, column_scale, **axes), inputs)


def bench(rows: int, columns: int, dtype: torch.dtype, options: argparse.Namespace) -> None:
    device = options.device
    y = torch.randn(rows, columns, device=device).to(dtype)
    scales = torch.rand(columns, device=device) + 0.1
    out = torch.empty_like(y)
    for name, axes in AXES.items():
        for column_scale in (None, scales):
            torch.compiler.reset()
            leaves = [y.clone().requires_grad_()]
            leaves.append(None if column_scale is None else column_scale.clone().requires_grad_())
            functions = {
                "eager": partial(backward, entropy_loss_ref, *leaves, **axes),
                "torch.compile": partial(backward, torch.compile(entropy_loss_ref), *leaves, **axes),
                "copy": partial(out.copy_, y),
                "clone": y.clone,
                "drot": partial(entropy_loss_and_grad, y, column_scale, **axes),
            }
            timings = interleaved(graphs(functions, device), device=device, repeats=options.repeats, warmup=2)
            case = f"{rows}x{columns} {str(dtype).removeprefix('torch.')} {name}"
            report(
                "entropy_loss",
                case + (" with column_scale" if column_scale is not None else ""),
                timings,
                peer="eager",
                target="drot",
                at_least=5,
                # y is read and dy is written, as by a copy; the second read of y by columns is not counted
                bytes_moved=2 * rows * columns * y.element_size(),
                device=device,
                save=options.csv,
            )
            compare(timings, "drot", "torch.compile", 2 if device == "cpu" else 3)
            for peer in ("copy", "clone"):
                compare(timings, "drot", peer, 0.7 if device == "cpu" else 0.85)


def main() -> None:
    options = arguments(__doc__).parse_args()
    keep_pages()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        bench(4096, 4096, dtype, options)
    if torch.device(options.device).type == "cuda":  # all weights of a LLaMA-3-8B layer as one matrix
        bench(53248, 4096, torch.bfloat16, options)


if __name__ == "__main__":
    main()
