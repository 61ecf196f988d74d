"""Perplexity of a model pruned by different recipes, for the figures in README.md and benchmarks/README.md.

    python benchmarks/perplexity.py --csv                      the embedded model and texts
    python benchmarks/perplexity.py MODEL --calibration TEXT --eval TEXT [--eval TEXT] [--only shared]

All recipes have the same calibration windows. A row shows the share of the gap that a rotation closes,
(plain - rotated) / (plain - dense), where plain is the same method and sparsity without a rotation, with the
kept weights as the method leaves them.
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
from _harness import RESULTS, append_rows, commit, machine

import drot
from drot.checkpoint.load import load_tokenizer
from drot.config import CalibrationConfig, PruningConfig, Recipe, RecoveryConfig, RotationConfig
from drot.demo.demo import CALIBRATION, HELD_OUT, MODEL
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.machine.devices import pick_device
from drot.text.source import load_calibration

PAPER = dict(objective="entropy", optimizer="paper")
RECIPES: dict[str, Recipe] = {}
PARTS = {"rotation": RotationConfig, "pruning": PruningConfig, "recovery": RecoveryConfig}


def make_recipe(method: str, sparsity: str, quality: str = "fast", **fields: Any) -> Recipe:
    """A recipe from a quality and from fields of RotationConfig, PruningConfig and RecoveryConfig."""
    base, fields = Recipe().with_quality(quality), fields | dict(method=method, sparsity=sparsity)
    parts = {}
    for name, kind in PARTS.items():
        names = {field.name for field in dataclasses.fields(kind)} & fields.keys()
        parts[name] = dataclasses.replace(getattr(base, name), **{key: fields[key] for key in names})
    return dataclasses.replace(base, **parts)


def recipe(name: str, method: str, sparsity: str, quality: str = "fast", **fields: Any) -> None:
    """Adds a recipe to RECIPES."""
    RECIPES[name] = make_recipe(method, sparsity, quality, **fields)


for _method in ("sparsegpt", "wanda", "magnitude"):
    for _sparsity in ("2:4", "4:8", "0.5"):
        recipe(f"{_method} {_sparsity}", _method, _sparsity)
for _steps in (100, 400):
    recipe(f"paper {_steps}", "sparsegpt", "2:4", steps=_steps, reference_compat=True, **PAPER)
recipe("paper 100 exact score", "sparsegpt", "2:4", steps=100, **PAPER)
recipe(
    "paper optimiser, pruned importance", "sparsegpt", "2:4", objective="pruned", optimizer="paper", steps=400
)
for _steps in (50, 100, 200):
    recipe(f"fast {_steps}", "sparsegpt", "2:4", steps=_steps, early_stop=0.0)
recipe("fast 100 lr 0.5", "sparsegpt", "2:4", steps=100, lr=0.5, early_stop=0.0)
for _steps in (50, 100, 200):
    recipe(f"shared {_steps}", "sparsegpt", "2:4", mode="shared", steps=_steps, early_stop=0.0)
recipe("shared default", "sparsegpt", "2:4", mode="shared")
recipe("shared, 2 layers a step", "sparsegpt", "2:4", mode="shared", steps=400, layers_per_step=2)
for _name, _place in (("dense hessians", "input"), ("dense hessians, boundary on the residual", "residual")):
    recipe(_name, "sparsegpt", "2:4", hessians="dense", boundary=_place)
    recipe(f"{_name}, 50 steps", "sparsegpt", "2:4", hessians="dense", boundary=_place, steps=50)
for _blocks in (2, 4, 8):
    recipe(f"blocks {_blocks}", "sparsegpt", "2:4", blocks=_blocks)
recipe("bfloat16 products", "sparsegpt", "2:4", product_dtype="bfloat16")
for _quality in ("balanced", "best"):
    for _method in ("sparsegpt", "wanda", "magnitude"):
        recipe(f"{_quality}: {_method} 2:4", _method, "2:4", _quality)
    for _sparsity in ("4:8", "0.5"):
        recipe(f"{_quality}: sparsegpt {_sparsity}", "sparsegpt", _sparsity, _quality)
    recipe(f"{_quality}: shared", "sparsegpt", "2:4", _quality, mode="shared")
    recipe(f"{_quality}: no rotation", "sparsegpt", "2:4", _quality, mode="none")
recipe("pcg", "sparsegpt", "2:4", solve="pcg")
for _weight in (0.25, 0.5):
    recipe(f"target dense {_weight}", "sparsegpt", "2:4", "balanced", target="dense", target_weight=_weight)
for _damping in (0.01, 0.1, 1.0):
    recipe(f"damping {_damping}", "sparsegpt", "2:4", "balanced", damping=_damping)
recipe("block recovery without a solver", "sparsegpt", "2:4", recover="block")
recipe("entropy 0.5, exact score", "sparsegpt", "0.5", objective="entropy")
recipe("entropy 0.5, magnitudes", "sparsegpt", "0.5", objective="entropy", reference_compat=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--calibration", default=CALIBRATION.source)
    parser.add_argument(
        "--eval", action="append", default=None, help="text file; may be given more than once"
    )
    parser.add_argument("--nsamples", type=int, default=CALIBRATION.nsamples)
    parser.add_argument("--seqlen", type=int, default=CALIBRATION.seqlen)
    parser.add_argument(
        "--only",
        action="append",
        default=None,
        help="measure only the recipes whose names start with this; may be given more than once",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", action="store_true", help="append rows to benchmarks/results/")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    calibration = CalibrationConfig(
        source=options.calibration, nsamples=options.nsamples, seqlen=options.seqlen
    )
    sampling = {key: value for key, value in vars(calibration).items() if key != "source"}
    tokens = load_calibration(calibration.source, tokenizer, **sampling)
    texts = {Path(path).stem: load_eval_tokens(path, tokenizer) for path in options.eval or [str(HELD_OUT)]}

    # no column: the rows of before would lack it
    sequences = "" if options.nsamples == CALIBRATION.nsamples else f", {options.nsamples} sequences"

    def measure(model: Any) -> dict[str, float]:
        return {name: perplexity(model, ids, seqlen=options.seqlen) for name, ids in texts.items()}

    def pruned(chosen: Recipe) -> dict[str, float]:
        chosen = dataclasses.replace(chosen, calibration=calibration)
        arguments = dict(tokenizer=tokenizer, calibration=tokens, device=options.device)
        result = drot.prune(options.model, chosen, dtype="float32", save_dtype="float32", **arguments)
        return measure(result.model.to(pick_device(options.device)))

    @functools.cache
    def not_rotated(method: str, sparsity: str) -> dict[str, float]:
        found = pruned(make_recipe(method, sparsity, mode="none"))
        show(f"{method} {sparsity}, no rotation", found)
        return found

    def show(name: str, found: dict[str, float], gap_closed: dict[str, float] | None = None) -> None:
        figures = (
            f"{text} {value:.3f}" + (f" ({gap_closed[text]:.0%})" if gap_closed else "")
            for text, value in found.items()
        )
        print(f"{name:<44}", *figures, flush=True)

    dense = measure(drot.load(options.model, device=options.device, dtype="float32"))
    show("dense", dense)
    for name, chosen in RECIPES.items():
        if options.only and not any(name.startswith(start) for start in options.only):
            continue
        plain = not_rotated(chosen.pruning.method, str(chosen.pruning.sparsity))
        started = time.perf_counter()
        found = pruned(chosen)
        share = {text: (plain[text] - value) / (plain[text] - dense[text]) for text, value in found.items()}
        show(name, found, share)
        if options.csv:
            common = {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "commit": commit(),
                "machine": machine(str(pick_device(options.device))),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "model": Path(options.model).name,
                "recipe": name + sequences,
                "seconds": f"{time.perf_counter() - started:.0f}",
            }
            append_rows(
                RESULTS / "perplexity.csv",
                [
                    common
                    | {
                        "text": text,
                        "dense": f"{dense[text]:.3f}",
                        "not_rotated": f"{plain[text]:.3f}",
                        "perplexity": f"{value:.3f}",
                        "gap_closed": f"{share[text]:.3f}",
                    }
                    for text, value in found.items()
                ],
            )


if __name__ == "__main__":
    main()
