"""Shared parts of the benchmarks: their options, the interleaved timing, the printed lines and the CSV rows.

A benchmark compares its functions with one of them, the peer. All functions run in turn in one loop, so that
a change of the machine's speed affects all alike.
"""

import argparse
import csv
import ctypes
import datetime
import fcntl
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from drot._C import cpu_instructions
from drot.evaluation.timing import Timing, replayed
from drot.evaluation.timing import interleaved as interleaved

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--repeats", type=int, default=30)
    add_csv(parser)
    return parser


def add_csv(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--csv [FOLDER]`."""
    parser.add_argument(
        "--csv",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FOLDER",
        help="append rows to a file in FOLDER (default benchmarks/results/)",
    )


def add_processor_time(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--processor-time`, which needs `--threads 1`; `clock_of` reads it."""
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count the seconds in which the process computes, for a busy machine; with --threads 1",
    )


def clock_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Callable[[], float]:
    """The clock that the options ask for, of which `interleaved` takes the seconds."""
    if options.processor_time and options.threads != 1:
        parser.error("--processor-time needs --threads 1: the seconds of several threads would be added")
    return time.process_time if options.processor_time else time.perf_counter


def keep_pages() -> None:
    """Makes the C library keep freed memory, so that a timed function does not include page faults.

    Otherwise the C library returns a large tensor's memory to the kernel, and the next result faults in every
    page again. Call it before the first tensor is made. It has an effect with glibc only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def graphs(functions: Mapping[str, Callable[[], object]], device: str) -> dict[str, Callable[[], object]]:
    """Each function as `replayed` returns it. One that cannot be captured is called, and a line says so."""
    result = {}
    for name, function in functions.items():
        try:
            result[name] = replayed(function, torch.device(device))
        except RuntimeError as error:
            result[name] = function
            print(f"  {name} is timed with the launches of its kernels: {str(error).splitlines()[0]}")
    return result


def report(
    benchmark: str,
    case: str,
    timings: Mapping[str, Timing],
    *,
    peer: str,
    target: str | None = None,
    at_least: float | None = None,
    aims: Mapping[str, float] | None = None,
    columns: Mapping[str, Mapping[str, str]] | None = None,
    bytes_moved: float | None = None,
    flops: float | None = None,
    device: str,
    save: Path | None = None,
) -> None:
    """Prints a line for each function, with its speed relative to `peer`, and appends CSV rows.

    Args:
        benchmark: name of the benchmark and of its CSV file.
        case: the sizes and dtypes that were timed.
        timings: function name → its Timing.
        peer: the function with which the others are compared. A ratio above 1 is faster than the peer.
        target: the function that should be `at_least` times as fast as the peer. Its line shows `met` or
            `MISSED`.
        at_least: the aim for `target`.
        aims: function name → its aim, where several functions have one.
        columns: function name → further columns of its row, name → value, which are printed too.
        bytes_moved: bytes that one call reads and writes, for GB/s.
        flops: floating-point operations of one call, for GFLOP/s.
        device: device of the functions.
        save: folder of the CSV file; None writes none.
    """
    print(f"\n{benchmark}  {case}  [{machine(device)}]")
    rows = []
    aims = {target: at_least} if target is not None and at_least is not None else aims or {}
    for name, timing in timings.items():
        ratio = timings[peer].median / timing.median
        further = dict((columns or {}).get(name, {}))
        line = f"  {name:<28} {timing.median * 1e6:>12.1f} us"
        line += f"  ({timing.p20 * 1e6:.1f} … {timing.p80 * 1e6:.1f})"
        if bytes_moved:
            line += f"  {bytes_moved / timing.median / 1e9:8.1f} GB/s"
        if flops:
            line += f"  {flops / timing.median / 1e9:8.1f} GFLOP/s"
        if name != peer:
            line += f"  {ratio:6.2f} x {peer}" + ("  slower" if ratio < 1 else "")
        if name in aims:
            line += f"  target {aims[name]:g}: {'met' if ratio >= aims[name] else 'MISSED'}"
        print("  ".join([line, *(f"{column} {value}" for column, value in further.items())]))
        rows.append(
            {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "commit": commit(),
                "machine": machine(device),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "case": case,
                "function": name,
                "p20_us": f"{timing.p20 * 1e6:.1f}",
                "median_us": f"{timing.median * 1e6:.1f}",
                "p80_us": f"{timing.p80 * 1e6:.1f}",
                "peer": peer,
                "ratio": f"{ratio:.3f}",
                **further,
            }
        )
    if save is not None:
        append_rows(save / f"{benchmark}.csv", rows)


def compare(timings: Mapping[str, Timing], target: str, peer: str, at_least: float | None = None) -> None:
    """Prints the speed of `target` relative to one more peer, and whether it is `at_least` as fast."""
    ratio = timings[peer].median / timings[target].median
    line = f"  {target} {ratio:6.2f} x {peer}" + ("  slower" if ratio < 1 else "")
    if at_least is not None:
        line += f"  target {at_least:g}: {'met' if ratio >= at_least else 'MISSED'}"
    print(line)


def append_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Appends rows to a CSV file, to which other processes may append too. A new file gets a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if file.seek(0, os.SEEK_END) == 0:
            writer.writeheader()
        writer.writerows(rows)


def processor_name() -> str:
    """The name of the processor; its architecture where the system does not tell the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine(device: str) -> str:
    """The name of the GPU, or the name and the vector instructions of the CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    amx = ", AMX" * ("AMX" in cpu_instructions())
    return f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}{amx}"


def commit(checkout: Path = ROOT) -> str:
    """DROT_COMMIT, or the short hash of the checkout, with a + if it has changes; `unknown` without git."""
    if checkout == ROOT and (given := os.environ.get("DROT_COMMIT")):
        return given
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    described = subprocess.run(command, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"
