"""Builds drot in place for the GPU of this machine, and leaves the module, stripped and packed, in a folder.

The module is named after the sources, torch, Python and the GPU that it was built from and for. If the folder
holds a module of that name, which an earlier call has left there, it is used and nothing is built.
"""

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: what the module is made from
SOURCES = ("csrc", "cmake", "CMakeLists.txt", "setup.py", "drot/core/version.py")
#: the names that `module_name` gives
MODULES = "module-*.so.gz"
#: a larger file may not come back from a machine that is lent
MOST_BYTES = 16 * 2**20


def module_name(root: Path, *built_for: str) -> str:
    """The name of the module of the sources under `root`, built for a torch, a Python and a GPU."""
    digest = hashlib.sha256("\n".join(built_for).encode())
    for source in SOURCES:
        for path in sorted([root / source, *(root / source).rglob("*")]):
            if path.is_file():
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"module-{digest.hexdigest()[:16]}.so.gz"


def keep(module: Path, kept: Path) -> None:
    """Packs `module` without its symbols into `kept`. Modules of other sources beside `kept` are removed."""
    for old in kept.parent.glob(MODULES):
        old.unlink()
    part = kept.with_suffix(".part")
    with tempfile.TemporaryDirectory() as folder:
        stripped = Path(folder) / "stripped"
        command = ["strip", "--strip-unneeded", "-o", str(stripped), str(module)]
        if shutil.which("strip") is None or subprocess.run(command).returncode:
            stripped = module
        with stripped.open("rb") as file, gzip.open(part, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(file, packed)
    size = part.stat().st_size
    print(f"{kept.name}: {size / 2**20:.1f} MiB of {module.stat().st_size / 2**20:.1f}")
    if size > MOST_BYTES:
        print("this is more than 16 MiB, so the module is not kept")
        part.unlink()
    else:
        part.replace(kept)


def use(kept: Path, target: Path) -> None:
    """Unpacks the module that an earlier call has kept."""
    part = target.with_suffix(".part")
    with gzip.open(kept) as packed, part.open("wb") as file:
        shutil.copyfileobj(packed, file)
    part.replace(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the stripped module")
    options = parser.parse_args()
    import torch

    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    kept = options.out / module_name(ROOT, torch.__version__, suffix, capability)
    target = ROOT / "drot" / f"_C{suffix}"
    if kept.exists():
        print(f"{kept.name} was built from these sources: it is used")
        use(kept, target)
    else:
        build = [sys.executable, "setup.py", "build_ext", "--inplace"]
        variables = {"DROT_WITH_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability}
        if subprocess.run(build, cwd=ROOT, env=os.environ | variables).returncode:
            return 1
        keep(target, kept)
    # in a process of its own, as in every later stage
    ask = (
        "from drot.machine.environment import collect\n"
        "info = collect()\n"
        "assert 'cuda' in info['backends'], 'drot was built without CUDA: ' + str(info['no_cuda_reason'])\n"
        "print(info['cuda'], info['cusparselt'])"
    )
    return subprocess.run([sys.executable, "-c", ask], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
