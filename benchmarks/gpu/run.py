"""Builds, tests and measures drot on a machine with a GPU that is rented by the minute.

    benchmarks/on_gpu.sh [FOLDER]              every stage, as far as the time goes
    benchmarks/on_gpu.sh --continue EARLIER    what the results in the folder EARLIER do not hold yet
    benchmarks/on_gpu.sh --stage NAME          probe, build, and the named stage alone

FOLDER (default: $OUT if it is set, otherwise gpu-results) gets three files: the module, with which a later
call needs no build, and after every stage a new summary.md and results.tar.gz, with logs and CSV rows.
EARLIER may be FOLDER. If a stage fails, the next stages still run, but after a failed build none does.

DROT_COMMIT names the commit of the rows where git does not know it. PYTHONPATH may name a folder with
packages that the machine lacks.

Exit status: 0 if every stage passed; 1 if one failed, or had too little time; 2 if nothing was run.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from build_module import MODULES
from probe import search_path
from stages import Stage, all_stages

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE, SUMMARY, STATE = "results.tar.gz", "summary.md", "stages.json"
#: stages that run in every call, since each machine is bare
ALWAYS = ("probe", "build")
#: the exit status of the probe where there is no GPU
NO_GPU = 2
#: lines of a log that the summary shows, and the most of them
SHOWN = re.compile(
    r"target|slower|WRONG|wrong$|perplexity|\d (passed|failed)|minutes a model|peak memory|missing:|ERROR SUM"
)
MOST_SHOWN = 60
#: the last lines of the log of a stage that failed
LAST_LINES = 25
#: a longer log keeps its first and its last half
MOST_LOG = 2 * 2**20


@dataclass
class Outcome:
    """What came of a stage: `passed`, `FAILED`, `TIMEOUT`, `skipped` or `no time`; whole seconds; lines."""

    result: str
    seconds: int = 0
    lines: list[str] = field(default_factory=list)


class Run:
    """The stages that were run so far, and their files.

    Stages may run side by side, each in a thread.

    folder: the folder of the results.
    work: the folder of what is packed into results.tar.gz.
    deadline: time.monotonic() at which the last stage must have ended.
    """

    def __init__(self, folder: Path, work: Path, deadline: float) -> None:
        self.folder, self.work, self.deadline = folder, work, deadline
        self.outcomes: dict[str, Outcome] = {}
        self._told = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        (work / "logs").mkdir(exist_ok=True)
        # first the checkout, then what the caller has added, such as packages that the machine lacks
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = os.environ | {
            "PATH": search_path(),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "DROT_CACHE": str(work),  # the fastest algorithm of each product is a result
        }

    def carry(self, earlier: Path) -> None:
        """Takes over what a call before has left in the folder `earlier`."""
        with tarfile.open(earlier / ARCHIVE) as archive:
            archive.extractall(self.work, filter="data")
        stored = json.loads((self.work / STATE).read_text())
        self.outcomes = {name: Outcome(**outcome) for name, outcome in stored.items()}
        for module in earlier.glob(MODULES):
            if not (self.folder / module.name).exists():
                shutil.copyfile(module, self.folder / module.name)

    def stage(self, stage: Stage) -> Outcome:
        """Runs a stage, says what came of it, and writes the results anew."""
        left = self.deadline - time.monotonic()
        missing = [name for name in stage.needs if shutil.which(name, path=self.environment["PATH"]) is None]
        if missing:
            outcome = Outcome("skipped", lines=[f"{', '.join(missing)} is not installed"])
        elif left < stage.seconds and stage.name not in ALWAYS:
            outcome = Outcome(
                "no time", lines=[f"may take {stage.seconds} s; {max(0, round(left))} s were left"]
            )
        else:
            outcome = self._call(stage)
        if outcome.result == "no GPU":
            return outcome
        with self._told:
            self.outcomes[stage.name] = outcome
            print(f"{outcome.result:<8} {outcome.seconds:>5} s  {stage.name}", flush=True)
            if outcome.result not in ("passed", "no time"):
                print("".join(f"    {line}\n" for line in outcome.lines), end="", flush=True)
            self.write()
        return outcome

    def together(self, stages: Sequence[Stage]) -> list[Outcome]:
        """Runs the stages side by side."""
        with ThreadPoolExecutor(len(stages)) as pool:
            try:
                return list(pool.map(self.stage, stages))
            except KeyboardInterrupt:  # otherwise the pool waits for the stages
                self._stopped = True
                for process in self._processes.copy():
                    signal_all(process, signal.SIGTERM)
                raise

    def _call(self, stage: Stage) -> Outcome:
        log, started = self.work / "logs" / f"{stage.name}.log", time.monotonic()
        with log.open("wb") as file:
            file.write(f"$ {shlex.join(stage.command)}\n".encode())
            file.flush()
            # a session of its own: the end of a stage is the end of every process that it has started
            process = subprocess.Popen(
                stage.command, cwd=ROOT, env=self.environment, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            self._processes.add(process)
            if self._stopped:  # while the process was started
                signal_all(process, signal.SIGTERM)
            try:
                status: int | None = process.wait(min(stage.seconds, self.deadline - started))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(process)
                self._processes.discard(process)
        seconds = round(time.monotonic() - started)
        with self._told:  # nobody packs the log meanwhile
            text = shorten(log)
        end_of_log = 0 if status == 0 else LAST_LINES
        before = text[: max(0, len(text) - end_of_log)]
        lines = [line for line in before if SHOWN.search(line)][-MOST_SHOWN:] + text[len(before) :]
        if status == 0:
            return Outcome("passed", seconds, lines)
        if stage.name == "probe" and status == NO_GPU:
            return Outcome("no GPU", seconds, text[-1:])
        return Outcome("TIMEOUT" if status is None else "FAILED", seconds, lines)

    def write(self) -> None:
        """Writes results.tar.gz and summary.md; each is whole at any time."""
        state = {name: dataclasses.asdict(outcome) for name, outcome in self.outcomes.items()}
        (self.work / STATE).write_text(json.dumps(state, indent=1))
        part = self.folder / f"{ARCHIVE}.part"
        with tarfile.open(part, "w:gz") as archive:
            archive.add(self.work, arcname=".")
        part.replace(self.folder / ARCHIVE)
        part = self.folder / f"{SUMMARY}.part"
        part.write_text(self.summary())
        part.replace(self.folder / SUMMARY)

    def summary(self) -> str:
        """The results as a page: the machine, a table of the stages, and the lines of each."""
        probe = self.work / "probe.json"
        found = json.loads(probe.read_text()) if probe.exists() else {}
        machine = ", ".join(
            f"{key} {found[key]}" for key in ("gpu", "torch", "torch_cuda", "python") if found.get(key)
        )
        page = [
            f"# on_gpu.sh, {found.get('date', '')}: {machine}\n",
            "| stage | result | seconds |",
            "|---|---|---|",
        ]
        page += [f"| {name} | {it.result} | {it.seconds} |" for name, it in self.outcomes.items()]
        for name, outcome in self.outcomes.items():
            if outcome.lines:
                page += [f"\n## {name}: {outcome.result}\n", "```", *outcome.lines, "```"]
        return "\n".join(page) + "\n"


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it has started."""
    for what in (signal.SIGTERM, signal.SIGKILL):
        signal_all(process, what)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def signal_all(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
    """Sends a signal to a process and to those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, what)


def shorten(log: Path) -> list[str]:
    """The lines of a log. A file of more than MOST_LOG bytes loses its middle."""
    text = log.read_bytes()
    if len(text) > MOST_LOG:
        half = MOST_LOG // 2
        text = text[:half] + b"\n...\n" + text[-half:]
        log.write_bytes(text)
    return text.decode(errors="replace").splitlines()


def chosen(stages: Sequence[Stage], names: Sequence[str], done: Callable[[str], bool]) -> list[Stage]:
    """The stages to run: those that are named, or else those that are not done; and ALWAYS."""
    return [
        stage
        for stage in stages
        if stage.name in ALWAYS or (stage.name in names if names else not done(stage.name))
    ]


def main(
    arguments: Sequence[str] | None = None, make: Callable[[Path, Path], list[Stage]] = all_stages
) -> int:
    names = [stage.name for stage in make(Path(), Path())]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(os.environ.get("OUT") or "gpu-results"))
    parser.add_argument("--continue", dest="earlier", type=Path, metavar="EARLIER")
    parser.add_argument(
        "--stage", action="append", choices=names, default=[], metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--seconds", type=int, default=560, help="for all stages; default 560")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    earlier = options.earlier and options.earlier.resolve()
    if earlier and not (earlier / ARCHIVE).exists():
        parser.error(f"--continue: {options.earlier} holds no {ARCHIVE}")
    if (folder / ARCHIVE).exists() and folder != earlier:
        parser.error(
            f"{options.folder} holds results: name another folder, or go on with --continue {options.folder}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="drot-on-gpu-") as work:
        run = Run(folder, Path(work), deadline)
        try:
            return run_stages(run, make(Path(work), folder), options.stage, earlier)
        except KeyboardInterrupt:
            run.write()  # with the log of the stage that was interrupted
            return 1


def run_stages(run: Run, stages: list[Stage], names: Sequence[str], earlier: Path | None) -> int:
    if earlier:
        run.carry(earlier)
    passed = [name for name, outcome in run.outcomes.items() if outcome.result == "passed"]
    results = []
    to_run = chosen(stages, names, passed.__contains__)
    while to_run:
        count = 1
        while to_run[0].beside and count < len(to_run) and to_run[count].beside:
            count += 1
        batch, to_run = to_run[:count], to_run[count:]
        outcomes = run.together(batch)
        results += [outcome.result for outcome in outcomes]
        if outcomes[0].result == "no GPU":
            print("on_gpu.sh:", *outcomes[0].lines, file=sys.stderr)
            return 2
        if batch[0].name == "build" and outcomes[0].result != "passed":
            print("drot was not built, so no further stage runs", file=sys.stderr)
            return 1
    if "no time" in results:
        print(f"stages are left: call on_gpu.sh --continue with a copy of {run.folder}")
    return int(not set(results) <= {"passed", "skipped"})


if __name__ == "__main__":
    sys.exit(main())
