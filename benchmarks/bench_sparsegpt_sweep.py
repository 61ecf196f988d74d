"""sparsegpt_sweep against the eager loop over columns.

`sweep` times the op on every block of 128 columns of a weight. `solve` times SparseGPT without the
factorisation: the sweeps, and after each a matrix product that updates the columns right of the block. On
CUDA the seven weights of a LLaMA-3-8B layer are solved too.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from _harness import arguments, interleaved, report
from torch import Tensor

from drot.ops import sparsegpt_sweep, sparsegpt_sweep_ref

BLOCK = 128
Sweep = Callable[[Tensor, Tensor, Tensor | None, int, int], tuple[Tensor, Tensor, Tensor]]

#: q, k, v, o, gate, up, down as [out, in]
LLAMA3_8B_LAYER = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
]


def eager_loop(
    w: Tensor, hinv: Tensor, removed: Tensor | None, prune: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The loop of the authors' code: topk, and a rank-one update of all columns for each column."""
    w, err = w.clone(), torch.zeros_like(w)
    mask = torch.zeros_like(w, dtype=torch.bool) if removed is None else removed.clone()
    diagonal = hinv.diagonal()
    for j in range(w.shape[1]):
        if removed is None and j % group == 0:
            score = w[:, j : j + group] ** 2 / diagonal[j : j + group] ** 2
            mask.scatter_(1, j + torch.topk(score, prune, dim=1, largest=False).indices, True)
        kept = w[:, j].clone()
        kept[mask[:, j]] = 0
        err[:, j] = (w[:, j] - kept) / diagonal[j]
        w[:, j:] -= err[:, j : j + 1] @ hinv[j : j + 1, j:]
    return w.masked_fill_(mask, 0), err, mask


def random_hinv(columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """An upper triangular matrix whose elements are distributed as in Hinv of a calibrated layer."""
    upper = torch.randn(columns, columns, dtype=dtype, device=device).triu_(1).mul_(0.3 / columns**0.5)
    upper.diagonal().copy_(torch.rand(columns, dtype=dtype, device=device) + 0.5)
    return upper


def sweep_blocks(sweep: Sweep, w: Tensor, hinv: Tensor, masks: list[Tensor | None]) -> None:
    for block, start in enumerate(range(0, w.shape[1], BLOCK)):
        columns = slice(start, start + BLOCK)
        sweep(w[:, columns], hinv[columns, columns], masks[block], 2, 4)


def solve(sweep: Sweep, w: Tensor, hinv: Tensor, masks: list[Tensor | None]) -> Tensor:
    """SparseGPT without the factorisation; returns the mask."""
    work, removed = w.clone(), torch.empty_like(w, dtype=torch.bool)
    for block, start in enumerate(range(0, w.shape[1], BLOCK)):
        columns, rest = slice(start, start + BLOCK), slice(start + BLOCK, None)
        pruned, err, mask = sweep(work[:, columns], hinv[columns, columns], masks[block], 2, 4)
        work[:, columns], removed[:, columns] = pruned, mask
        work[:, rest].addmm_(err, hinv[columns, rest], alpha=-1)
    return removed


def bench(rows: int, columns: int, dtype: torch.dtype, given: bool, options: argparse.Namespace) -> None:
    device = options.device
    w = torch.randn(rows, columns, dtype=dtype, device=device)
    hinv = random_hinv(columns, dtype, device)
    blocks = (columns + BLOCK - 1) // BLOCK
    masks = [torch.rand(rows, BLOCK, device=device) < 0.5 if given else None for _ in range(blocks)]
    loops: dict[str, Sweep] = {
        "eager loop": eager_loop,
        "reference": sparsegpt_sweep_ref,
        "drot": sparsegpt_sweep,
    }
    same = (solve(eager_loop, w, hinv, masks) == solve(sparsegpt_sweep, w, hinv, masks)).double().mean()
    case = f"{rows}x{columns} {str(dtype).removeprefix('torch.')} {'given mask' if given else '2:4'}"
    print(f"\n{case}: {float(same):.6f} of the mask equal to the eager loop's")
    for name, driver in (("sweep", sweep_blocks), ("solve", solve)):
        functions = {n: partial(driver, s, w, hinv, masks) for n, s in loops.items()}
        report(
            "sparsegpt_sweep",
            f"{name} {case}",
            interleaved(functions, device=device, repeats=options.repeats, warmup=1),
            peer="eager loop",
            # no target for a solve on the CPU: most of its time is the matrix product, which all share
            target="drot" if name == "sweep" or device != "cpu" else None,
            at_least=10,
            # each weight is updated once for every column before it: 2 flops an update
            flops=rows * columns * (BLOCK - 1) if name == "sweep" else rows * columns * (columns - 1),
            device=device,
            save=options.csv,
        )


def bench_layer(options: argparse.Namespace) -> None:
    """Times the solves of all seven weights, one after the other. Weights of one width share Hinv."""
    device = options.device
    hinvs = {columns: random_hinv(columns, torch.float32, device) for _, columns in LLAMA3_8B_LAYER}
    weights = [torch.randn(rows, columns, device=device) for rows, columns in LLAMA3_8B_LAYER]

    def masks(sweep: Sweep) -> list[Tensor]:
        choose: dict[int, list[Tensor | None]] = {columns: [None] * (columns // BLOCK) for columns in hinvs}
        return [solve(sweep, w, hinvs[w.shape[1]], choose[w.shape[1]]) for w in weights]

    pairs = zip(masks(eager_loop), masks(sparsegpt_sweep), strict=True)
    same = [float((got == eager).double().mean()) for eager, got in pairs]
    print(f"\nLLaMA-3-8B layer: {min(same):.6f} or more of each mask equal to the eager loop's")
    report(
        "sparsegpt_sweep",
        "solve LLaMA-3-8B layer float32 2:4",
        interleaved(
            {"eager loop": partial(masks, eager_loop), "drot": partial(masks, sparsegpt_sweep)},
            device=device,
            repeats=min(options.repeats, 5),
            warmup=1,
        ),
        peer="eager loop",
        target="drot",
        at_least=10,
        flops=sum(rows * columns * (columns - 1) for rows, columns in LLAMA3_8B_LAYER),
        device=device,
        save=options.csv,
    )


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for given in (False, True):
            bench(1024, 1024, dtype, given, options)
    if torch.device(options.device).type == "cuda":
        bench_layer(options)


if __name__ == "__main__":
    main()
