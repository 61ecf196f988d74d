"""Seconds of `drot prune` of the embedded model on a CPU, beside another checkout of drot.

    python benchmarks/prune_command.py FOLDER --calibration TEXT --eval TEXT --csv

FOLDER is a checkout, such as of an earlier commit, in which `python setup.py build_ext --inplace` has run. It
prunes with its `balanced`. This checkout prunes with each of --options, in turn. The seconds are those of the
whole command. The perplexities are those of the checkpoints of the first round.
"""

import argparse
import datetime
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from _harness import ROOT, add_csv, append_rows, commit, machine

from drot.reporting.demo import MODEL

NSAMPLES, SEQLEN = 64, 512  # the texts of --eval have windows of SEQLEN tokens too
#: seconds over those of the other checkout that are wanted
WANTED = 0.75
BEFORE = "--quality balanced"
OPTIONS = [BEFORE, "--quality fast", "--quality fast --token-weights equal"]
#: prints the perplexity of a checkpoint, which another version of drot may not open
PERPLEXITIES = f"""
import sys, drot, transformers
from drot.evaluation.perplexity import load_eval_tokens, perplexity
model = drot.load(sys.argv[1], device="cpu", dtype="float32")
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
for text in sys.argv[2:]:
    print(perplexity(model, load_eval_tokens(text, tokenizer), seqlen={SEQLEN}))
"""


def seconds_of(checkout: Path, options: str, calibration: str, out: Path) -> float:
    """The seconds of a run of the command in `checkout`."""
    command = [sys.executable, "-P", "-m", "drot", "prune", str(MODEL), "--out", str(out)]
    command += [*shlex.split(options), "--calibration", calibration, "--device", "cpu"]
    command += ["--nsamples", str(NSAMPLES), "--seqlen", str(SEQLEN)]
    started = time.perf_counter()
    _run(checkout, command)
    return time.perf_counter() - started


def perplexities_of(checkout: Path, out: Path, texts: list[str]) -> list[float]:
    """The perplexities of a checkpoint that `checkout` has written."""
    lines = _run(checkout, [sys.executable, "-P", "-c", PERPLEXITIES, str(out), *texts]).splitlines()
    return [float(line) for line in lines[-len(texts) :]]


def _run(checkout: Path, command: list[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--eval", action="append", required=True, help="text; may be given more than once")
    parser.add_argument("--options", nargs="+", default=OPTIONS, help="of this checkout's `drot prune`")
    parser.add_argument("--repeats", type=int, default=3)
    add_csv(parser)
    options = parser.parse_args()
    other, calibration = options.checkout.resolve(), str(Path(options.calibration).resolve())
    runs: dict[tuple[Path, str], list[float]] = {(other, BEFORE): []}
    runs |= {(ROOT, given): [] for given in options.options}
    found: dict[tuple[Path, str], list[float]] = {}
    for repeat in range(options.repeats):
        for (checkout, given), seconds in runs.items():
            with tempfile.TemporaryDirectory() as scratch:
                out = Path(scratch) / "out"
                seconds.append(seconds_of(checkout, given, calibration, out))
                if not repeat:
                    found[checkout, given] = perplexities_of(checkout, out, options.eval)
    texts = [Path(text).stem for text in options.eval]
    before = median(runs[other, BEFORE])
    for (checkout, given), seconds in runs.items():
        ratio = median(seconds) / before
        verdict = "" if checkout == other else "met" if ratio <= WANTED else "MISSED"
        name = commit(checkout)
        perplexities = dict(zip(texts, found[checkout, given], strict=True))
        shown = ", ".join(f"{text} {value:.3f}" for text, value in perplexities.items())
        print(f"{name:<9} {given:<38} {median(seconds):7.1f} s  {ratio:.2f}x  {verdict:<7} {shown}")
        if options.csv:
            for text, value in perplexities.items():
                row = {
                    "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                    "commit": name,
                    "machine": machine("cpu"),
                    "torch": torch.__version__,
                    "threads": torch.get_num_threads(),
                    "options": given,
                    "seconds": f"{median(seconds):.1f}",
                    "ratio": f"{ratio:.2f}",
                    "wanted": "" if checkout == other else WANTED,
                    "text": text,
                    "perplexity": f"{value:.3f}",
                }
                append_rows(options.csv / "prune_command.csv", [row])


if __name__ == "__main__":
    main()
