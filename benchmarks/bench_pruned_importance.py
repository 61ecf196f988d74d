"""pruned_importance with its gradients against eager autograd, topk, and a copy of the weight.

`sort` is the reference: its stable sort removes the lower of two columns with equal scores. `topk` is the
shortest program in PyTorch; it removes any of them. `copy` and `clone`: see bench_entropy_loss.py.
"""

import argparse
from functools import partial

import torch
from _harness import arguments, compare, graphs, interleaved, keep_pages, report
from torch import Tensor

from drot.ops import pruned_importance_and_grad, pruned_importance_ref


def by_sort(y: Tensor, column_scale: Tensor, prune: int, group: int) -> tuple[Tensor, ...]:
    loss = pruned_importance_ref(y, column_scale, prune=prune, group=group)
    return torch.autograd.grad(loss, (y, column_scale))


def by_topk(y: Tensor, column_scale: Tensor, prune: int, group: int) -> tuple[Tensor, ...]:
    score = y * (y * column_scale)
    smallest = torch.topk(score.reshape(len(y), -1, group or y.shape[1]), prune, largest=False, sorted=False)
    return torch.autograd.grad(smallest.values.sum(), (y, column_scale))


def bench(rows: int, columns: int, dtype: torch.dtype, options: argparse.Namespace) -> None:
    device, on_gpu = options.device, torch.device(options.device).type == "cuda"
    y = torch.randn(rows, columns, device=device).to(dtype)
    column_scale = torch.rand(columns, device=device) + 0.1
    out = torch.empty_like(y)
    for prune, group in ((2, 4), (4, 8), (16, 32), (columns // 2, 0)):
        leaves = y.clone().requires_grad_(), column_scale.clone().requires_grad_()
        functions = {
            "sort": partial(by_sort, *leaves, prune, group),
            "topk": partial(by_topk, *leaves, prune, group),
            "copy": partial(out.copy_, y),
            "clone": y.clone,
            "drot": partial(pruned_importance_and_grad, y, column_scale, prune=prune, group=group),
        }
        timings = interleaved(graphs(functions, device), device=device, repeats=options.repeats, warmup=1)
        report(
            "pruned_importance",
            f"{rows}x{columns} {str(dtype).removeprefix('torch.')} {prune} of {group or columns}",
            timings,
            peer="topk",
            # y is read and dy is written, as by a copy
            bytes_moved=2 * rows * columns * y.element_size(),
            device=device,
            save=options.csv,
        )
        for peer in ("copy", "clone"):
            # a ratio is chosen over whole rows, which takes several passes
            compare(timings, "drot", peer, 0.8 if on_gpu and group else None)


def main() -> None:
    options = arguments(__doc__).parse_args()
    keep_pages()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        bench(4096, 4096, dtype, options)


if __name__ == "__main__":
    main()
