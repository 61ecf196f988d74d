"""Perplexity of a model that is pruned by different recipes: the rows of results/perplexity.csv.

    python benchmarks/perplexity.py --csv                          the embedded model and texts
    python benchmarks/perplexity.py MODEL --calibration TEXT --eval TEXT [--eval TEXT] --only shared

All recipes take the same calibration windows. A row also has the perplexity of the dense model, and of the
model that the same method prunes to the same sparsities without a rotation and without a solver. Without
--untimed a row has the seconds of the pruning, for which the machine must be idle.
"""

import argparse
import dataclasses
import datetime
import functools
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from _harness import add_csv, append_rows, commit, machine

import drot
from drot.checkpoint.load import load_tokenizer
from drot.config import QUALITIES, Recipe
from drot.config.rotation import FAST_STEPS, POINTS
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.machine.devices import pick_device
from drot.reporting.demo import CALIBRATION, HELD_OUT, MODEL

#: R1 and R2 alone, and all calibration tokens alike, of which most rows are
RECIPE = Recipe().replace(down_rotation="none", token_weights="equal")
ONE_SHOT = RECIPE.with_quality("fast").replace(solve="none")
METHODS = [
    ("sparsegpt", "2:4"), ("wanda", "2:4"), ("magnitude", "2:4"), ("sparsegpt", "4:8"), ("sparsegpt", "0.5")
]  # fmt: skip
#: the fields that the pruning without a rotation shares with a recipe
MASK = ("method", "sparsity", "keep", "sparsity_of")
PAPER = dict(objective="entropy", optimizer="paper", reference_compat=True)
#: name → what differs from SparseGPT 2:4 with `--quality fast`
VARIANTS: dict[str, dict[str, Any]] = {
    "paper, 400 steps": PAPER | dict(steps=400),
    "entropy, 100 steps": dict(objective="entropy", steps=100),
    "100 steps": dict(steps=100),
    "200 steps": dict(steps=200),
    "all training tokens": dict(training_tokens=0),
    "64 training tokens": dict(training_tokens=64),
    "16 training tokens": dict(training_tokens=16),
    "shared": dict(mode="shared"),
    "blocks 2": dict(blocks=2),
    "bfloat16 products": dict(product_dtype="bfloat16"),
    "dense hessians": dict(hessians="dense"),
    "boundary on the residual": dict(hessians="dense", boundary="residual"),
    "entropy 0.5": dict(sparsity="0.5", objective="entropy", steps=100),
    "entropy 0.5, score of the paper's code": dict(
        sparsity="0.5", objective="entropy", steps=100, reference_compat=True
    ),
    "keep layers.0.*": dict(keep=("layers.0.*",)),
    "keep down_proj": dict(keep=("down_proj",)),
    "down_proj=4:8": dict(sparsity_of=("down_proj=4:8",)),
}
#: name → what differs from the point `full`, with R3, and `--quality fast`
DOWN: dict[str, dict[str, Any]] = {
    f"full, one shot, R3 in blocks of {size}": dict(down_rotation=size) for size in (16, 32, 88, 176, 704)
} | {
    "full, one shot, 100 steps": dict(steps=100),
    "full, one shot, all training tokens": dict(training_tokens=0),
    "light, one shot, all training tokens": POINTS["light"] | dict(training_tokens=0),
    "full, one shot, boundary on the residual": dict(hessians="dense", boundary="residual"),
    **{
        f"full, one shot, {method} {sparsity}": dict(method=method, sparsity=sparsity)
        for method, sparsity in METHODS
    },
}
#: name → what differs from SparseGPT 2:4 with `--quality balanced`
DAMPINGS: dict[str, dict[str, Any]] = {
    "balanced, damping 0.01 of the mean": dict(damping=0.01, damping_average="mean"),
    "balanced, damping 0.3 of the mean": dict(damping=0.3, damping_average="mean"),
    "balanced, damping 1 of the median": dict(damping=1.0, damping_average="median"),
}
#: the end of a name → how tokens and outputs count
WEIGHTS: dict[str, dict[str, str]] = {
    "": {},
    ", equal outputs": {"output_weights": "equal"},
    ", equal tokens": {"token_weights": "equal"},
}
RECIPES: dict[str, Recipe] = {
    **{
        f"{method} {sparsity}": ONE_SHOT.replace(method=method, sparsity=sparsity)
        for method, sparsity in METHODS
    },
    **{name: ONE_SHOT.replace(**fields) for name, fields in VARIANTS.items()},
    "fast": RECIPE.with_quality("fast"),
    "balanced": RECIPE.with_quality("balanced"),
    "balanced, recovered": RECIPE.with_quality("balanced").replace(recover="block"),
    "best": RECIPE.with_quality("best"),
    **{name: RECIPE.with_quality("balanced").replace(**fields) for name, fields in DAMPINGS.items()},
    **{
        f"{point}, {quality}{name}": Recipe().replace(**fields, **weights).with_quality(quality)
        for name, weights in WEIGHTS.items()
        for point, fields in POINTS.items()
        for quality in QUALITIES
    },
    **{
        f"full, {quality}, {count} layers per R1": Recipe()
        .replace(layers_per_rotation=count)
        .with_quality(quality)
        for count in (2, 4)
        for quality in ("fast", "balanced")
    },
    **{
        f"{point}, one shot": Recipe().replace(**fields).with_quality("fast").replace(solve="none")
        for point, fields in POINTS.items()
    },
    **{
        name: Recipe().with_quality("fast").replace(**{"solve": "none"} | fields)
        for name, fields in DOWN.items()
    },
}


def with_fewer_steps(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Name → recipe of the rows that were measured when half of today's training steps were the default."""
    shared = FAST_STEPS["shared"]
    return {
        f"{name}, {steps} steps": recipe.replace(steps=steps)
        for name, recipe in recipes.items()
        for steps, today, modes in ((100, None, ("layer", "shared")), (shared // 2, shared, ("shared",)))
        if recipe.rotation.mode in modes and recipe.rotation.steps == today
    }


OLDER = with_fewer_steps(RECIPES)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--calibration", default=CALIBRATION.source)
    parser.add_argument("--eval", action="append", help="text file; may be repeated")
    parser.add_argument("--nsamples", type=int, default=CALIBRATION.nsamples)
    parser.add_argument("--seqlen", type=int, default=CALIBRATION.seqlen)
    parser.add_argument(
        "--only", action="append", choices=RECIPES | OLDER, help="a recipe; may be given more than once"
    )
    parser.add_argument("--device", default="auto")
    add_csv(parser)
    parser.add_argument("--untimed", action="store_true", help="the machine is busy: leave out the seconds")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    tokenizer = load_tokenizer(options.model)
    settings = dataclasses.replace(
        CALIBRATION, source=options.calibration, nsamples=options.nsamples, seqlen=options.seqlen
    )
    texts = {Path(path).stem: load_eval_tokens(path, tokenizer) for path in options.eval or [str(HELD_OUT)]}

    def measure(model: Any) -> dict[str, float]:
        return {name: perplexity(model, ids, seqlen=options.seqlen) for name, ids in texts.items()}

    def pruned(recipe: Recipe) -> dict[str, float]:
        result = drot.prune(
            options.model, dataclasses.replace(recipe, calibration=settings), tokenizer=tokenizer,
            device=options.device, dtype="float32", save_dtype="float32",
        )  # fmt: skip
        return measure(result.model.to(pick_device(options.device)))

    @functools.cache
    def not_rotated(*fields: Any) -> dict[str, float]:
        return pruned(ONE_SHOT.replace(mode="none", **dict(zip(MASK, fields, strict=True))))

    common = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(str(pick_device(options.device))),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": Path(options.model).name,
        "calibration": Path(options.calibration).stem,
        "sequences": options.nsamples,
    }
    dense = measure(drot.load(options.model, device=options.device, dtype="float32"))
    for name in options.only or RECIPES:
        recipe = (RECIPES | OLDER)[name]
        plain = not_rotated(*(getattr(recipe.pruning, field) for field in MASK))
        started = time.perf_counter()
        found = pruned(recipe)
        seconds = "" if options.untimed else f"{time.perf_counter() - started:.0f}"
        for text, value in found.items():
            gap = f"{(plain[text] - value) / (plain[text] - dense[text]):.0%} of the gap"
            print(f"{name:<40} {text:<16} {dense[text]:.3f} {plain[text]:.3f} {value:.3f}  {gap}", flush=True)
        figures = {"dense": dense, "not_rotated": plain, "perplexity": found}
        rows = [
            common
            | {"recipe": name, "seconds": seconds, "text": text}
            | {figure: f"{values[text]:.3f}" for figure, values in figures.items()}
            for text in texts
        ]
        if options.csv:
            append_rows(options.csv / "perplexity.csv", rows)


if __name__ == "__main__":
    main()
