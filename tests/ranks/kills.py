"""Kills a random rank of `drot prune` at a random point, and resumes the run with another number of ranks.

`python tests/ranks/kills.py --kills 20`, and the same with `--hessians dense`. The other ranks must end
within a minute, say which rank has ended, and leave nothing that a resumed run cannot use.
"""

import argparse
import datetime
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import drot.machine.ranks
from drot.checkpoint.manifest import MANIFEST
from drot.reporting.demo import HELD_OUT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pipeline"))
import crash
from runs import assert_patterns
from small_checkpoints import save_small
from together import become_rank, free_port

OPTIONS = ["--nsamples", "9", "--seqlen", "64", "--device", "cpu", "--calibration", str(HELD_OUT)]
OPTIONS += ["--steps", "20", "--quality", "best"]
OPTIONS += ["--recover", "block", "--recover-epochs", "2", "--recover-batch", "3"]
#: seconds within which the other ranks must end
LONGEST_END = 60


def start_ranks(arguments: list[str], size: int, log: Path) -> tuple[list[int], dist.TCPStore]:
    """Starts `drot` on forked processes, as torchrun would; their pids, and the store that they share."""
    port = free_port()
    ranks = (partial(become_rank, rank, size, port) for rank in range(size))
    pids = [crash.start(arguments, log, prepare) for prepare in ranks]
    return pids, dist.TCPStore("127.0.0.1", port, is_master=True)


def statuses(pids: list[int], seconds: float) -> list[int]:
    """The exit statuses of processes, which must end within `seconds`."""
    found, end = {}, time.monotonic() + seconds
    while len(found) < len(pids):
        assert time.monotonic() < end, f"{len(pids) - len(found)} ranks have not ended after {seconds} s"
        for pid in set(pids) - found.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [found[pid] for pid in pids]


def kill_and_resume(model: Path, folder: Path, hessians: str, kills: int, draw: random.Random) -> int:
    """Kills ranks; returns the number of runs that ended. Raises AssertionError if a promise is broken."""
    killed = ended = 0
    longest = 4.0  # seconds before a rank is killed: those of the last whole run
    while killed < kills:
        out, log, tries = folder / f"out{ended}", folder / f"{ended}.log", 0
        arguments = ["prune", str(model), "--out", str(out), *OPTIONS, "--hessians", hessians]
        while True:
            size = draw.choice([2, 3])
            more = ["--resume"] if tries else []
            began = time.monotonic()
            pids, store = start_ranks([*arguments, *more], size, log)
            if killed < kills and tries < 4:
                time.sleep(draw.uniform(0, longest))
                victim = draw.randrange(size)
                os.kill(pids[victim], signal.SIGKILL)  # of a process that has ended, nothing happens
            found = statuses(pids, LONGEST_END if tries < 4 else 600)
            del store
            if (out / MANIFEST).exists():
                longest = longest if tries else time.monotonic() - began
                break
            assert found[victim] == -signal.SIGKILL, (found, log.read_text()[-2000:])
            assert f"rank {victim} has ended at" in log.read_text(), log.read_text()[-2000:]
            assert 0 not in found, "a rank went on without another"
            log.write_text("")
            killed, tries = killed + 1, tries + 1
        assert_patterns(drot.load(out, device="cpu"), drot.Recipe().pruning)
        left = sorted(path.name for path in folder.glob(f"{out.name}.*") if path.suffix != ".log")
        assert left in ([], [f"{out.name}.partial"]), f"{left} were left behind"
        ended += 1
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hessians", choices=["sequential", "dense"], default="sequential")
    chosen = parser.parse_args()
    drot.machine.ranks.JOIN = datetime.timedelta(seconds=LONGEST_END / 2)  # torchrun would end them at once
    torch.set_num_threads(1)  # a forked process has only the thread that forked
    with tempfile.TemporaryDirectory(prefix="drot-kills-") as temporary:
        folder = Path(temporary)
        model = save_small(folder / "model", head_dim=16, num_hidden_layers=4)
        ended = kill_and_resume(model, folder, chosen.hessians, chosen.kills, random.Random(chosen.seed))
    print(f"{chosen.kills} ranks were killed, and {ended} runs went on to their end")


if __name__ == "__main__":
    main()
