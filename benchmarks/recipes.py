"""The recipes that real_models.py measures, by the name that they have in results/records.csv."""

from typing import Any

from drot.config import ONE_SHOT, QUALITIES, Recipe, RotationConfig, resolve
from drot.config.rotation import POINTS

METHODS = [
    ("sparsegpt", "2:4"), ("wanda", "2:4"), ("magnitude", "2:4"), ("sparsegpt", "4:8"), ("sparsegpt", "0.5")
]  # fmt: skip
PAPER = dict(objective="entropy", optimizer="paper", reference_compat=True, down_rotation="none")
EQUAL_OUTPUTS = {"output_weights": "equal"}
#: name → what differs from `full, one shot`: SparseGPT 2:4 with `--quality fast --solve none`
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{method} {sparsity}": dict(method=method, sparsity=sparsity) for method, sparsity in METHODS[1:]},
    "no R3": dict(down_rotation="none"),
    **{f"R3 in blocks of {size}": dict(down_rotation=size) for size in (16, 32, 88, 176, 704)},
    **{f"{steps} steps": dict(steps=steps) for steps in (100, 200)},
    "all training tokens": dict(training_tokens=0),
    "dense Hessians": dict(hessians="dense"),
    "boundary on the residual": dict(hessians="dense", boundary="residual"),
    "blocks 2": dict(blocks=2),
    "products in bfloat16": dict(product_dtype="bfloat16"),
    "entropy, 100 steps": dict(objective="entropy", steps=100),
    "paper, 400 steps": PAPER | dict(steps=400),
    "keep layers.0.*": dict(keep=("layers.0.*",)),
    "keep down_proj": dict(keep=("down_proj",)),
    "down_proj=4:8": dict(sparsity_of=("down_proj=4:8",)),
}
#: the end of a name → how tokens and outputs count
WEIGHTS: dict[str, dict[str, str]] = {
    "": {},
    ", equal outputs": EQUAL_OUTPUTS,
    ", equal tokens": {"token_weights": "equal"},
}
#: The training of all layers together as it was when `equal outputs` was the default: three passes over as
#: many sequences as the calibration has.
THREE_PASSES = 3


def earlier(recipe: Recipe) -> Recipe:
    """The recipe with THREE_PASSES in its training of all layers together, if it has such a training."""
    return recipe.replace(distill_epochs=THREE_PASSES) if recipe.recovery.distill_epochs else recipe


def of_point(point: str, quality: str, **fields: Any) -> Recipe:
    """The recipe of `--rotation point --quality quality` with other `fields`."""
    return Recipe().replace(**POINTS[point]).with_quality(quality).replace(**fields)


BALANCED = of_point("full", "balanced")
RECIPES: dict[str, Recipe] = {
    "not rotated": Recipe().replace(mode="none", **ONE_SHOT),
    **{
        f"not rotated, {method} {sparsity}": Recipe().replace(
            mode="none", method=method, sparsity=sparsity, **ONE_SHOT
        )
        for method, sparsity in METHODS[1:]
    },
    "not rotated, solver of balanced": Recipe(
        rotation=RotationConfig(mode="none"), pruning=resolve(BALANCED).pruning
    ),
    **{
        f"{point}, {quality}{name}": earlier(of_point(point, quality, **weights))
        if weights is EQUAL_OUTPUTS
        else of_point(point, quality, **weights)
        for name, weights in WEIGHTS.items()
        for point in POINTS
        for quality in QUALITIES
    },
    **{f"{point}, one shot": of_point(point, "fast", solve="none") for point in POINTS},
    **{
        f"full, one shot, {name}": of_point("full", "fast", **{"solve": "none"} | fields)
        for name, fields in VARIANTS.items()
    },
    **{
        f"full, {quality}, {count} layers per R1": of_point("full", quality, layers_per_rotation=count)
        for count in (2, 4)
        for quality in ("fast", "balanced")
    },
    # `best` trains all layers together; it can follow on `fast` too, or on a training of each layer alone
    "full, fast, distilled": of_point("full", "fast", distill_epochs=THREE_PASSES),
    "full, best, three passes": earlier(of_point("full", "best")),
    **{f"full, {quality}, recovered": of_point("full", quality, recover="block") for quality in QUALITIES},
    "full, balanced, no R3": BALANCED.replace(down_rotation="none"),
    # half of today's steps, and the outputs as they counted before they were weighted
    **{
        f"{point}, {quality}, equal outputs, 100 steps": earlier(
            of_point(point, quality, steps=100, **EQUAL_OUTPUTS)
        )
        for point in POINTS
        for quality in ("balanced", "best")
    },
    "full, balanced, equal tokens, 100 steps": of_point(
        "full", "balanced", steps=100, **WEIGHTS[", equal tokens"]
    ),
    "full, balanced, equal outputs, recovered, 100 steps": of_point(
        "full", "balanced", steps=100, recover="block", **EQUAL_OUTPUTS
    ),
}
