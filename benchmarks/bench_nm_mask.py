"""nm_mask against a stable sort, and against topk, which removes any of several equal scores."""

from functools import partial

import torch
from _harness import arguments, graphs, interleaved, report
from torch import Tensor

from drot.ops import nm_mask, nm_mask_ref


def by_topk(score: Tensor, prune: int, group: int) -> Tensor:
    grouped = score.reshape(score.shape[0], -1, group or score.shape[1])
    smallest = torch.topk(grouped, prune, dim=-1, largest=False).indices
    return torch.zeros_like(grouped, dtype=torch.bool).scatter_(-1, smallest, True).reshape(score.shape)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows, columns, device = options.rows, options.columns, options.device
    for dtype in (torch.float32, torch.bfloat16):
        score = torch.rand(rows, columns, device=device).to(dtype)
        for prune, group in ((2, 4), (4, 8), (16, 32), (columns // 2, 0)):
            functions = {
                "stable sort": partial(nm_mask_ref, score, prune, group),
                "topk": partial(by_topk, score, prune, group),
                "drot": partial(nm_mask, score, prune, group),
            }
            report(
                "nm_mask",
                f"{rows}x{columns} {str(dtype).removeprefix('torch.')} {prune} of {group or columns}",
                interleaved(graphs(functions, device), device=device, repeats=options.repeats, warmup=1),
                peer="stable sort",
                # each score is read, and a byte of mask is written for it
                bytes_moved=rows * columns * (score.element_size() + 1),
                device=device,
                save=options.csv,
            )


if __name__ == "__main__":
    main()
