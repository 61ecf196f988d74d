"""sparse24_linear against PyTorch's dense linear in the same dtype, with cold weights.

Each call uses the next of several copies of the weight, which together are larger than the caches. With
`rotation` the functions also add residual @ rotation; `not fused` takes drot's product of the weight and
PyTorch's of the rotation in place of one product. The bytes of every function are those of the packed weight
(9/16 of the dense weight in bf16) and of the rotation; the operations are those of the dense products.
"""

import argparse
import itertools
from collections.abc import Callable

import torch
from _harness import add_processor_time, arguments, clock_of, compare, graphs, interleaved, machine, report
from torch import Tensor

from drot.ops import nm_mask, pack24, sparse24_compress, sparse24_linear

COLD_BYTES = 2**27
#: the shape of the aims on a CPU: down_proj of LLaMA-3-8B
AIMED = (4096, 14336)
#: on a GPU: the most tokens of a decode, and the fewest of a prefill
DECODE, PREFILL = 8, 2048


def aim(on: str, device: str, weight: tuple[int, int, str], tokens: int, rotate: bool) -> float:
    """How many times as fast as `linear` sparse24_linear should be.

    on: the machine, as `machine` of _harness.py names it.
    device: `cpu` or `cuda`.
    weight: out, in and the name of the dtype.
    """
    if device == "cuda":
        # an H200 reads the weights faster, so what a call takes beside them weighs more
        decode = (1.35 if "H200" in on else 1.4) if rotate else 1.55
        return decode if tokens <= DECODE else 1.2 if tokens >= PREFILL else 1.0
    if tokens > 1:
        return 1.0
    return 2.0 if "AVX512" in on and weight == (*AIMED, "bfloat16") else 1.4


def sparse_weight(out: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    w = torch.randn(out, columns, device=device)
    return w.masked_fill_(nm_mask(w.abs(), 2, 4), 0).to(dtype)


def bench(out: int, columns: int, tokens: int, rotate: bool, options: argparse.Namespace) -> None:
    device, dtype = options.device, getattr(torch, options.dtype)
    kind = torch.device(device).type
    dense = sparse_weight(out, columns, dtype, device)
    values, positions = pack24(dense)
    packed_bytes = values.nbytes + positions.nbytes
    assert packed_bytes * 16 == dense.nbytes * 9 or dtype == torch.float32
    copies = COLD_BYTES // packed_bytes + 1
    weights = itertools.cycle([dense.clone() for _ in range(copies)])
    copied = [
        (values.clone(), positions.clone(), sparse24_compress(values, positions)) for _ in range(copies)
    ]
    packed = itertools.cycle(copied)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    residual = torch.randn(tokens, out, device=device).to(dtype) if rotate else None
    # the peer gets the rotation transposed: residual @ rotation in bf16 takes PyTorch seconds on the CPU
    transposed = torch.randn(out, out, device=device).div_(out**0.5).to(dtype) if rotate else None
    rotation = None if transposed is None else transposed.t()

    def linear() -> Tensor:
        y = torch.nn.functional.linear(x, next(weights))
        if residual is None or transposed is None:
            return y
        return y + torch.nn.functional.linear(residual, transposed)

    def ours() -> Tensor:
        values, positions, compressed = next(packed)
        return sparse24_linear(x, values, positions, None, residual, rotation, compressed)

    def not_fused() -> Tensor:
        assert residual is not None and transposed is not None
        values, positions, compressed = next(packed)
        y = sparse24_linear(x, values, positions, compressed=compressed)
        return y + torch.nn.functional.linear(residual, transposed)

    functions: dict[str, Callable[[], object]] = {"linear": linear, "sparse24_linear": ours}
    if rotate:
        functions["not fused"] = not_fused
    if kind == "cuda":
        compressed_weights = itertools.cycle([compressed for _, _, compressed in copied])

        def cusparselt() -> Tensor:
            return torch._cslt_sparse_mm(next(compressed_weights).view(dtype).view(out, -1), x.t()).t()

        if tokens % 8 == 0 and not rotate and copied[0][2].numel():
            try:
                cusparselt()
                functions["_cslt_sparse_mm"] = cusparselt
            except RuntimeError as error:
                print(f"  _cslt_sparse_mm is left out: {str(error).splitlines()[0]}")
    added = 0 if rotation is None else rotation.nbytes
    timings = interleaved(
        graphs(functions, device), device=device, repeats=options.repeats, clock=options.clock
    )
    report(
        "sparse24_linear",
        f"{out}x{columns} {options.dtype}, {tokens} tokens{', rotation' if rotate else ''}"
        + ", processor time" * options.processor_time,
        timings,
        peer="linear",
        target="sparse24_linear",
        at_least=aim(machine(device), kind, (out, columns, options.dtype), tokens, rotate),
        bytes_moved=packed_bytes + added,
        flops=2 * out * (columns + (out if rotate else 0)) * tokens,
        device=device,
        save=options.csv,
    )
    if rotate:
        compare(timings, "sparse24_linear", "not fused")
    bound = (dense.nbytes + added) / (packed_bytes + added)
    print(f"  {bound:.2f} x linear if both read as many bytes a second")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="*", help="default: 1 4 16 64; on CUDA 2048 too")
    parser.add_argument("--shape", type=int, nargs=2, default=AIMED, metavar=("OUT", "IN"))
    add_processor_time(parser)
    options = parser.parse_args()
    options.clock = clock_of(options, parser)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cuda = torch.device(options.device).type == "cuda"
    for tokens in options.tokens or [1, 4, 16, 64, *([2048] if cuda else [])]:
        for rotate in (False, True):
            bench(*options.shape, tokens, rotate, options)


if __name__ == "__main__":
    main()
