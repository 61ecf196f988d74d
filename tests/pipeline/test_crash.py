"""A run that is killed at random points and resumed gives the bytes of an uninterrupted run."""

import os
import random
import sys

import crash
import pytest
from together import started


def kill_runs(arguments, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    sys.argv[1:] = arguments
    crash.main()


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bytes(tmp_path):
    """Kills in one mode; `python tests/pipeline/crash.py --kills 100` does more, in all modes."""
    seed = random.SystemRandom().randrange(10**6)  # another place each time; a failure names it
    killing = started(kill_runs, ["--kills", "3", "--modes", "dense", "--seed", str(seed)], tmp_path / "log")
    killing.join()
    told = (tmp_path / "log").read_text()
    assert killing.exitcode == 0, f"seed {seed}: {told[-3000:]}"
    assert "3 kills in all" in told
