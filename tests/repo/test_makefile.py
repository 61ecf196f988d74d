"""The Makefile with stand-ins for Python, pip and drot: what it installs when, and what a cut-off leaves."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("make") is None or not (ROOT / "csrc").is_dir(), reason="needs make and the sources"
    ),
]

PYTHON = """#!/bin/sh
test "$1" = -c && exit 0
echo "$@" >> log
for venv; do :; done
mkdir -p $venv/bin
cp pip $venv/bin; cp drot-command $venv/bin/drot
for tool in ruff clang-format mypy pytest; do cp tool $venv/bin/$tool; done
"""
# an editable install leaves the native module in the checkout, before a cut-off as well
PIP = """#!/bin/sh
echo pip "$@" >> log
case "$*" in *--editable*) touch drot/_C.so;; esac
test ! -e cut-off
"""
DROT = """#!/bin/sh
echo drot "$@" >> log
test ! -e demo-output -a ! -e demo-output.partial && mkdir demo-output
"""
TOOL = """#!/bin/sh
echo ${0##*/} "$@" >> log
"""
DEMO = ["drot demo --out demo-output"]


@pytest.fixture
def make(tmp_path):
    """Runs make; returns its status, its output and what the stand-ins were called with."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("csrc", "cmake", "drot", "drot/core"):
        (tmp_path / folder).mkdir()
    for name in ("CMakeLists.txt", "setup.py", "pyproject.toml", "csrc/a.cpp"):
        (tmp_path / name).touch()
    for name in ("core/version.py", "a.py"):
        (tmp_path / "drot" / name).touch()
    stand_ins = {"python": PYTHON, "pip": PIP, "drot-command": DROT, "tool": TOOL}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*arguments):
        (tmp_path / "log").write_text("")
        # not what a make that runs these tests was given
        inherited = (
            *("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"),
            *("TORCH", "VENV", "PYTHON", "DROT_WITH_CUDA"),
        )
        env = {name: value for name, value in os.environ.items() if name not in inherited}
        command = ["make", "PYTHON=./python", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr, (tmp_path / "log").read_text().splitlines()

    run.folder = tmp_path
    return run


def programs(calls: list[str]) -> list[str]:
    return [call.split()[0] for call in calls]


def test_demo_works_again_and_after_a_cut_off(make) -> None:
    status, output, calls = make("demo")
    assert status == 0, output
    assert programs(calls) == ["-m", "pip", "pip", "drot"]
    assert "torch==2.13.0" in calls[1]
    (make.folder / "demo-output.partial").mkdir()
    assert make("demo")[0::2] == (0, DEMO)


def test_another_torch_is_installed_and_stays(make) -> None:
    make("demo")
    status, output, calls = make("demo", "TORCH=torch==2.14.*")
    assert status == 0 and ".venv gets torch==2.14.* in place of torch==2.13.0" in output
    assert programs(calls) == ["-m", "pip", "pip", "drot"]
    assert "torch==2.14.*" in calls[1] and "--no-build-isolation" in calls[2]
    for again in (["TORCH=torch==2.14.*"], []):
        assert make("demo", *again)[2] == DEMO


def test_a_half_built_environment_is_built_again(make) -> None:
    (make.folder / "cut-off").touch()
    assert make("demo")[0] != 0
    (make.folder / "cut-off").unlink()
    status, output, calls = make("demo")
    assert status == 0, output
    assert calls[0] == "-m venv --clear .venv"
    assert "--clear" not in make("demo", "TORCH=torch==2.12.0")[2][0]


@pytest.mark.parametrize(
    ("changed", "installs"),
    [("csrc/a.cpp", 1), ("pyproject.toml", 1), ("drot/core/version.py", 1), ("drot/a.py", 0)],
)
def test_only_native_sources_and_metadata_need_a_new_install(make, changed: str, installs: int) -> None:
    make("demo")
    stamp = (make.folder / ".venv/drot-installed").stat().st_mtime
    os.utime(make.folder / changed, (stamp + 10, stamp + 10))
    assert programs(make("demo")[2]) == ["pip"] * installs + ["drot"]


def test_environments_of_one_checkout_take_turns_with_the_native_module(make) -> None:
    make("demo")
    other = ("demo", "VENV=.venv-other", "TORCH=torch==2.14.*")
    assert programs(make(*other)[2]) == ["-m", "pip", "pip", "drot"]
    for turn, venv in (("demo",), ".venv"), (other, ".venv-other"):
        calls = make(*turn)[2]
        assert programs(calls) == ["pip", "drot"] and "--editable" in calls[0]
        assert (make.folder / "build/in-place").read_text().startswith(f"{venv} torch==")
        assert make(*turn)[2] == DEMO


def test_another_backend_is_built(make) -> None:
    make("demo")
    assert programs(make("demo", "DROT_WITH_CUDA=0")[2]) == ["pip", "drot"]
    assert make("demo", "DROT_WITH_CUDA=0")[2] == DEMO
    assert programs(make("demo")[2]) == ["pip", "drot"]


def test_the_module_is_built_again_where_it_is_missing_or_the_last_build_was_cut_off(make) -> None:
    make("demo")
    (make.folder / "drot/_C.so").unlink()
    assert programs(make("demo")[2]) == ["pip", "drot"]
    (make.folder / "cut-off").touch()
    assert make("demo", "DROT_WITH_CUDA=0")[0] != 0
    (make.folder / "cut-off").unlink()
    assert programs(make("demo")[2]) == ["pip", "drot"]  # although .venv's own stamp is there


def test_check_leaves_out_what_test_runs(make) -> None:
    subprocess.run(["git", "init", "-q", make.folder], check=True)
    lint = ["ruff check .", "ruff format --check .", "mypy"]
    make("demo")
    checked, tested = make("check")[2], make("test")[2]
    assert checked[:3] == tested[:3] == lint
    assert len(checked) == len(tested) == 4
    assert checked[3].startswith("pytest -n 2 --dist worksteal -m not slow")
    assert tested[3].startswith("pytest -n 2") and "slow" not in tested[3]


def test_clean_leaves_the_sources(make) -> None:
    before = {path for path in make.folder.rglob("*") if path.name != "log"}
    make("demo")
    assert make("clean")[0] == 0
    assert {path for path in make.folder.rglob("*") if path.name != "log"} == before


def test_dist_is_built_with_the_torch_of_the_environment(make) -> None:
    make("demo")
    (make.folder / ".venv/bin/python").write_text('#!/bin/sh\necho python "$@" >> log\n')
    (make.folder / ".venv/bin/python").chmod(0o755)
    assert make("dist")[2] == ["python -m build --no-isolation ."]
