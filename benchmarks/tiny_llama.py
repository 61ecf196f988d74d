"""The embedded model through `drot prune`, a saved and a packed checkpoint, and generate(), on one device.

Prints the perplexity on held-out Python, that of the packed checkpoint, and that of a run on the CPU, from
results/records.csv. Exit status 1 if they lie too far apart, or if the packed model does not generate.

    python benchmarks/tiny_llama.py --device cuda --quality balanced
"""

import argparse
import csv
import datetime
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from _harness import RESULTS, add_csv, append_rows, commit, machine

import drot
from drot.checkpoint.convert import convert
from drot.checkpoint.load import load_tokenizer
from drot.config import QUALITIES, Recipe
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.reporting.demo import CALIBRATION, HELD_OUT, MODEL
from drot.sparse.linear import packed_linears

#: largest distance from the perplexity of the CPU: twice what a change of rounding moves (README.md)
MOST_APART = 0.2
#: largest relative distance of the packed checkpoint's perplexity: the same weights in other products
MOST_PACKED = 5e-3
PROMPT, NEW_TOKENS = 16, 32


def of_the_cpu(quality: str, sequences: int) -> float | None:
    """The last perplexity that was measured on a CPU with as much of the same text; None without one."""
    assert CALIBRATION.seqlen is not None
    wanted = {
        "model": MODEL.name,
        "calibration": Path(str(CALIBRATION.source)).stem,
        "tokens": str(sequences * CALIBRATION.seqlen),
        "recipe": f"full, {quality}",
        "seed": "0",
        "text": HELD_OUT.stem,
    }
    with (RESULTS / "records.csv").open(newline="") as file:
        rows = [float(row["perplexity"]) for row in csv.DictReader(file) if wanted.items() <= row.items()]
    return rows[-1] if rows else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quality", choices=list(QUALITIES), default="balanced")
    parser.add_argument("--nsamples", type=int, default=CALIBRATION.nsamples)
    parser.add_argument("--windows", type=int, help="windows of the held-out text; default: all")
    parser.add_argument("--steps", type=int, help="training steps; default: those of the quality")
    add_csv(parser)
    return parser.parse_args()


@torch.no_grad()
def main() -> int:
    options = arguments()
    tokenizer, seqlen = load_tokenizer(MODEL), CALIBRATION.seqlen
    assert seqlen is not None
    held_out = load_eval_tokens(str(HELD_OUT), tokenizer)[: options.windows and options.windows * seqlen]
    recipe = Recipe(calibration=replace(CALIBRATION, nsamples=options.nsamples)).with_quality(options.quality)
    if options.steps is not None:
        recipe = recipe.replace(steps=options.steps)
    with tempfile.TemporaryDirectory() as folder:
        dense_path, packed_path = Path(folder) / "dense", Path(folder) / "packed"
        manifest = drot.prune(
            MODEL, recipe, out=dense_path, tokenizer=tokenizer, device=options.device
        ).manifest
        convert(dense_path, packed_path, "packed")
        dense, packed = (drot.load(path, device=options.device) for path in (dense_path, packed_path))
    values = [perplexity(model, held_out, seqlen=seqlen) for model in (dense, packed)]
    ids = held_out[None, :PROMPT].to(dense.device)
    made = packed.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
        min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS,
    )  # fmt: skip
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in manifest.seconds.phases.items())
    print(
        f"tiny-llama on {machine(options.device)}, --quality {options.quality}, {options.nsamples} sequences"
    )
    print(f"  seconds: {phases}")
    print(f"  sparsity {manifest.sparsity:.2%}, {len(list(packed_linears(packed)))} packed linears")
    print(f"  generated: {tokenizer.decode(made[0, PROMPT:].tolist())!r}")
    reference = None
    if options.windows is None and options.steps is None:
        reference = of_the_cpu(options.quality, options.nsamples)
    checks = {
        "packed linears": any(packed_linears(packed)),
        "new tokens": made.shape == (1, PROMPT + NEW_TOKENS),
        "perplexity of packed": abs(values[1] / values[0] - 1) <= MOST_PACKED,
        "perplexity of the CPU": reference is None or abs(values[0] - reference) <= MOST_APART,
    }
    beside = "not measured" if reference is None else f"{reference:.3f}"
    print(f"  perplexity {values[0]:.3f}, packed {values[1]:.3f}, of the CPU {beside}")
    for name, held in checks.items():
        if not held:
            print(f"  WRONG: {name}")
    if options.csv is not None:
        row = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "machine": machine(options.device),
            "torch": torch.__version__,
            "quality": options.quality,
            "sequences": options.nsamples,
            "seconds": f"{manifest.seconds.total:.1f}",
            "perplexity": f"{values[0]:.3f}",
            "packed": f"{values[1]:.3f}",
        }
        append_rows(options.csv / "tiny_llama.csv", [row])
    return int(not all(checks.values()))


if __name__ == "__main__":
    sys.exit(main())
