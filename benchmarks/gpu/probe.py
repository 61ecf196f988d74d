"""What a machine has of the things that the stages of on_gpu.sh need: a line each, and what is missing.

Exit status: 0; 1 if something that drot needs is missing; 2 if torch finds no GPU. The script needs Python
alone, so that it can say what is not there.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: packages whose module has another name
MODULES = {"pyyaml": "yaml"}
#: package → what needs it
OPTIONAL = {
    "datasets": "texts on the hub",
    "pytest": "the stage tests",
    "pytest-xdist": "the stage tests",
    "hypothesis": "the stage tests",
}
#: program → what needs it
PROGRAMS = {
    "nvcc": "the build, unless a module was carried",
    "cmake": "the build, unless a module was carried",
    "ninja": "the build, unless a module was carried",
    "strip": "a module small enough to be carried",
    "compute-sanitizer": "the stages memcheck and racecheck",
}


def search_path() -> str:
    """PATH, the scripts of this Python and the folder of the CUDA toolkit."""
    folders = [os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts"), "/usr/local/cuda/bin"]
    return os.pathsep.join(folders)


def packages() -> dict[str, str | None]:
    """Package → its version, or None if it is not there: those that drot and the stages need."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in needed]  # type: ignore[index]
    return {name: version_of(name) for name in dict.fromkeys([*names, *OPTIONAL])}


def version_of(name: str) -> str | None:
    """The version of an installed package; None if its module is not found."""
    module = MODULES.get(name, name.replace("pytest-", "").replace("-", "_"))
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def gpu() -> dict[str, str] | None:
    """The first GPU and torch's CUDA; None if torch finds no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": f"{properties.total_memory / 2**30:.1f}",
        "torch_cuda": torch.version.cuda or "",
    }


def last_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip().splitlines()[-1] if done.returncode == 0 else "fails"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file of what was found")
    options = parser.parse_args()
    try:
        found_gpu = gpu()
    except ImportError as error:
        print(
            f"{sys.executable} cannot import torch ({error}); name another: PYTHON=... benchmarks/on_gpu.sh"
        )
        return 2
    if found_gpu is None:
        version = version_of("torch")
        print(f"no GPU found (torch {version} finds no CUDA device); nothing was run")
        return 2
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    programs = {name: shutil.which(name, path=search_path()) for name in PROGRAMS}
    found: dict[str, str | None] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        **found_gpu,
        "Python.h": str(headers) if headers.exists() else None,
        **{name: last_line(path, "--version") if path else None for name, path in programs.items()},
        **packages(),
    }
    options.out.write_text(json.dumps(found, indent=1))
    for name, value in found.items():
        print(f"{name:<18} {value or 'MISSING'}")
    lacking = {**OPTIONAL, **PROGRAMS, "Python.h": PROGRAMS["nvcc"]}
    missing = [name for name, value in found.items() if value is None]
    for name in missing:
        print(f"missing: {name}, for {lacking.get(name, 'drot')}")
    return int(any(name not in lacking for name in missing))


if __name__ == "__main__":
    sys.exit(main())
