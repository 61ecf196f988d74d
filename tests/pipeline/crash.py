"""Kills `drot prune` at random points, resumes it until it ends, and compares the bytes of its checkpoint
with those of an uninterrupted run. `python tests/pipeline/crash.py --kills 100` does so in every mode."""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from drot.checkpoint.integrity import folder_records
from drot.cli import app as cli
from drot.reporting.demo import HELD_OUT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_checkpoints import save_small

#: mode -> options of drot prune
MODES = {
    "layer": ["--quality", "fast"],
    "best": ["--quality", "best", "--recover", "block", "--recover-epochs", "2", "--recover-batch", "2"],
    "dense": ["--hessians", "dense", "--boundary", "residual", "--format", "packed"],
    "shared": ["--rotation", "shared", "--save-rotations", "OUT/rotations.safetensors"],
    "none": ["--rotation", "none"],
}
OPTIONS = ["--nsamples", "8", "--seqlen", "64", "--device", "cpu", "--calibration", str(HELD_OUT)]
ROTATION = ["--steps", "20"]


def start(arguments: list[str], log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Starts a drot command in a forked process, which has imported everything already; returns its pid.

    prepare: called in the process before the command.
    """
    if pid := os.fork():
        return pid
    prepare()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        os._exit(cli.run(arguments))
    finally:
        os._exit(70)


def wait(pid: int, seconds: float | None) -> int | None:
    """Waits for a process, at most `seconds`, then kills it. Its exit status; None if it was killed."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            return None if os.waitpid(pid, 0)[1] == signal.SIGKILL else 0
        time.sleep(0.001)


def content(out: Path) -> dict[str, dict]:
    """The hashes of all files but the card, which names the folder; of drot.json the entry `files`, because
    the rest has times."""
    hashes = {name: record.model_dump() for name, record in folder_records(out).items()}
    hashes["drot.json"] = json.loads((out / "drot.json").read_text())["files"]
    for names in (hashes, hashes["drot.json"]):
        names.pop("README.md")
    return hashes


def crash(model: Path, folder: Path, mode: str, kills: int, draw: random.Random) -> tuple[int, int]:
    """Kills runs of one mode; returns the number of kills and of runs that ended with the right bytes.

    Raises AssertionError if a resumed run fails or gives other bytes. A run is killed at most 8 times.
    """

    def arguments(out: Path, *more: str) -> list[str]:
        options = [*OPTIONS, *([] if mode == "none" else ROTATION), *MODES[mode]]
        return ["prune", str(model), "--out", str(out), *(o.replace("OUT", str(out)) for o in options), *more]

    whole, log = folder / f"{mode}-whole", folder / f"{mode}.log"
    started = time.monotonic()
    status = wait(start(arguments(whole), log), None)
    assert status == 0, log.read_text()
    seconds, expected = time.monotonic() - started, content(whole)
    killed = ended = 0
    while killed < kills:
        out, tries, resume = folder / f"{mode}-{ended}", 0, []
        while True:
            limit = draw.uniform(0, 1.1 * seconds) if tries < 8 and killed < kills else None
            status = wait(start(arguments(out, *resume), log), limit)
            if status is not None:
                break
            killed, tries, resume = killed + 1, tries + 1, ["--resume"]
        assert status == 0, f"{mode}: status {status} after {tries} kills: {log.read_text()[-2000:]}"
        assert content(out) == expected, f"{mode}: other bytes after {tries} kills in {folder}"
        left = sorted(path.name for path in folder.glob(f"{out.name}.*"))
        assert not left, f"{mode}: {left} were left behind"
        shutil.rmtree(out)
        ended += 1
    return killed, ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="number of kills, in all modes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # a forked process has only the thread that forked
    with tempfile.TemporaryDirectory(prefix="drot-crash-") as temporary:
        folder = Path(temporary)
        model = save_small(folder / "model", head_dim=16, num_hidden_layers=4)
        total = 0
        for number, mode in enumerate(chosen.modes):
            kills = chosen.kills * (number + 1) // len(chosen.modes) - total
            killed, ended = crash(model, folder, mode, kills, random.Random(chosen.seed + number))
            total += killed
            print(f"{mode}: {killed} kills, {ended} runs ended with the same bytes", flush=True)
    print(f"{total} kills in all")


if __name__ == "__main__":
    main()
