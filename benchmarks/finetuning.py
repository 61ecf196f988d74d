"""Perplexity of the embedded model after pruning and fine-tuning: the rows of results/finetuning.csv.

    python benchmarks/finetuning.py --csv

SparseGPT prunes the model to 2:4 with `--quality fast`, without and with a rotation. Then the model is
trained on 256 sequences of the calibration's text.
"""

import argparse
import datetime
import tempfile
from pathlib import Path

import torch
from _harness import add_csv, append_rows, commit, machine

import drot
from drot.checkpoint.load import load_tokenizer
from drot.config import FINETUNE_LR, CalibrationConfig, FinetuneConfig, Recipe
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.reporting.demo import CALIBRATION, HELD_OUT, MODEL

TEXT = CalibrationConfig(source=CALIBRATION.source, nsamples=256, seqlen=CALIBRATION.seqlen)
#: training → the learning rates that are compared
RATES = {"lora": [FINETUNE_LR["lora"]], "full": [2e-5, 5e-5, 1e-4]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser)
    options = parser.parse_args()
    held_out = load_eval_tokens(str(HELD_OUT), load_tokenizer(MODEL))

    def row(mode: str, training: str, lr: float | str, folder: Path) -> None:
        found = perplexity(drot.load(folder, device="cpu", dtype="float32"), held_out, seqlen=TEXT.seqlen)
        print(f"rotation {mode:<6} {training:<6} {lr!s:<8} {found:.3f}", flush=True)
        if options.csv:
            line = {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "commit": commit(),
                "machine": machine("cpu"),
                "torch": torch.__version__,
                "rotation": mode,
                "training": training,
                "lr": lr,
                "perplexity": f"{found:.3f}",
            }
            append_rows(options.csv / "finetuning.csv", [line])

    with tempfile.TemporaryDirectory() as scratch:
        for mode in ("none", "layer"):
            pruned = Path(scratch) / mode
            recipe = Recipe(calibration=CALIBRATION).with_quality("fast").replace(solve="none", mode=mode)
            drot.prune(MODEL, recipe, out=pruned, device="cpu", dtype="float32", save_dtype="float32")
            row(mode, "none", "", pruned)
            for training, rates in RATES.items():
                for lr in rates:
                    out = Path(scratch) / f"{mode}-{training}-{lr}"
                    config = FinetuneConfig(full=training == "full", lr=lr, text=TEXT)
                    drot.finetune(pruned, config, out=out, device="cpu")
                    row(mode, training, lr, out)


if __name__ == "__main__":
    main()
