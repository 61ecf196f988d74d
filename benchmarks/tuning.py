"""Settings of the pruning of `balanced` on a model that others trained: the rows of results/tuning.csv.

    python benchmarks/tuning.py --calibration TEXT --eval TEXT --eval TEXT --rotations FOLDER --seed 0

For each seed, another calibration text, the rotations are trained once, in --steps steps, and saved in
FOLDER. All settings are pruned with them, so that the rotations do not differ. What is damped or weighted in
the training of the rotations stays as by default. One row is one setting, one seed and one text.
"""

from pathlib import Path
from typing import Any

from _harness import append_rows
from real_models import Measurement, figures, parser, told
from recipes import RECIPES

DEFAULT = "default"
#: name → what differs from `--quality balanced`
SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    **{f"damping {share}": dict(damping=share) for share in (0.15, 0.6, 1.0)},
    **{f"target weight {share}": dict(target_weight=share) for share in (0.125, 0.5, 1.0)},
    "target self": dict(target="self"),
    "equal tokens": dict(token_weights="equal"),
    "pcg": dict(solve="pcg"),
}


def main() -> None:
    options_of = parser(__doc__.splitlines()[0], SETTINGS)
    options_of.add_argument("--rotations", type=Path, required=True, help="folder; those in it are used")
    options_of.add_argument("--steps", type=int, default=50, help="training steps of the rotations")
    options = options_of.parse_args()
    measurement = Measurement.of(options)
    common = measurement.common | {"steps": options.steps}
    base = RECIPES["full, balanced"].replace(steps=options.steps)
    for seed in options.seed or [0]:
        file = options.rotations / f"{common['model']}-{options.steps}-steps-seed-{seed}.safetensors"
        for name in options.only or SETTINGS:
            trains = not file.exists()
            if trains:
                options.rotations.mkdir(parents=True, exist_ok=True)
                pruned = measurement.pruned(base, seed, save_rotations_to=file)
            if name != DEFAULT or not trains:
                pruned = measurement.pruned(base.replace(**SETTINGS[name]), seed, rotations=file)
            for text, dense in measurement.texts.items():
                measured = figures(dense, pruned)
                print(f"{name:<20} seed {seed}  {text:<16} {told(measured)}", flush=True)
                if options.csv:
                    row = common | {"setting": name, "seed": seed, "text": text, **measured}
                    append_rows(options.csv / "tuning.csv", [row])


if __name__ == "__main__":
    main()
