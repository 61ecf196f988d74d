"""Settings on a model that others trained, each against the default: the rows of results/tuning.csv.

    python benchmarks/tuning.py --calibration TEXT --eval TEXT --eval TEXT --base "full, fast" --seed 0

One row is one setting, one seed and one text. A seed draws the calibration text. The settings of `full, fast`
change the training of the rotations. Those of `full, balanced` change the pruning, and those of `full, best`
the training of all layers together: for these two the rotations are trained once for each seed, in --steps
steps, and saved in the folder --rotations, so that they are the same for all settings.
"""

from pathlib import Path
from typing import Any

from _harness import append_rows
from real_models import Measurement, figures, parser, told
from recipes import BALANCED, RECIPES

DEFAULT = "default"
#: the recipe whose settings change the rotations
TRAINED = "full, fast"
#: recipe → name of a setting → what differs from the recipe
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    TRAINED: {
        DEFAULT: {},
        **{f"R3 in blocks of {size}": dict(down_rotation=size) for size in (16, 32, 128, 256)},
        **{f"{count} training tokens a channel": dict(training_tokens=count) for count in (8, 16)},
        **{f"rate {rate:g}": dict(lr=rate) for rate in (0.15, 0.6)},
    },
    "full, balanced": {
        DEFAULT: {},
        **{f"damping {share}": dict(damping=share) for share in (0.15, 0.6, 1.0)},
        **{f"target weight {share}": dict(target_weight=share) for share in (0.125, 0.5, 1.0)},
        "target self": dict(target="self"),
        "equal tokens": dict(token_weights="equal"),
        "pcg": dict(solve="pcg"),
    },
    "full, best": {
        DEFAULT: {},
        **{f"rate {rate:g}": dict(distill_lr=rate) for rate in (2e-4, 1e-3)},
        **{f"{count} sequences a step": dict(distill_batch=count) for count in (1, 4)},
        "two passes": dict(distill_epochs=2),
    },
}


def main() -> None:
    names = dict.fromkeys(name for settings in SETTINGS.values() for name in settings)
    options_of = parser(__doc__.splitlines()[0], names)
    options_of.add_argument("--base", choices=SETTINGS, default="full, balanced", help="default: %(default)s")
    options_of.add_argument("--rotations", type=Path, help="folder; those in it are used")
    options_of.add_argument("--steps", type=int, default=50, help="training steps of the rotations")
    options = options_of.parse_args()
    settings = SETTINGS[options.base]
    if unknown := [name for name in options.only or () if name not in settings]:
        options_of.error(f"expected settings of {options.base}, got {', '.join(unknown)}")
    if options.base != TRAINED and options.rotations is None:
        options_of.error(f"--base {options.base!r} needs --rotations")
    measurement = Measurement.of(options)
    common = measurement.common | {"base": options.base, "steps": options.steps}
    base = RECIPES[options.base].replace(steps=options.steps)

    for seed in options.seed or [0]:
        rotations: dict[str, Path] = {}
        if options.base != TRAINED:
            options.rotations.mkdir(parents=True, exist_ok=True)
            file = options.rotations / f"{common['model']}-{options.steps}-steps-seed-{seed}.safetensors"
            if not file.exists():
                measurement.pruned(BALANCED.replace(steps=options.steps), seed, save_rotations_to=file)
            rotations = {"rotations": file}
        for name in options.only or settings:
            pruned = measurement.pruned(base.replace(**settings[name]), seed, **rotations)
            for text, dense in measurement.texts.items():
                measured = figures(dense, pruned)
                print(f"{name:<28} seed {seed}  {text:<16} {told(measured)}", flush=True)
                if options.csv:
                    row = common | {"setting": name, "seed": seed, "text": text, **measured}
                    append_rows(options.csv / "tuning.csv", [row])


if __name__ == "__main__":
    main()
