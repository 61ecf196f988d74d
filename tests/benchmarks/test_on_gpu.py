"""benchmarks/on_gpu.sh without a GPU: its command lines, its order, its files, and how it goes on."""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import drot
from drot.cli.app import run as run_drot
from drot.cli.commands import COMMANDS, imported

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BENCHMARKS.exists(), reason="needs the checkout")]
#: a tool that watches a program; its command line ends with that of the program
WATCHER = "compute-sanitizer"


class Parsed(Exception):
    """A script has read its command line."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules in benchmarks/gpu."""
    for name in ("probe", "stages", "run", "build_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu"))
    import build_module
    import run
    import stages

    return SimpleNamespace(run=run, stages=stages, build=build_module)


def parse_script(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports what a script imports, and reads its command line as it does."""
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: Any) -> None:
        real(self, *given)
        raise Parsed

    script = Path(command[0])
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", list(command))
        patch.syspath_prepend(str(script.parent))
        with pytest.raises(Parsed):
            runpy.run_path(str(script), run_name="__main__")


def test_every_command_line_is_understood(
    gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = gpu.stages.all_stages(tmp_path, tmp_path)
    for stage in stages:
        command = stage.command
        if command[0] == WATCHER:
            assert stage.needs == (WATCHER,)
            command = command[command.index(sys.executable) :]
        assert command[0] == sys.executable
        match command[1:]:
            case ("-m", "pytest", *options):
                # with --version pytest ends when it has read the options, and refuses unknown ones
                pytest_command = [sys.executable, "-m", "pytest", *options, "--version"]
                done = subprocess.run(pytest_command, cwd=BENCHMARKS.parent, capture_output=True, text=True)
                assert done.returncode == 0 and "pytest " in done.stdout + done.stderr, done.stderr
                paths = [word for word in options if "/" in word or word == "tests"]
                assert paths and all((BENCHMARKS.parent / path).exists() for path in paths)
            case ("-m", "drot", *options):
                assert run_drot(options) == (0 if torch.cuda.is_available() else 2)
                if not torch.cuda.is_available():
                    assert "torch finds no GPU" in capsys.readouterr().err
            case script:
                parse_script(script, monkeypatch)


def test_the_commands_of_the_stage_commands_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command line is parsed. The commands that are missing start servers or repeat the others."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu"))
    import commands

    lines = [
        line[line[0] == "killed" :]
        for tree in commands.trees(tmp_path, "cpu", 2)
        for line in commands.lines_of(tree)
    ]
    for name, *arguments in lines:
        assert imported(name).make_context(name, arguments).params
    without = {"run", "info", "demo", "serve", "compare", "sweep"}
    assert {line[0] for line in lines} == set(COMMANDS) - without


def test_a_wrong_option_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above does not pass whatever the command lines are."""
    script = str(BENCHMARKS / "bench_prune_layer.py")
    for wrong in (["--qualty", "fast"], ["--shape", "llama-3-9b"]):
        with pytest.raises(SystemExit):
            parse_script((script, *wrong), monkeypatch)


def test_order_of_the_stages(gpu: SimpleNamespace, tmp_path: Path) -> None:
    stages = gpu.stages.all_stages(tmp_path, tmp_path)
    names = [stage.name for stage in stages]
    assert len(names) == len(set(names))
    order = [
        "probe",
        "build",
        "check_ops",
        "tiny-fast",
        "tiny-balanced",
        "tiny-best",
        "tests",
        "sparse24",
        "step",
        "layer-8b-fast",
    ]
    order += ["layer-70b-fast", "memcheck"]
    assert [name for name in names if name in order] == order
    assert names[:3] == order[:3]
    run = {Path(word).stem for stage in stages for word in stage.command if word.endswith(".py")}
    assert {path.stem for path in BENCHMARKS.glob("bench_*.py")} <= run
    assert all(stage.seconds <= 300 for stage in stages)  # so that each fits into one call


def shell(name: str, script: str, seconds: int = 20, beside: bool = False) -> Callable[[Any], Any]:
    return lambda stages: stages.Stage(name, seconds, ("sh", "-c", script), beside=beside)


@pytest.fixture
def call(gpu: SimpleNamespace) -> Callable[..., int]:
    """Calls on_gpu.sh with stages that are shell scripts; STAGES of the shell's environment is `work`."""

    def called(*arguments: str | Path, stages: list[Callable[[Any], Any]]) -> int:
        made = [make(gpu.stages) for make in stages]
        return gpu.run.main([str(argument) for argument in arguments], lambda work, folder: made)

    return called


PROBE = shell("probe", """echo '{"gpu": "a GPU", "date": "today"}' > "$DROT_CACHE/probe.json" """)


def archived(folder: Path, name: str) -> str:
    with tarfile.open(folder / "results.tar.gz") as archive:
        file = archive.extractfile(f"./{name}")
        assert file is not None
        return file.read().decode()


def test_results_are_written_after_every_stage(call: Callable[..., int], tmp_path: Path) -> None:
    out, seen = tmp_path / "out", tmp_path / "seen"
    stages = [
        PROBE,
        shell("build", f"echo built > {out}/module-1.so.gz"),
        shell("wrong", "echo 'figure: WRONG'; seq 40; exit 3"),
        shell("looks", f"ls {out} > {seen}; grep -c '^| wrong | FAILED |' {out}/summary.md >> {seen}"),
        shell("short", "seq 100 120; exit 3"),
        shell(
            "right",
            'mkdir -p "$DROT_CACHE/rows"; echo row > "$DROT_CACHE/rows/a.csv"; echo "  1 s  target 2 s: met"',
        ),
    ]
    assert call(out, stages=stages) == 1
    files = ["module-1.so.gz", "results.tar.gz", "summary.md"]
    assert sorted(path.name for path in out.iterdir()) == files
    assert seen.read_text().split() == [*files, "1"]
    summary = (out / "summary.md").read_text()
    assert summary.startswith("# on_gpu.sh, today: gpu a GPU\n")
    assert "| right | passed | " in summary and "target 2 s: met" in summary
    assert "\n10\n" not in summary and "figure: WRONG\n16\n17\n" in summary
    assert "\n100\n101\n" in summary
    assert archived(out, "rows/a.csv") == "row\n"
    assert archived(out, "logs/wrong.log").splitlines()[1:4] == ["figure: WRONG", "1", "2"]


def test_what_passed_is_not_run_again(
    call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, runs = tmp_path / "first", tmp_path / "second", tmp_path / "runs"
    mended = tmp_path / "mended"
    stages = [
        PROBE,
        shell("build", f"echo build >> {runs}; touch {first}/module-1.so.gz"),
        shell("good", f"echo good >> {runs}; echo 'perplexity 3'"),
        shell("bad", f"echo bad >> {runs}; test -e {mended}"),
        shell("long", f"echo long >> {runs}", seconds=1000),
    ]
    assert call(first, "--seconds", "100", stages=stages) == 1
    assert runs.read_text().split() == ["build", "good", "bad"]
    assert "| long | no time | 0 |" in (first / "summary.md").read_text()
    mended.touch()
    assert call(second, "--continue", first, "--seconds", "2000", stages=stages) == 0
    assert runs.read_text().split() == ["build", "good", "bad", "build", "bad", "long"]
    assert (second / "module-1.so.gz").exists()
    summary = (second / "summary.md").read_text()
    assert [line.split()[1] for line in summary.splitlines() if "| passed |" in line] == [
        "probe", "build", "good", "bad", "long"
    ]  # fmt: skip
    assert "perplexity 3" in summary and archived(second, "logs/good.log").endswith("perplexity 3\n")
    assert call(second, "--continue", second, "--stage", "good", stages=stages) == 0
    assert runs.read_text().split()[-2:] == ["build", "good"]
    with pytest.raises(SystemExit) as stop:
        call(second, stages=stages)
    assert stop.value.code == 2 and "holds results: name another folder" in capsys.readouterr().err


def test_a_stage_that_takes_too_long_is_ended_with_what_it_started(
    call: Callable[..., int], tmp_path: Path
) -> None:
    child = tmp_path / "child"
    stages = [
        PROBE,
        shell("build", "true"),
        shell("hangs", f"sleep 300 & echo $! > {child}; echo said; wait", seconds=1),
        shell("next", "true"),
    ]
    started = time.monotonic()
    assert call(tmp_path / "out", stages=stages) == 1
    assert time.monotonic() - started < 30
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "| hangs | TIMEOUT | 1 |" in summary and "said" in summary and "| next | passed |" in summary
    state = Path("/proc") / child.read_text().strip() / "stat"  # Z: dead, and not yet waited for
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_stages_that_time_nothing_run_side_by_side(call: Callable[..., int], tmp_path: Path) -> None:
    """Each of two waits for the other. The stage behind them waits for both."""

    def meets(own: str, other: str) -> str:
        return f"touch {tmp_path}/{own}; until test -e {tmp_path}/{other}; do sleep 0.05; done; sleep 0.3"

    stages = [
        PROBE,
        shell("build", "true"),
        shell("first", meets("a", "b") + f"; touch {tmp_path}/done-a", beside=True),
        shell("second", meets("b", "a") + f"; touch {tmp_path}/done-b", beside=True),
        shell("timed", f"test -e {tmp_path}/done-a && test -e {tmp_path}/done-b"),
    ]
    assert call(tmp_path / "out", stages=stages) == 0
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert all(f"| {name} | passed |" in summary for name in ("first", "second", "timed"))


def test_nothing_runs_after_a_failed_build(call: Callable[..., int], tmp_path: Path) -> None:
    stages = [PROBE, shell("build", "exit 1"), shell("next", f"touch {tmp_path}/ran")]
    assert call(tmp_path / "out", stages=stages) == 1
    assert not (tmp_path / "ran").exists()


def test_packages_that_the_caller_adds_are_found(
    gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/added")
    run = gpu.run.Run(tmp_path, tmp_path, time.monotonic() + 10)
    assert run.environment["PYTHONPATH"] == f"{BENCHMARKS.parent}{os.pathsep}/added"


def test_a_program_that_is_missing_skips_its_stage(gpu: SimpleNamespace, tmp_path: Path) -> None:
    run = gpu.run.Run(tmp_path, tmp_path, time.monotonic() + 10)
    outcome = run.stage(gpu.stages.Stage("x", 1, ("true",), needs=("no-such-program",)))
    assert (outcome.result, outcome.lines) == ("skipped", ["no-such-program is not installed"])


def test_a_carried_module_is_that_of_the_sources(gpu: SimpleNamespace, tmp_path: Path) -> None:
    for source in gpu.build.SOURCES:
        path = tmp_path / source
        if "." in path.name:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1")
        else:
            (path / "deep").mkdir(parents=True)
            (path / "deep" / "file").write_text("1")
    name = gpu.build.module_name(tmp_path, "2.11", "9.0")
    assert (
        name
        == gpu.build.module_name(tmp_path, "2.11", "9.0")
        != gpu.build.module_name(tmp_path, "2.11", "8.0")
    )
    (tmp_path / "csrc" / "deep" / "file").write_text("2")
    assert gpu.build.module_name(tmp_path, "2.11", "9.0") != name
    assert all((BENCHMARKS.parent / source).exists() for source in gpu.build.SOURCES)


def test_a_kept_module_still_loads(gpu: SimpleNamespace, tmp_path: Path) -> None:
    module = next(Path(drot.__file__).parent.glob("_C*.so"))
    (tmp_path / "module-old.so.gz").touch()
    kept, used = tmp_path / "module-new.so.gz", tmp_path / "used.so"
    gpu.build.keep(module, kept)
    assert list(tmp_path.iterdir()) == [kept]
    gpu.build.use(kept, used)
    assert kept.stat().st_size < used.stat().st_size <= module.stat().st_size
    ask = (
        "import json, sys, torch\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        "spec = spec_from_file_location('drot._C', sys.argv[1])\n"
        "module = module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps(module.build_info()))"
    )
    done = subprocess.run([sys.executable, "-c", ask, str(used)], capture_output=True, text=True)
    assert json.loads(done.stdout)["version"] == drot.__version__, done.stderr


def test_tiny_llama_is_pruned_packed_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--quality", "fast", "--nsamples", "2", "--windows", "2", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["tiny_llama.py", *options, "--csv", str(tmp_path)])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert runpy.run_path(str(BENCHMARKS / "tiny_llama.py"))["main"]() == 0
    printed = capsys.readouterr().out
    assert "sparsity 50.00%" in printed and "of the CPU not measured" in printed
    assert len((tmp_path / "tiny_llama.csv").read_text().splitlines()) == 2


def test_the_perplexity_of_the_cpu_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    of_the_cpu = runpy.run_path(str(BENCHMARKS / "tiny_llama.py"))["of_the_cpu"]
    known = [of_the_cpu(quality, 64) for quality in ("fast", "balanced", "best")]
    assert all(12 < value < 14 for value in known)
    assert of_the_cpu("fast", 1) is None


def test_rows_name_the_commit_that_the_caller_names(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = runpy.run_path(str(BENCHMARKS / "_harness.py"))["commit"]
    assert commit() != "abc"
    monkeypatch.setenv("DROT_COMMIT", "abc")
    assert commit() == "abc"
