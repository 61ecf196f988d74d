"""The native extension: which backends are built, and the messages if it is missing or does not fit."""

import csv
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import drot
from drot.machine.environment import collect

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(drot.__file__).resolve().parent

in_checkout = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the sources")


def test_info_is_json_and_true() -> None:
    info = json.loads(json.dumps(collect()))
    assert info["drot"] == drot.__version__
    assert info["torch"] == info["built_with_torch"] == torch.__version__
    assert "cpu" in info["backends"]
    assert ("cuda" in info["backends"]) == (info["no_cuda_reason"] is None)
    assert ("cuda" in info["backends"]) == bool(info["cuda"]["architectures"])
    assert len(info["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if torch.version.cuda is None:
        assert info["backends"] == ["cpu"]


def test_info_names_the_tuning_cache(monkeypatch) -> None:
    for name in ("DROT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert collect()["tuning_cache"] is None
    monkeypatch.setenv("HOME", "/h")
    assert collect()["tuning_cache"] == "/h/.cache/drot/measured.txt"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert collect()["tuning_cache"] == "/x/drot/measured.txt"
    monkeypatch.setenv("DROT_CACHE", "/d")
    assert collect()["tuning_cache"] == "/d/measured.txt"
    monkeypatch.setenv("DROT_CACHE", "")
    assert collect()["tuning_cache"] is None


def test_every_op_has_a_kernel_for_every_backend_built() -> None:
    ops = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("drot::")]
    assert len(ops) >= 9
    for op in ops:
        for backend in collect()["backends"]:
            key = {"cpu": "CPU", "cuda": "CUDA"}[backend]
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op, key), (op, backend)


class Broken:
    """A finder in front of all others, with which drot._C cannot be imported."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def find_spec(self, name: str, *rest: object) -> None:
        if name == "drot._C":
            raise self.error


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        (ModuleNotFoundError(name="drot._C"), "is not built"),
        (ImportError("undefined symbol: x"), r"does not load with torch .*undefined symbol: x"),
        ({"version": "0.0.1"}, r"has version 0.0.1, but drot has version \d"),
        (
            {"version": drot.__version__, "torch": "2.0.0"},
            r"was built for torch 2.0.0, but torch \S+ is installed",
        ),
    ],
    ids=str,
)
def test_unusable_extension_names_the_build_command(
    native: ImportError | dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(native, dict):
        monkeypatch.setitem(sys.modules, "drot._C", SimpleNamespace(build_info=lambda: native))
    else:
        monkeypatch.delitem(sys.modules, "drot._C")
        monkeypatch.setattr(sys, "meta_path", [Broken(native), *sys.meta_path])
    with pytest.raises(ImportError, match=f"^drot's native extension {reason}") as caught:
        runpy.run_path(str(PACKAGE / "ops/extension.py"))
    assert "pip install --no-build-isolation ." in str(caught.value)


@in_checkout
@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_build_refuses_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "-b", str(tmp_path / "lib"), "-t", str(tmp_path / "temp")],
        cwd=ROOT,
        env={**os.environ, "DROT_WITH_CUDA": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    line = "DROT_WITH_CUDA=1 needs nvcc and a CUDA build of torch: torch .* is a CPU build"
    assert re.fullmatch(line, done.stderr.strip().splitlines()[-1])


@in_checkout
def test_build_without_the_headers_of_python_names_them(tmp_path: Path) -> None:
    without = (
        "import runpy, sys, sysconfig\n"
        "real = sysconfig.get_path\n"
        "folder, sys.argv[1:] = sys.argv[-1], ['build_ext', '-b', 'lib', '-t', 'temp']\n"
        "sysconfig.get_path = lambda name, *a, **k: folder if name == 'include' else real(name, *a, **k)\n"
        f"runpy.run_path({str(ROOT / 'setup.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", without, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    python = "python{}.{}".format(*sys.version_info)
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"building drot needs Python.h of {python}, which is not in {tmp_path}: ")
    assert line.endswith(f"apt install {python}-dev") and "cmake" not in done.stdout.lower()


@in_checkout
@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        ("75 80 86 89 90 100 103 110 120 121", "8.0;9.0;10.0;12.0+PTX"),
        ("50 80 86 89 90", "8.0;9.0+PTX"),  # CUDA 12.0
        ("100f 120f", None),
    ],
)
def test_default_architectures_are_those_that_nvcc_knows(
    tmp_path: Path, known: str, chosen: str | None
) -> None:
    nvcc, script = tmp_path / "nvcc", tmp_path / "ask.cmake"
    lines = "".join(f"echo compute_{number}\n" for number in known.split())
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = --list-gpu-arch ] || exit 1\n{lines}')
    nvcc.chmod(0o755)
    script.write_text(
        f"include({ROOT}/cmake/Architectures.cmake)\n"
        f'drot_default_architectures({nvcc} found)\nmessage("found ${{found}}")\n'
    )
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None
    done = subprocess.run([cmake, "-P", str(script)], capture_output=True, text=True)
    assert (done.returncode == 0) == (chosen is not None)
    said = f"found {chosen}" if chosen else "TORCH_CUDA_ARCH_LIST"
    assert said in done.stderr


@in_checkout
def test_every_native_source_is_listed() -> None:
    listed = set(re.findall(r"csrc/\S+\.(?:cpp|cu)", (ROOT / "CMakeLists.txt").read_text()))
    present = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.c*") if p.suffix in (".cpp", ".cu")}
    assert present == listed


@in_checkout
def test_version_is_written_once() -> None:
    files = [*ROOT.glob("*.py"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt"), *PACKAGE.rglob("*.py")]
    files += [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "cmake").iterdir()]
    holders = [p.name for p in files if p.is_file() and f'"{drot.__version__}"' in p.read_text()]
    assert holders == ["version.py"]


@in_checkout
def test_cuda_kernels_do_not_spill() -> None:
    """Reads the compiler's report. A kernel that is missing there means that the report is old:
    benchmarks/resource_report.py writes it again, without a GPU."""
    with (ROOT / "csrc/ops/cuda/resources.csv").open() as file:
        rows = list(csv.DictReader(file))
    architectures = {row["arch"] for row in rows}
    assert "sm_80" in architectures
    reported = {(row["source"], re.split("[<(]", row["kernel"])[0], row["arch"]) for row in rows}
    reported |= {("any.cuh", kernel, arch) for _, kernel, arch in reported}
    for source in sorted((ROOT / "csrc").rglob("cuda/*.cu*")):
        text = re.sub(r"__launch_bounds__\([^()]*\)", "", source.read_text())
        for kernel in re.findall(r"__global__\s+void\s+(\w+)\s*\(", text):
            # a kernel of a header is reported for the sources that include it
            name = "any.cuh" if source.suffix == ".cuh" else source.name
            for arch in architectures:
                assert (name, kernel, arch) in reported
    # an array of registers that lies in memory is reported as a stack frame and not as a spill
    in_memory = {
        (row["source"], row["kernel"], row["arch"]): max(
            int(row[name]) for name in ("spill_stores", "spill_loads", "stack")
        )
        for row in rows
    }
    # SPILLED of benchmarks/resource_report.py
    limits = {"sm_100": 32, "sm_120": 32}
    assert not [key for key, size in in_memory.items() if size > limits.get(key[2], 0)]


@in_checkout
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_on_gpu_without_one_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "benchmarks/on_gpu.sh"), str(tmp_path / "rows")],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"no GPU found (torch {torch.__version__} finds no CUDA device); nothing was run" in done.stderr
    assert not any((tmp_path / "rows").iterdir())
