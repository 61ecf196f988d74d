"""The Makefile with stand-ins for Python, pip and drot: what is installed when, and what a cut-off leaves."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or not (ROOT / "csrc").is_dir(), reason="needs make and the sources"
)

PYTHON = """#!/bin/sh
test "$1" = -c && exit 0
echo "$@" >> log
for venv; do :; done
mkdir -p $venv/bin
cp pip $venv/bin; cp drot-command $venv/bin/drot
"""
PIP = """#!/bin/sh
echo pip "$@" >> log
test ! -e cut-off
"""
DROT = """#!/bin/sh
echo drot "$@" >> log
test ! -e demo-output -a ! -e demo-output.partial && mkdir demo-output
"""


@pytest.fixture
def make(tmp_path):
    """Runs make; returns its status, its output and what the stand-ins were called with."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("csrc", "cmake", "drot"):
        (tmp_path / folder).mkdir()
    for name in ("CMakeLists.txt", "setup.py", "pyproject.toml"):
        (tmp_path / name).touch()
    for name, text in (("python", PYTHON), ("pip", PIP), ("drot-command", DROT)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*arguments):
        (tmp_path / "log").write_text("")
        # not what a make that runs these tests was given
        inherited = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "TORCH", "VENV", "PYTHON")
        env = {name: value for name, value in os.environ.items() if name not in inherited}
        command = ["make", "PYTHON=./python", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr, (tmp_path / "log").read_text().splitlines()

    run.folder = tmp_path
    return run


def test_demo_works_again_and_after_a_cut_off(make):
    status, output, calls = make("demo")
    assert status == 0, output
    assert [call.split()[0] for call in calls] == ["-m", "pip", "pip", "drot"]
    assert "torch==2.13.0" in calls[1]
    (make.folder / "demo-output.partial").mkdir()
    assert make("demo")[0::2] == (0, ["drot demo --out demo-output"])


def test_another_torch_is_installed_and_stays(make):
    make("demo")
    status, output, calls = make("demo", "TORCH=torch==2.14.*")
    assert status == 0 and ".venv gets torch==2.14.* in place of torch==2.13.0" in output
    assert [call.split()[0] for call in calls] == ["-m", "pip", "pip", "drot"]
    assert "torch==2.14.*" in calls[1] and "--no-build-isolation" in calls[2]
    for again in (["TORCH=torch==2.14.*"], []):
        assert make("demo", *again)[2] == ["drot demo --out demo-output"]


def test_a_half_built_environment_is_built_again(make):
    (make.folder / "cut-off").touch()
    assert make("demo")[0] != 0
    (make.folder / "cut-off").unlink()
    status, output, calls = make("demo")
    assert status == 0, output
    assert calls[0] == "-m venv --clear .venv"
    assert "--clear" not in make("demo", "TORCH=torch==2.12.0")[2][0]
