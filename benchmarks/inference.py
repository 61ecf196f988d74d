"""Counts the times of a decoder layer while a model runs: dense, 2:4, 2:4 with rotations. No GPU is needed.

layer_kernels.py gives the kernels of one token, in a CUDA graph, and of a prefill of 2048 tokens. Rates make
times of them; each has its origin below. The scope `products` has the kernels that read weights or rotations,
`layer` also transformers' own kernels for norms, attention and activation.

**None of these times was measured.** Where a rate is uncertain, a figure has a low and a high value, and
`needs` is the rate with which its aim is met. Little's law says which rate the bytes in flight allow. It does
not say that a kernel reaches it: the kernel of EARLIER had 54 KB in flight a multiprocessor, and read half as
many bytes a second as cuBLAS.
"""

import argparse
import csv
import datetime
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from _harness import RESULTS, ROOT, add_csv, append_rows, commit
from counting import MEMORY
from counting import RATES as OPERATIONS
from layer_kernels import APART, LIGHT, Kernel, layer_kernels, products

from drot.evaluation.variants import DENSE, ROTATED, SHAPES, SPARSE, shape_config

#: bytes a second of the memory, as NVIDIA says; the multiprocessors of both GPUs
GPUS, MULTIPROCESSORS = {"H100": 3.35e12, "H200": 4.8e12}, 132
#: the commit of the rows of an H200 in results/sparse24_linear.csv, and their case with its OUT x IN weights
EARLIER, OUT, IN = "cd99c37", 4096, 14336
CASE = f"{OUT}x{IN} bfloat16, 1 tokens"
VALUES = ("low", "counted", "high")
#: seconds between dependent kernels of a CUDA graph: 1.3 us is measured on an H100 by others, in "Look Ma, No
#: Bubbles!" of hazyresearch.stanford.edu. 2 and 1 are guesses
LAUNCH = dict(zip(VALUES, (2.0e-6, 1.3e-6, 1.0e-6), strict=True))
#: seconds from a load to its data while the memory is busy: guesses; tests/native takes 1 us
LATENCY = dict(zip(VALUES, (1.0e-6, 0.65e-6, 0.6e-6), strict=True))
#: how many times as fast as cuBLAS cuSPARSELt multiplies many tokens; no row of results/ has it. 0.97 is from
#: an H100 (github.com/bcacdwk/vllmbench), 1.65 from other GPUs. The third is the gain of the paper's whole
#: layer on an A100, 5.80 and 4.37 ms
GAIN = dict(zip(VALUES, (0.97, 5.80 / 4.37, 1.65), strict=True))
PREFILL = 2048
#: blocks of the skinny kernel that share a multiprocessor, for their registers
BLOCKS = 2
#: what is wanted: of decode by variant and GPU; of a prefill; KB in flight; at most % of a prefill for R1, R3
DECODE = {variant: dict.fromkeys(GPUS, 1.55) for variant in (SPARSE, LIGHT)}
DECODE[ROTATED] = {"H100": 1.4, "H200": 1.35}
PREFILLED, IN_FLIGHT, ROTATION = 1.2, 40.0, 5.0
SCOPES: dict[str, Callable[[list[Kernel]], list[Kernel]]] = {"products": products, "layer": list}
KERNEL = ROOT / "csrc/ops/cuda/sparse24_skinny.cuh"

Found = dict[str, dict[int, list[Kernel]]]


@dataclass(frozen=True)
class Rates:
    """memory: bytes a second; packed products read `share` times as many. launch: seconds. gain: how many
    times as fast packed products of many tokens are."""

    memory: float
    share: float
    launch: float
    gain: float

    def seconds(self, kernels: list[Kernel]) -> float:
        total = 0.0
        for kernel in kernels:
            share, gain = (self.share, self.gain) if kernel.kind == "packed" else (1.0, 1.0)
            read = kernel.bytes / self.memory / share
            total += self.launch + max(read, kernel.operations / OPERATIONS["bf16"] / gain)
        return total


def bytes_of_block(tiles: int) -> int:
    """skinny_bytes_in_flight of sparse24_skinny.cuh."""
    stages, warps = (
        int(re.findall(rf"constexpr int {name} = (\d+);", KERNEL.read_text())[0])
        for name in ("kSkinnyStages", "kSkinnyWarps")
    )
    return (stages - 1) * warps * 16 * tiles * (64 + 8)


def bytes_in_flight(rows: int) -> tuple[float, float]:
    """Bytes of a packed weight on their way to a multiprocessor, as run_sparse24_skinny starts its blocks for
    one token: while its last blocks run, which leave multiprocessors without one, and before."""
    tiles = 2 if rows // 32 >= 2 * MULTIPROCESSORS else 1
    blocks, places = -(-rows // (16 * tiles)), BLOCKS * MULTIPROCESSORS
    each = bytes_of_block(tiles) / MULTIPROCESSORS
    return each * (blocks % places or places), each * min(blocks, places)


def earlier(function: str) -> float:
    """Bytes of the weight that a function read in a second at EARLIER on an H200, without the launch."""
    wanted = (EARLIER, CASE, function)
    with (RESULTS / "sparse24_linear.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["commit"], r["case"], r["function"]) == wanted]
    size = 2 * OUT * IN * (1 if function == "linear" else 9 / 16)
    return size / (1e-6 * float(rows[0]["median_us"]) - LAUNCH["counted"])


def rates_of(gpu: str, value: str, in_flight: float) -> Rates:
    """The rates of a GPU; value: one of VALUES. in_flight: bytes on their way to a multiprocessor.

    The memory of an H200 is as fast as cuBLAS read it at EARLIER; that of an H100, as others have measured.
    """
    memory = earlier("linear") if gpu == "H200" else MEMORY
    share = earlier("sparse24_linear") / earlier("linear") if value == "low" else 1.0
    allowed = in_flight * MULTIPROCESSORS / LATENCY[value] / memory
    return Rates(memory, min(share, allowed), LAUNCH[value], GAIN[value])


def needed(reached: Callable[[float], float], wanted: float) -> float:
    """The least x up to 10 with reached(x) >= wanted, where reached(x) grows with x; inf if there is none."""
    low, high = 0.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) >= wanted else (middle, high)
    return high if reached(high) >= wanted else math.inf


def verdict_of(met: list[bool]) -> str:
    """The verdict on a figure, of which the low, the counted and the high value are met or not."""
    if not met[1]:
        return "MISSED"
    return "met" if all(met) else f"met, MISSED at {VALUES[met.index(False)]}"


def amounts_of(found: Found) -> list[dict[str, Any]]:
    """A row for each variant and scope: the bytes and kernels of a token, and the operations of a prefill."""
    return [
        {
            "variant": variant,
            "scope": scope,
            "mb_of_token": f"{sum(k.bytes for k in of(kernels[1])) / 1e6:.1f}",
            "kernels_of_token": len(of(kernels[1])),
            "tflop_of_prefill": f"{sum(k.operations for k in of(kernels[PREFILL])) / 1e12:.3f}",
        }
        for variant, kernels in found.items()
        for scope, of in SCOPES.items()
    ]


def figures_of(found: Found, gpu: str) -> list[dict[str, Any]]:
    """A row for each figure of a GPU. Its low, counted and high values have the rates of these names."""
    rows: list[dict[str, Any]] = []

    def add(
        figure: str, variant: str, values: list[float], aim: float | None = None, *, most: bool = False,
        needs: str = "",
    ) -> None:  # fmt: skip
        shown = dict(zip(VALUES, (f"{value:.3f}" for value in values), strict=True))
        wanted = "" if aim is None else f"{'at most ' * most}{aim:g}"
        verdict = "" if aim is None else verdict_of([x <= aim if most else x >= aim for x in values])
        judged = {"wanted": wanted, "verdict": verdict, "needs": needs}
        rows.append({"gpu": gpu, "figure": figure, "variant": variant, **shown, **judged})

    def more(variant: str, less: str, tokens: int) -> list[float]:
        """The percentage of the layer `variant` that it takes more than the layer `less`."""
        ratios = (rate.seconds(found[less][tokens]) / rate.seconds(found[variant][tokens]) for rate in rates)
        return [100 * (1 - ratio) for ratio in ratios]

    in_flight = [bytes_in_flight(k.rows) for k in found[SPARSE][1] if k.kind == "packed"]
    least, full = min(last for last, _ in in_flight), [full for _, full in in_flight]
    flight = [least, min(full), max(full)]
    rates = [rates_of(gpu, value, min(full)) for value in VALUES]
    allowed = [x * MULTIPROCESSORS / LATENCY[value] / 1e12 for value, x in zip(VALUES, flight, strict=True)]
    add("KB in flight a multiprocessor", SPARSE, [x / 1e3 for x in flight], IN_FLIGHT)
    add("TB/s that they allow", SPARSE, allowed, GPUS[gpu] / 1e12)
    for variant, of_gpus in DECODE.items():
        for scope, of in SCOPES.items():
            for phase, tokens, aim, name in (
                ("decode", 1, of_gpus[gpu], "share"),
                ("prefill", PREFILL, PREFILLED, "gain"),
            ):
                dense, own = of(found[DENSE][tokens]), of(found[variant][tokens])
                values = [rate.seconds(dense) / rate.seconds(own) for rate in rates]

                def with_rate(x: float, dense: Any = dense, own: Any = own, name: str = name) -> float:
                    rate = replace(rates[1], **{name: x})
                    return rate.seconds(dense) / rate.seconds(own)

                needs = f"{name} {needed(with_rate, aim):.2f}"
                add(f"{phase}, {scope}: × dense", variant, values, aim, needs=needs)
        # q, k and v as one dense product, and gate and up, as the packed ones are
        extra = len(products(found[DENSE][1])) - len(products(found[SPARSE][1]))
        fused = [
            (r.seconds(found[DENSE][1]) - extra * r.launch) / r.seconds(found[variant][1]) for r in rates
        ]
        add("decode, layer: × dense with fused products", variant, fused, of_gpus[gpu])
    for phase, tokens, aim in (("decode", 1, None), ("a prefill", PREFILL, ROTATION)):
        for name, variant, less in (("R3", LIGHT, SPARSE), ("R1", ROTATED, LIGHT)):
            add(f"{name}: % of {phase}", variant, more(variant, less, tokens), aim, most=True)
        add(f"fusion of R1 saves: % of {phase}", ROTATED, more(APART, ROTATED, tokens))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    add_csv(parser)
    options = parser.parse_args()
    found = layer_kernels(shape_config(options.shape), 1, PREFILL)
    figures = [row for gpu in GPUS for row in figures_of(found, gpu)]
    for file, rows in (("inference_layer", amounts_of(found)), ("inference", figures)):
        widths = {key: max(len(str(row[key])) for row in (*rows, {key: key})) for key in rows[0]}
        for row in ({key: key for key in rows[0]}, *rows):
            print("  ".join(f"{row[key]!s:<{width}}" for key, width in widths.items()).rstrip())
        print()
        if options.csv is not None:
            origin = {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", "commit": commit()}
            append_rows(
                options.csv / f"{file}.csv", [origin | {"shape": options.shape} | row for row in rows]
            )


if __name__ == "__main__":
    main()
