"""Settings of the pruning of `balanced` on a model that others trained: the rows of results/tuning.csv.

    python benchmarks/tuning.py --calibration TEXT --eval TEXT --eval TEXT --rotations FOLDER --seed 0

For each seed, another calibration text, the rotations are trained once, in --steps steps, and saved in
FOLDER. All settings are pruned with them, so that the rotations do not differ. What is damped or weighted in
the training of the rotations stays as by default. One row is one setting, one seed and one text.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from _harness import ROOT, add_csv, append_rows
from real_models import SMOLLM2, common_columns, figures, predictions, smollm2, told
from recipes import RECIPES

import drot
from drot.checkpoint.load import load_tokenizer
from drot.config import CalibrationConfig
from drot.evaluation.perplexity import load_eval_tokens
from drot.machine.devices import pick_device
from drot.reporting.demo import HELD_OUT

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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help=f"folder or name on the hub; default: {SMOLLM2}")
    parser.add_argument("--models", type=Path, default=ROOT / ".cache" / "models")
    parser.add_argument("--calibration", default="wikitext2")
    parser.add_argument("--eval", action="append", help="text; may be given more than once")
    parser.add_argument("--rotations", type=Path, required=True, help="folder; those in it are used")
    parser.add_argument("--steps", type=int, default=50, help="training steps of the rotations")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the calibration")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens of a window of either text")
    parser.add_argument("--eval-tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, action="append", help="may be given more than once; default: 0")
    parser.add_argument("--only", action="append", choices=SETTINGS, help="may be given more than once")
    parser.add_argument("--device", default="auto")
    add_csv(parser)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    source = options.model or smollm2(options.models)
    tokenizer = load_tokenizer(source)
    places = {"device": options.device, "dtype": "float32"}
    texts = {
        Path(text).stem: load_eval_tokens(text, tokenizer)[: options.eval_tokens]
        for text in options.eval or ["wikitext2", str(HELD_OUT)]
    }
    dense = predictions(drot.load(source, **places), texts, options.seqlen)
    settings = CalibrationConfig(
        source=options.calibration, nsamples=max(1, options.tokens // options.seqlen), seqlen=options.seqlen
    )
    device = pick_device(options.device)
    common = common_columns(source, settings, str(device)) | {"steps": options.steps}
    base = RECIPES["full, balanced"].replace(steps=options.steps)

    def pruned_by(seed: int, fields: dict[str, Any], **rotations: Path) -> torch.nn.Module:
        recipe = dataclasses.replace(base, calibration=dataclasses.replace(settings, seed=seed))
        changed = recipe.replace(**fields)
        run: Any = drot.prune(
            source, changed, tokenizer=tokenizer, save_dtype="float32", **places, **rotations
        ).model
        return run.to(device)

    for seed in options.seed or [0]:
        file = options.rotations / f"{Path(source).name}-{options.steps}-steps-seed-{seed}.safetensors"
        for name in options.only or SETTINGS:
            trains = not file.exists()
            if trains:
                options.rotations.mkdir(parents=True, exist_ok=True)
                pruned = pruned_by(seed, {}, save_rotations_to=file)
            if name != DEFAULT or not trains:
                pruned = pruned_by(seed, SETTINGS[name], rotations=file)
            for text in texts:
                measured = figures(dense[text], pruned)
                print(f"{name:<20} seed {seed}  {text:<16} {told(measured)}", flush=True)
                if options.csv:
                    row = common | {"setting": name, "seed": seed, "text": text, **measured}
                    append_rows(options.csv / "tuning.csv", [row])


if __name__ == "__main__":
    main()
