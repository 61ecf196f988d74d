"""The operations of one layer by formula, without the training of its rotation: calibration and pruning.

    python benchmarks/pass_flops.py --csv               LLaMA-3-8B, 128 sequences of 2048 tokens
    python benchmarks/pass_flops.py --hidden 8192 --ff 28672 --heads 64 --quality balanced
    python benchmarks/pass_flops.py --minutes           LLaMA-3-8B and 70B in all qualities, at RATES

The inputs of down_proj are kept, as where they take at most an eighth of the GPU's memory. A product of
[m, k] and [k, n] counts 2 · m · n · k, a factor and its triangular inverse n³.
tests/pipeline/test_pass_counts.py compares the formulas with the products of a run.
"""

import argparse
import datetime
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from drot.calibration.hessian import lower_panels
from drot.config import QUALITIES, Recipe, resolve
from drot.config.rotation import TRAINING_TOKENS
from drot.model.decoder import DecoderModel
from drot.pipeline.estimate import USUAL_ADMM_ITERATIONS, rotate, sizes_of
from drot.pipeline.importance import MAP_SIZE
from drot.pruning.solve import ADMM_INTERVAL, PCG_ITERATIONS_AFTER_ADMM
from drot.speed.variants import shape_config

#: What one H100 (SXM) is assumed to reach: operations a second by precision, against peaks of 989, 495, 67
#: and 67 TFLOP/s; bytes a second of its memory (peak 3.35 TB/s), between its memory and pageable main memory,
#: and to the disk. No run has measured them.
RATES = {"bf16": 600e12, "tf32": 300e12, "fp32": 50e12, "fp64": 50e12}
MEMORY, HOST, DISK = 2.5e12, 6e9, 2e9
#: passes over fp32 matrices of the weights' size beside the products: in an iteration of ADMM
#: (drot/pruning/solve.py) and of the conjugate gradients
ADMM_PASSES, PCG_PASSES = 16, 14
#: bytes of a step of the training beside its products, for each weight of the layer (CHANGELOG.md: 1.6 GB for
#: LLaMA-3-8B)
STEP_BYTES = 7.4
#: bytes read and written for a weight in a step of the recovery: gradient, fp32 value, two moments, mask
RECOVERY_BYTES = 40
#: seconds of Python, of launches and of host waits in a layer, whatever its size
OVERHEAD = 0.3


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
        quality: `fast` has no solver. The recovery of `best` is counted for all epochs, without attention.
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
    parts |= {
        "forward pass of the dense layer": {"inputs": forward},
        "outputs of the dense weights in the pruned model": {"inputs": linear["o"] + linear["down"]},
        "statistics of the dense target": {"inputs": 2 * tokens * sum(changes.values())},
        "dense targets": {
            "fp32": 2 * product + sum(2 * rows[group] * groups[group] ** 2 for group in ("attention", "mlp"))
        },
        "ADMM: first gradient": {"fp32": product},
        "ADMM: iterations": {"bf16": iterations * product},
        "ADMM: inverses": {"fp32": inversions * sum(factors.values())},
        "conjugate gradients: first residual": {"fp32": product},
        "conjugate gradients: iterations": {"bf16": PCG_ITERATIONS_AFTER_ADMM * product},
        "errors before and after": {"fp32": 6 * of_groups(lambda out, size: out * half(size))},
    }
    if quality == "best":
        epochs = Recipe().recovery.recover_epochs
        parts["recovery"] = {"inputs": 3 * epochs * forward * 7 / 8 + (epochs + 1) * forward / 8}
    return parts


def layer_seconds(config: Any, quality: str, nsamples: int = 128, seqlen: int = 2048) -> dict[str, float]:
    """Part → seconds of a layer at RATES, for a model in bf16 on a GPU that has room for the dense states."""
    hidden, ff, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv_heads, tokens = config.num_key_value_heads, nsamples * seqlen
    parts = operations(hidden, ff, heads, kv_heads, config.head_dim, tokens, 128, quality=quality)

    def products(parts: Mapping[str, Mapping[str, float]]) -> float:
        rates = RATES | {"inputs": RATES["bf16"]}
        return sum(cost / rates[name] for costs in parts.values() for name, cost in costs.items())

    recovery = {name: parts.pop(name) for name in list(parts) if name == "recovery"}
    recipe = resolve(Recipe().replace(mode="layer").with_quality(quality), device="cuda")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = sizes_of(DecoderModel(model), nsamples, seqlen)
    weights = sizes.layer_weights
    dense = quality != "fast"
    causal = 4 * tokens * seqlen * heads * config.head_dim / 2
    passes = ADMM_PASSES * USUAL_ADMM_ITERATIONS + PCG_PASSES * PCG_ITERATIONS_AFTER_ADMM if dense else 0
    epochs = recipe.recovery.recover_epochs
    batches = epochs * nsamples * 7 / 8 / recipe.recovery.recover_batch
    streams = 4 if dense else 2  # rotated into the basis of the layer and out of it
    seconds = {
        "training": rotate(sizes, recipe, sizes.pruned(recipe)[:1]) / RATES["bf16"]
        + recipe.rotation.steps * STEP_BYTES * weights / MEMORY,
        "calibration and pruning": products(parts) + causal * (3.5 if dense else 2) / RATES["bf16"],
        "solver beside its products": 4 * passes * weights / MEMORY,
        "streams": streams * (2 * 2 * tokens * hidden**2 / RATES["bf16"] + 12 * tokens * hidden / MEMORY),
        "merge, in fp64": 2 * weights * hidden / RATES["fp64"],
        # to the device and home again in a thread; the copy of a part waits
        "copy of the part": (2 * weights + 8 * hidden**2) / HOST,
        "overhead": OVERHEAD,
    }
    if recovery:
        seconds["recovery"] = products(recovery) + batches * RECOVERY_BYTES * weights / MEMORY
    beside = (2 * weights + 8 * hidden**2) * (1 / DISK + 1 / 1e9)  # written, and hashed by one core
    seconds["saving that no work hides"] = max(0.0, beside - sum(seconds.values()))
    return seconds


def ends_seconds(config: Any) -> float:
    """Seconds beside the layers: load, check, embedding and lm_head, and their shard with its hash.

    The shards of the layers are written while layers are pruned.
    """
    hidden, layers, ff = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    of_layer = 2 * hidden * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    of_layer += 3 * hidden * ff
    ends = 2 * config.vocab_size * hidden
    size = 2 * (layers * of_layer + ends)
    check = layers * (2 * of_layer / HOST + 2 * of_layer * hidden / RATES["fp64"])
    check += 2 * 4 / 3 * 2 * hidden**3 / 1e12  # two QRs in fp64
    # read and hashed by 8 cores; the ends written, and hashed by one core
    files = size / DISK + size / 8e9 + 2 * ends * (1 / DISK + 1 / 1e9)
    return check + 2 * ends * hidden / RATES["fp64"] + 2 * ends * 2 / HOST + files


def print_minutes() -> None:
    """The minutes of a model by quality, with the seconds of a layer."""
    print("rates: " + ", ".join(f"{name} {rate / 1e12:g} TFLOP/s" for name, rate in RATES.items()))
    print(f"memory {MEMORY / 1e12:g} TB/s, main memory {HOST / 1e9:g} GB/s, disk {DISK / 1e9:g} GB/s")
    for shape in ("llama-3-8b", "llama-3-70b"):
        config = shape_config(shape)
        for quality in QUALITIES:
            seconds = layer_seconds(config, quality)
            layer, ends = sum(seconds.values()), ends_seconds(config)
            minutes = (config.num_hidden_layers * layer + ends) / 60
            print(f"{shape} {quality}: {layer:.2f} s a layer, {ends:.0f} s beside, {minutes:.1f} minutes")
            for name, value in seconds.items():
                print(f"  {name:30} {value:7.2f} s")


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
    parser.add_argument("--minutes", action="store_true", help="minutes of two models in all qualities")
    add_csv(parser)
    options = vars(parser.parse_args())
    if options.pop("minutes"):
        print_minutes()
        return
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
