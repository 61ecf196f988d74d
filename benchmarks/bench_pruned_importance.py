"""pruned_importance with its gradients against eager autograd, topk, and a copy of the weight.

`sort` is the reference, whose stable sort keeps the rule of ties; `topk` is the shortest way to write
it in PyTorch, without that rule. `copy` and `clone`: see bench_entropy_loss.py.
"""

import argparse
from functools import partial

import torch
from _harness import arguments, interleaved, keep_pages, report
from torch import Tensor

from drot.ops import pruned_importance_and_grad, pruned_importance_ref


def by_sort(y: Tensor, m: Tensor, prune: int, group: int) -> tuple[Tensor, ...]:
    return torch.autograd.grad(pruned_importance_ref(y, m, prune=prune, group=group), (y, m))


def by_topk(y: Tensor, m: Tensor, prune: int, group: int) -> tuple[Tensor, ...]:
    score = y * (y * m)
    smallest = torch.topk(score.reshape(len(y), -1, group or y.shape[1]), prune, largest=False, sorted=False)
    return torch.autograd.grad(smallest.values.sum(), (y, m))


def bench(rows: int, columns: int, dtype: torch.dtype, options: argparse.Namespace) -> None:
    device = options.device
    y = torch.randn(rows, columns, device=device).to(dtype)
    m = torch.rand(columns, device=device) + 0.1
    out = torch.empty_like(y)
    for prune, group in ((2, 4), (4, 8), (16, 32), (columns // 2, 0)):
        leaves = y.clone().requires_grad_(), m.clone().requires_grad_()
        functions = {
            "sort": partial(by_sort, *leaves, prune, group),
            "topk": partial(by_topk, *leaves, prune, group),
            "copy": partial(out.copy_, y),
            "clone": y.clone,
            "drot": partial(pruned_importance_and_grad, y, m, prune=prune, group=group),
        }
        timings = interleaved(functions, device=device, repeats=options.repeats, warmup=1)
        report(
            "pruned_importance",
            f"{rows}x{columns} {str(dtype).removeprefix('torch.')} {prune} of {group or columns}",
            timings,
            peer="topk",
            # Y is read once and dY written once, which is what a copy moves
            bytes_moved=2 * rows * columns * y.element_size(),
            device=device,
            save=options.csv,
        )
        for peer in ("copy", "clone"):
            print(f"  drot {timings[peer].median / timings['drot'].median:6.2f} x {peer}")


def main() -> None:
    options = arguments(__doc__).parse_args()
    keep_pages()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        bench(4096, 4096, dtype, options)


if __name__ == "__main__":
    main()
