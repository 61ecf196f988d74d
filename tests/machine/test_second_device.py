"""Runs the tests of tests/second_device in a process of their own (conftest.py there says why)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "second_device"
pytestmark = pytest.mark.slow


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_tests_of_the_device_pass() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER)],
        env={**os.environ, "DROT_SECOND_DEVICE": "1", "PYTEST_XDIST_WORKER": ""},
        capture_output=True,
        text=True,
        cwd=FOLDER.parents[1],
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_the_device_is_not_registered_here() -> None:
    """Not even by name: torch.compile and Adam look for the module of a device that has a name."""
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
