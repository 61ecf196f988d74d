"""A run that is killed at random points and resumed gives the bytes of an uninterrupted run."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent / "crash.py"


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bytes():
    """Kills in one mode; `python tests/pipeline/crash.py --kills 100` does more, in all modes."""
    seed = random.SystemRandom().randrange(10**6)  # another place each time; a failure names it
    arguments = ["--kills", "3", "--modes", "dense", "--seed", str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(TOOL), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    assert "3 kills in all" in done.stdout
