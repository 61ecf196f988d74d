"""The operations of one layer by formula, without the training of its rotation: calibration and pruning.

    python benchmarks/pass_flops.py --csv               LLaMA-3-8B, 128 sequences of 2048 tokens
    python benchmarks/pass_flops.py --hidden 8192 --ff 28672 --heads 64 --quality balanced

The inputs of down_proj are kept, as where they take at most an eighth of the GPU's memory. A product of
[m, k] and [k, n] counts 2 · m · n · k, a factor and its triangular inverse n³.
tests/pipeline/test_pass_counts.py compares the formulas with the products of a run.
"""

import argparse
import datetime
from collections.abc import Callable

import torch

from drot.calibration.hessian import lower_panels
from drot.config import QUALITIES
from drot.config.recipe import DISTILL_EPOCHS, DISTILL_TEXT
from drot.config.rotation import TRAINING_TOKENS
from drot.pipeline.batches import DISTILL_HELD_OUT_SHARE
from drot.pipeline.importance import MAP_SIZE
from drot.pipeline.work import USUAL_ADMM_ITERATIONS
from drot.pruning.solve import ADMM_INTERVAL, PCG_ITERATIONS_AFTER_ADMM


def operations(
    hidden: int,
    ff: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    block: int,
    device: str = "cuda",
    quality: str = "fast",
    iterations: int = USUAL_ADMM_ITERATIONS,
) -> dict[str, dict[str, float]]:
    """Part of a run → precision of its products → operations of a layer, for SparseGPT.

    Args:
        hidden: width of the residual stream.
        ff: width of the MLP.
        heads: query heads.
        kv_heads: heads of k and v.
        head_dim: width of a head.
        tokens: calibration tokens.
        block: columns of a block of SparseGPT.
        device: the type of the device, which decides how wide the panels of a Hessian are.
        quality: `fast` has no solver. The training of all layers together
            of `best` is counted without attention and without logits.
        iterations: of ADMM.
    """
    attention, kv = heads * head_dim, kv_heads * head_dim
    groups = {"attention": hidden, "o": attention, "mlp": hidden, "down": ff}
    rows = {"attention": attention + 2 * kv, "o": hidden, "mlp": 2 * ff, "down": hidden}
    linear = {group: 2 * rows[group] * size * tokens for group, size in groups.items()}

    def half(size: int) -> float:
        panels = lower_panels(size, torch.device(device))
        return sum((panel.stop - panel.start) * columns.stop for panel, columns in panels)

    def of_groups(cost: Callable[[int, int], float]) -> float:
        return sum(cost(rows[group], size) for group, size in groups.items())

    def sweep(out: int, size: int) -> float:
        return sum(2 * out * min(block, size - i) * max(size - i - block, 0) for i in range(0, size, block))

    share = min(1.0, TRAINING_TOKENS * hidden / tokens)
    hessians = 2 * tokens * sum(half(size) for size in groups.values())
    forward = sum(linear.values())
    unrotated = 2 * hidden * hidden * (attention + 2 * kv + attention + 3 * ff)
    unrotated += 2 * hidden * head_dim * (kv + attention)
    shapes = [(attention, hidden), (kv, hidden), (kv, hidden), (hidden, attention)]
    shapes += [(ff, hidden), (ff, hidden), (hidden, ff)]
    maps = 2 * sum(2 * min(out, MAP_SIZE) * size * (out + min(size, MAP_SIZE)) for out, size in shapes)
    factors = {group: float(size) ** 3 for group, size in groups.items()}
    inverses = 4 * hidden**3 + 2 * attention**2 * head_dim
    parts = {
        "forward passes: training's Hessians": {"inputs": share * (forward - linear["down"])},
        "forward passes: pruning": {"inputs": forward},
        "Hessians of training": {"inputs": share * hessians},
        "Hessians of pruning": {"inputs": hessians},
        "factors and inverses for training": {"fp32": sum(factors.values()) + inverses},
        "factors for pruning": {"fp32": sum(factors.values())},
        "sweep: update right of each block": {"tf32": of_groups(sweep)},
        "tr(W H Wᵀ)": {"fp32": 2 * of_groups(lambda out, size: out * half(size))},
        "figures: Hessians and weights before the rotation": {
            "fp32": 8 * hidden**3 + 4 * attention**2 * head_dim + unrotated
        },
        "figures: factors before the rotation": {"fp32": sum(factors.values()) - factors["down"]},
        "figures: sweep before the rotation": {"tf32": of_groups(sweep)},
        "figures: maps": {"fp32": maps},
    }
    if quality == "fast":
        return parts
    product = of_groups(lambda out, size: 2 * out * size**2)
    read = {group: rows[group] * groups[group] for group in ("o", "down")}  # they write to the stream
    changes = {group: groups[group] ** 2 for group in ("attention", "mlp")} | read
    inversions = iterations // ADMM_INTERVAL
    of_cubes = sum(4 * size**3 for size in groups.values())
    parts |= {
        "forward pass of the dense layer": {"inputs": forward},
        "outputs of the dense weights in the pruned model": {"inputs": linear["o"] + linear["down"]},
        "statistics of the dense target": {"inputs": 2 * tokens * sum(changes.values())},
        "dense targets": {
            "fp32": 2 * product + sum(2 * rows[group] * groups[group] ** 2 for group in ("attention", "mlp"))
        },
        "ADMM: first gradient": {"fp32": product},
        "ADMM: iterations": {"bf16": iterations * product},
        "ADMM: inverses": (
            {"fp32": inversions * sum(factors.values())}
            if device == "cpu"  # a GPU makes two products of each inverse but the first
            else {"fp32": sum(factors.values()), "bf16": (inversions - 1) * of_cubes}
        ),
        "conjugate gradients: first residual": {"fp32": product},
        "conjugate gradients: iterations": {"bf16": PCG_ITERATIONS_AFTER_ADMM * product},
        "errors before and after": {"fp32": 6 * of_groups(lambda out, size: out * half(size))},
    }
    if quality == "best":
        passes = 3 * DISTILL_EPOCHS * (1 - DISTILL_HELD_OUT_SHARE) + 2 * DISTILL_HELD_OUT_SHARE
        parts["training of all layers together"] = {"inputs": DISTILL_TEXT * (1 + passes) * forward}
    return parts


def main() -> None:
    # not above: tests/pipeline/test_pass_counts.py takes `operations` from this file without its folder
    from _harness import add_csv, append_rows, commit

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (
        ("hidden", 4096), ("ff", 14336), ("heads", 32), ("kv-heads", 8), ("head-dim", 128),
        ("tokens", 128 * 2048), ("block", 128),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--quality", choices=sorted(QUALITIES), default="fast")
    add_csv(parser)
    options = vars(parser.parse_args())
    save = options.pop("csv")
    parts = operations(**options)
    total = sum(sum(costs.values()) for costs in parts.values())
    for name, costs in parts.items():
        for precision, cost in costs.items():
            print(f"{name:52} {precision:7} {cost / 1e12:8.2f} TFLOP {cost / total:6.1%}")
            row: dict[str, object] = {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "commit": commit(),
                "part": name,
                "products": precision,
                "tflop": f"{cost / 1e12:.2f}",
            }
            if save is not None:
                append_rows(save / "pass_flops.csv", [row])
    print(f"{'all':60} {total / 1e12:8.2f} TFLOP")


if __name__ == "__main__":
    main()
