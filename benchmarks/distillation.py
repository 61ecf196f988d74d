"""Perplexity of the embedded model after pruning and training towards the dense model.

    python benchmarks/distillation.py --calibration TEXT --text TEXT,TEXT=2 --eval TEXT --eval TEXT --csv

The rows of results/distillation.csv. `drot prune` prunes the model to 2:4 by default, on 64 × 512 tokens of
--calibration. Then `drot finetune` trains its kept weights against the dense model, on as many tokens of
--text as --tokens names, each time from the pruned model. More tokens than the text holds draw parts of it
again.
"""

import argparse
import datetime
import tempfile
from pathlib import Path

import torch
from _harness import add_csv, append_rows, commit, machine

import drot
from drot.checkpoint.load import load_tokenizer
from drot.config import CalibrationConfig, FinetuneConfig, Recipe
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.reporting.demo import MODEL

NSAMPLES, SEQLEN, BATCH = 64, 512, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", required=True)
    parser.add_argument(
        "--text", required=True, help="text of the training; several with their shares: a,b=2"
    )
    parser.add_argument("--eval", action="append", required=True, help="text; may be given more than once")
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e6, 3e6, 10e6])
    parser.add_argument("--lr", type=float, help="default: that of drot finetune --full")
    parser.add_argument("--device", default="cpu")
    add_csv(parser)
    options = parser.parse_args()
    texts = {Path(text).stem: load_eval_tokens(text, load_tokenizer(MODEL)) for text in options.eval}

    def add_row(tokens: int, lr: str, folder: Path) -> None:
        model = drot.load(folder, device=options.device, dtype="float32")
        for text, ids in texts.items():
            found = perplexity(model, ids, seqlen=SEQLEN)
            print(f"{tokens / 1e6:5.2f} M tokens  lr {lr:<8} {text:<16} {found:.3f}", flush=True)
            if options.csv:
                line = {
                    "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                    "commit": commit(),
                    "machine": machine(options.device),
                    "torch": torch.__version__,
                    "tokens": tokens,
                    "lr": lr,
                    "text": text,
                    "perplexity": f"{found:.3f}",
                }
                append_rows(options.csv / "distillation.csv", [line])

    with tempfile.TemporaryDirectory() as scratch:
        pruned = Path(scratch) / "pruned"
        calibration = CalibrationConfig(source=options.calibration, nsamples=NSAMPLES, seqlen=SEQLEN)
        drot.prune(
            MODEL, Recipe(calibration=calibration), out=pruned, device=options.device, save_dtype="float32"
        )
        add_row(0, "", pruned)
        for wanted in options.tokens:
            out, nsamples = Path(scratch) / f"{wanted:g}", round(wanted / SEQLEN)
            text = CalibrationConfig(source=options.text, nsamples=nsamples, seqlen=SEQLEN)
            config = FinetuneConfig(full=True, against=str(MODEL), lr=options.lr, batch_size=BATCH, text=text)
            drot.finetune(pruned, config, out=out, device=options.device)
            add_row(nsamples * SEQLEN, f"{config.resolved_lr:g}", out)


if __name__ == "__main__":
    main()
