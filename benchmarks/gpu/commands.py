"""The commands of drot on a GPU with the embedded model: a line each, with its exit status and its seconds.

A command that needs the result of another runs after it, and the others run side by side. Exit status 1 if a
command failed. It times nothing: the seconds are those beside the others.

    python benchmarks/gpu/commands.py --device cuda
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drot.reporting.demo import CALIBRATION, HELD_OUT, MODEL

#: the longest that a command may take
SECONDS = 150
#: seconds after which the run that is resumed is ended
ENDED_AFTER = 14
#: a chat reads a line
CHAT = "def add(a, b):\n"
#: a command, and the trees of those that need its result
Tree = tuple[list[str], list["Tree"]]


def trees(folder: Path, device: str, nsamples: int) -> list[Tree]:
    """The arguments of the commands. `killed` before them marks the run that is ended early.

    folder: where the commands write.
    """
    text, held_out, model = str(CALIBRATION.source), str(HELD_OUT), str(MODEL)
    dense, packed, best, paper, ratio = (str(folder / name) for name in ("d", "p", "b", "s", "r"))
    calibration = ["--calibration", text, "--nsamples", str(nsamples), "--seqlen", "256"]
    on = ["--device", device]
    tuned = ["--text", text, "--nsamples", "8", "--seqlen", "256", *on]
    own = ["--out", str(folder / "own.jsonl"), "--tokens", "2048", "--seqlen", "256"]

    def prune(*options: str, out: str) -> list[str]:
        return ["prune", model, *options, "--out", out, *calibration, *on]

    quality_best = prune("--quality", "best", out=best)
    return [
        (
            prune("--quality", "fast", out=dense),
            [
                (["eval", dense, "--ppl", held_out, "--against", model, "--seqlen", "256", *on], []),
                (["finetune", dense, "--full", "--against", model, "--out", f"{dense}-full", *tuned], []),
                (["finetune", dense, "--out", f"{dense}-lora", *tuned], []),
                (["report", dense], []),
                (
                    ["export", dense, "--out", f"{dense}.drot"],
                    [(["apply", f"{dense}.drot", "--out", f"{dense}-again", "--model", model], [])],
                ),
            ],
        ),
        (
            prune("--format", "packed", "--dtype", "float16", out=packed),
            [
                (["eval", packed, "--ppl", held_out, "--seqlen", "256", *on], []),
                (["tune", packed, *on], []),
                (["bench", packed, "--repeats", "3", *on], []),
                (["chat", packed, "--max-tokens", "16", *on], []),
                (["chat", packed, "--max-tokens", "16", "--compile", *on], []),
                (["convert", packed, "--out", f"{packed}-dense", "--format", "dense"], []),
            ],
        ),
        (["killed", *quality_best], [([*quality_best, "--resume"], [])]),
        (prune("--method", "wanda", "--sparsity", "0.5", out=ratio), []),
        (["sample", model, *own, *on], []),
        (prune("--rotation", "stock", "--optimizer", "paper", out=paper), []),
        (["prune", model, "--sensitivity", *calibration, *on], []),
    ]


def lines_of(tree: Tree) -> list[list[str]]:
    """The commands of a tree, each before those that need it."""
    first, rest = tree
    return [first, *(line for each in rest for line in lines_of(each))]


def walk(tree: Tree) -> bool:
    """Runs a command, and then those that need its result, side by side; whether all succeeded."""
    first, rest = tree
    return run(first) and side_by_side(rest)


def side_by_side(several: Sequence[Tree]) -> bool:
    """Runs trees at the same time; whether all commands succeeded."""
    with ThreadPoolExecutor(len(several) or 1) as pool:
        return all(list(pool.map(walk, several)))


def run(arguments: Sequence[str]) -> bool:
    """Runs a command, says what came of it, and returns whether it succeeded."""
    killed = arguments[0] == "killed"
    command = [sys.executable, "-m", "drot", *arguments[killed:]]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, input=CHAT, capture_output=True, text=True, timeout=ENDED_AFTER if killed else SECONDS
        )
        status, said = str(done.returncode), (done.stdout + done.stderr).strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        status, said = "ended", []
    right = status in (("0", "ended") if killed else ("0",))
    seconds = time.monotonic() - started
    print(f"{status:>5} {seconds:>4.0f} s  drot {' '.join(arguments[:4])}", *said, flush=True)
    if not right:
        print(f"WRONG  drot {' '.join(arguments)}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nsamples", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return int(not side_by_side(trees(Path(folder), options.device, options.nsamples)))


if __name__ == "__main__":
    sys.exit(main())
