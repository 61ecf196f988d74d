"""Writes csrc/ops/cuda/resources.csv: registers, stack, spills and static shared memory of every CUDA kernel.

The script compiles the CUDA sources again, with the commands of an existing CUDA build and ptxas -v. It needs
no GPU. tests/repo/test_build.py reads the file. Run the script after a kernel has changed:

    DROT_WITH_CUDA=1 python setup.py build_ext --inplace && python benchmarks/resource_report.py

With --check the script writes nothing. It ends with status 1 if the file differs from the compiler's report
or if a kernel has more spills or stack than SPILLED allows.
"""

import argparse
import csv
import io
import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESOURCES = ROOT / "csrc" / "ops" / "cuda" / "resources.csv"
#: Architecture → bytes that a kernel may spill there; 0 elsewhere. For 10.0 and 12.0 the compiler takes a few
#: registers more than for 8.0 and 9.0. With fewer resident blocks nothing would spill, but the loads of fewer
#: threads would overlap. Neither has been measured.
SPILLED = {"sm_100": 32, "sm_120": 32}


@dataclass(frozen=True, order=True)
class Resources:
    """A kernel on an architecture: registers per thread; all other numbers are bytes."""

    source: str
    kernel: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


def parse(source: str, text: str) -> list[Resources]:
    """The kernels of drot in the output of `ptxas -v`; kernels of libraries are left out."""
    found = []
    for block in text.split("Compiling entry function ")[1:]:
        mangled, arch = re.match(r"'(\S+)' for '(\w+)'", block).groups()  # type: ignore[union-attr]

        def number(pattern: str, block: str = block) -> int:
            match = re.search(pattern, block)
            return int(match.group(1)) if match else 0

        found.append(
            Resources(
                source=source,
                kernel=mangled,
                arch=arch,
                registers=number(r"Used (\d+) registers"),
                stack=number(r"(\d+) bytes stack frame"),
                spill_stores=number(r"(\d+) bytes spill stores"),
                spill_loads=number(r"(\d+) bytes spill loads"),
                shared=number(r"(\d+) bytes smem"),
            )
        )
    names = demangle([entry.kernel for entry in found])
    return [
        Resources(entry.source, names[entry.kernel], *astuple(entry)[2:])
        for entry in found
        if "4drot" in entry.kernel
    ]


def demangle(names: list[str]) -> dict[str, str]:
    """`_ZN4drot…` -> `small_qr_kernel<float, true>`."""
    plain = subprocess.run(["c++filt", "-p", *names], capture_output=True, text=True, check=True)
    shorter = (
        re.sub(r"^void |drot::|\(anonymous namespace\)::|\w+::_GLOBAL__N__\w+::", "", line)
        for line in plain.stdout.splitlines()
    )
    return dict(zip(names, shorter, strict=True))


def compile_source(entry: dict[str, str]) -> list[Resources]:
    command = shlex.split(entry["command"])
    command[command.index("-o") + 1] = "/dev/null"
    done = subprocess.run([*command, "-Xptxas=-v"], cwd=entry["directory"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{entry['file']} does not compile:\n{done.stderr}")
    return parse(Path(entry["file"]).name, done.stderr + done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="compare with the file and write nothing")
    args = parser.parse_args()
    entries: list[dict[str, str]] = []
    for build in sorted(ROOT.glob("build/temp*/*/compile_commands.json"), key=lambda p: p.stat().st_mtime):
        commands = json.loads(build.read_text())
        entries = [entry for entry in commands if entry["file"].endswith(".cu")] or entries
    if not entries:
        sys.exit("no CUDA build found; make one: DROT_WITH_CUDA=1 python setup.py build_ext --inplace")
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = sorted({row for rows in pool.map(compile_source, entries) for row in rows})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Resources)])
    writer.writerows(astuple(row) for row in rows)
    in_memory = [row for row in rows if row.stack or row.spill_stores or row.spill_loads]
    too_much = [
        row
        for row in in_memory
        if max(row.stack, row.spill_stores, row.spill_loads) > SPILLED.get(row.arch, 0)
    ]
    print(f"{len(rows)} kernels, {len(in_memory)} with spills or a stack: {RESOURCES.relative_to(ROOT)}")
    for row in in_memory:
        print(f"  {row.kernel} {row.arch}: stack {row.stack}, spills {row.spill_stores} + {row.spill_loads}")
    if not args.check:
        RESOURCES.write_text(text.getvalue())
    elif too_much or RESOURCES.read_text() != text.getvalue():
        sys.exit(
            f"{RESOURCES.relative_to(ROOT)} is out of date, or a kernel spills more than SPILLED allows:"
            " run the script without --check"
        )


if __name__ == "__main__":
    main()
