"""swiglu_rotate against SiLU, product and a batched product of torch: the input of a down_proj with R3.

And without R3 against SiLU and product, where gate and up are halves of one product, as in a packed layer.
"""

from functools import partial

import torch
from _harness import arguments, graphs, interleaved, report
from torch import Tensor

from drot.ops import swiglu_rotate


def by_torch(gate: Tensor, up: Tensor, rotation: Tensor) -> Tensor:
    """As a model without the op computes it."""
    blocks = (torch.nn.functional.silu(gate) * up).unflatten(-1, (len(rotation), -1))
    return torch.einsum("...ni,nij->...nj", blocks, rotation).flatten(-2)


def without_rotation(gate: Tensor, up: Tensor, rotation: Tensor) -> Tensor:
    """What a model without R3 computes in its place."""
    return torch.nn.functional.silu(gate) * up


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=14336, help="the intermediate size, LLaMA-3-8B's")
    parser.add_argument("--size", type=int, default=64, help="the size of a diagonal block")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device, width, size = options.device, options.width, options.size
    for dtype in (torch.bfloat16, torch.float32):
        rotation = (
            torch.linalg.qr(torch.randn(width // size, size, size))[0].to(dtype).contiguous().to(device)
        )
        for tokens in (1, 16, 512):
            gate, up = (torch.randn(tokens, width).to(dtype).to(device) for _ in range(2))
            functions = {
                "torch": partial(by_torch, gate, up, rotation),
                "no R3": partial(without_rotation, gate, up, rotation),
                "drot": partial(swiglu_rotate, gate, up, rotation),
            }
            report(
                "swiglu_rotate",
                f"{tokens} x {width} {str(dtype).removeprefix('torch.')} blocks of {size}",
                interleaved(graphs(functions, device), device=device, repeats=options.repeats, warmup=1),
                peer="torch",
                # gate and up are read, the rotation is read, the result is written
                bytes_moved=(3 * tokens + size) * width * dtype.itemsize,
                device=device,
                save=options.csv,
            )
            halves = torch.cat([gate, up], -1).chunk(2, -1)
            functions = {
                "torch": partial(without_rotation, *halves, rotation),
                "drot": partial(swiglu_rotate, *halves),
            }
            report(
                "swiglu_rotate",
                f"{tokens} x {width} {str(dtype).removeprefix('torch.')} halves, no R3",
                interleaved(graphs(functions, device), device=device, repeats=options.repeats, warmup=1),
                peer="torch",
                bytes_moved=3 * tokens * width * dtype.itemsize,
                device=device,
                save=options.csv,
            )


if __name__ == "__main__":
    main()
