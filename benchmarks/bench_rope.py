"""rope against transformers' function: the rotary position embedding of a layer of LLaMA-3-8B.

Queries, keys and values are parts of one product, as in a packed layer.
"""

from functools import partial

import torch
from _harness import arguments, graphs, interleaved, report
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from drot.ops import rope

QUERIES, KEYS, HEAD = 32, 8, 128


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device, width = options.device, (QUERIES + KEYS) * HEAD
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1, 16, 512):
            product = torch.randn(1, tokens, width + KEYS * HEAD).to(dtype).to(device)
            q, k, _ = (
                part.unflatten(-1, (-1, HEAD)).transpose(1, 2)
                for part in product.split([QUERIES * HEAD, KEYS * HEAD, KEYS * HEAD], -1)
            )
            angle = torch.randn(1, tokens, HEAD // 2).repeat(1, 1, 2)
            factors = angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)
            functions = {
                "transformers": partial(apply_rotary_pos_emb, q, k, *factors),
                "drot": partial(rope, q, k, *factors),
            }
            report(
                "rope",
                f"{tokens} x {QUERIES} + {KEYS} heads {str(dtype).removeprefix('torch.')}",
                interleaved(graphs(functions, device), device=device, repeats=options.repeats, warmup=1),
                peer="transformers",
                bytes_moved=2 * tokens * (width + HEAD) * dtype.itemsize,
                device=device,
                save=options.csv,
            )


if __name__ == "__main__":
    main()
