"""The commands of drot on a GPU with the embedded model: a line each, with its exit status and its seconds.

The commands of a chain run one after the other, as each needs the result of the one before; the chains run
side by side. Exit status 1 if a command failed. It times nothing: the seconds are those beside the others.

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


def chains(folder: Path, device: str, nsamples: int) -> list[list[list[str]]]:
    """The arguments of the commands of each chain. `killed` before them marks the run that is ended early.

    folder: where the commands write.
    """
    text, held_out, model = str(CALIBRATION.source), str(HELD_OUT), str(MODEL)
    dense, packed, best, paper, ratio = (str(folder / name) for name in ("d", "p", "b", "s", "r"))
    calibration = ["--calibration", text, "--nsamples", str(nsamples), "--seqlen", "256"]
    on = ["--device", device]
    tuned = ["--text", text, "--nsamples", "8", "--seqlen", "256", *on]
    quality_best = ["prune", model, "--out", best, "--quality", "best", *calibration, *on]
    return [
        [
            ["prune", model, "--out", dense, "--quality", "fast", *calibration, *on],
            ["eval", dense, "--ppl", held_out, "--against", model, "--seqlen", "256", *on],
            ["finetune", dense, "--full", "--against", model, "--out", f"{dense}-full", *tuned],
            ["finetune", dense, "--out", f"{dense}-lora", *tuned],
            ["report", dense],
            ["export", dense, "--out", f"{dense}.drot"],
            ["apply", f"{dense}.drot", "--out", f"{dense}-again", "--model", model],
        ],
        [
            ["prune", model, "--out", packed, "--format", "packed", "--dtype", "float16", *calibration, *on],
            ["eval", packed, "--ppl", held_out, "--seqlen", "256", *on],
            ["tune", packed, *on],
            ["bench", packed, "--repeats", "3", *on],
            ["chat", packed, "--max-tokens", "16", *on],
            ["chat", packed, "--max-tokens", "16", "--compile", *on],
            ["convert", packed, "--out", f"{packed}-dense", "--format", "dense"],
        ],
        [
            ["killed", *quality_best],
            [*quality_best, "--resume"],
            ["prune", model, "--out", ratio, "--method", "wanda", "--sparsity", "0.5", *calibration, *on],
            ["sample", model, "--out", str(folder / "own.jsonl"), "--tokens", "2048", "--seqlen", "256", *on],
            [
                "prune",
                model,
                "--out",
                paper,
                "--rotation",
                "stock",
                "--optimizer",
                "paper",
                *calibration,
                *on,
            ],
            ["prune", model, "--sensitivity", *calibration, *on],
        ],
    ]


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
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        made = chains(Path(folder), options.device, options.nsamples)
        right = list(pool.map(lambda chain: [run(arguments) for arguments in chain], made))
    return int(not all(map(all, right)))


if __name__ == "__main__":
    sys.exit(main())
