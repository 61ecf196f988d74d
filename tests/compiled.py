"""Compiles native code of the tests once for each state of the sources, and caches the results.

The cache is build/native-tests in the checkout. If that folder cannot be written, each test process compiles
into a temporary folder.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
CSRC = ROOT / "csrc"
#: the folders of the programs of tests/native, and of the headers that they include
NATIVE = (TESTS / "native", CSRC)

WEEK = 7 * 24 * 3600


@functools.cache
def cache_folder() -> Path:
    folder = ROOT / "build" / "native-tests"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        return folder
    temporary = tempfile.mkdtemp(prefix="drot-native-tests-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


@functools.cache
def environment_hash(compiler: str, folders: tuple[Path, ...]) -> bytes:
    """Hash of the compiler, of torch's version and of all sources in `folders`."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(f"{compiler}\n{version}\n{torch.__version__}\n".encode())
    suffixes = ("h", "cuh", "cpp")
    sources = [path for folder in folders for suffix in suffixes for path in folder.rglob(f"*.{suffix}")]
    for path in sorted(sources):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(text)}\n".encode() + text)
    return digest.digest()


def compiled(
    name: str,
    *flags: str,
    sources: tuple[Path, ...] = (),
    sanitizer: str | None = None,
    folders: tuple[Path, ...] = NATIVE,
) -> Path:
    """Path of the program or shared library that <name>.cpp in the first of `folders` compiles to.

    Skips the test if there is no C++ compiler, or if the compiler lacks the sanitizer.

    Args:
        name: the name of the source file, without `.cpp`.
        flags: compiler flags.
        sources: further source files.
        sanitizer: `thread` or `undefined`.
        folders: where headers are looked for. A change of a file in them compiles anew.
    """
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = ["-std=c++20", "-O1", *(f"-I{folder}" for folder in folders)]
    if sanitizer is not None:
        command.append(f"-fsanitize={sanitizer}")
    command += [str(folders[0] / f"{name}.cpp"), *map(str, sources), *flags]
    key = hashlib.sha256(environment_hash(compiler, folders) + "\n".join(command).encode()).hexdigest()[:16]
    result = cache_folder() / f"{name}-{key}"
    if result.exists():
        return result

    # another process may compile the same program: each writes its own file, and the rename is atomic
    unfinished = result.with_name(f"{result.name}.{os.getpid()}")
    done = subprocess.run([compiler, *command, "-o", str(unfinished)], capture_output=True, text=True)
    if sanitizer is not None and any(library in done.stderr for library in ("libtsan", "libubsan")):
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    assert done.returncode == 0, done.stderr
    unfinished.replace(result)
    for old in result.parent.glob(f"{name}-*"):
        if time.time() - old.stat().st_mtime > WEEK:
            old.unlink(missing_ok=True)
    return result


def compiled_kernels(name: str) -> Path:
    """Path of the library of tests/native/<name>.cpp, which runs CUDA kernels on a CPU (block_on_cpu.h).

    A misaligned load, a wrong shift or a wrong index ends the process.
    """
    return compiled(
        name,
        *("-shared", "-fPIC"),
        "-U_FORTIFY_SOURCE",  # its longjmp stays on one stack
        "-fno-sanitize-recover=undefined",
        *(f"-I{folder}" for folder in include_paths()),
        sanitizer="undefined",
    )
