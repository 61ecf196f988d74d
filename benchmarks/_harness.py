"""What every benchmark shares: interleaved timing, one table, one CSV row per function.

A benchmark names its functions, the first of which is its peer; all are timed in turn inside one
loop, so that a change of the machine's speed meets them alike.
"""

import argparse
import csv
import ctypes
import datetime
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from drot.bench.timing import Timing
from drot.bench.timing import interleaved as interleaved

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--csv",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FOLDER",
        help="append rows to a file in FOLDER (default benchmarks/results/)",
    )
    return parser


def keep_pages() -> None:
    """Makes the C library keep the memory of the CPU's tensors, which it else returns to the kernel
    when a large one is freed, so that functions are timed and not the page faults of their results.
    Call it before the first tensor. It does nothing outside of glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def report(
    benchmark: str,
    case: str,
    timings: Mapping[str, Timing],
    *,
    peer: str,
    target: str | None = None,
    at_least: float | None = None,
    bytes_moved: float | None = None,
    flops: float | None = None,
    device: str,
    save: Path | None = None,
) -> None:
    """Prints a line a function, with its ratio to `peer` (> 1 is faster), and appends CSV rows.

    target: the function that must be `at_least` times as fast as the peer; the line says whether.
    bytes_moved, flops: of one call, for GB/s and GFLOP/s. save: the folder of the CSV files.
    """
    print(f"\n{benchmark}  {case}  [{machine(device)}]")
    rows = []
    for name, timing in timings.items():
        ratio = timings[peer].median / timing.median
        line = f"  {name:<28} {timing.median * 1e6:>12.1f} us"
        line += f"  ({timing.p20 * 1e6:.1f} … {timing.p80 * 1e6:.1f})"
        if bytes_moved:
            line += f"  {bytes_moved / timing.median / 1e9:8.1f} GB/s"
        if flops:
            line += f"  {flops / timing.median / 1e9:8.1f} GFLOP/s"
        if name != peer:
            line += f"  {ratio:6.2f} x {peer}" + ("  slower" if ratio < 1 else "")
        if name == target and at_least is not None:
            line += f"  target {at_least:g}: {'met' if ratio >= at_least else 'MISSED'}"
        print(line)
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
            }
        )
    if save is not None:
        append_rows(save / f"{benchmark}.csv", rows)


def append_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Appends to a CSV file, with its header where it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


def machine(device: str) -> str:
    """Name of the GPU, or of the CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {capability}"


def commit() -> str:
    """Short hash of the checkout, with a + where it has changes; `unknown` outside of one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
