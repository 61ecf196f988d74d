"""Builds drot._C with CMake and ninja. CMakeLists.txt has the sources and flags.

Environment variables: DROT_WITH_CUDA=0 or 1 builds without or with CUDA code (default: with, if possible);
TORCH_CUDA_ARCH_LIST sets the CUDA architectures (default: those of "8.0;9.0;10.0;12.0+PTX" that nvcc knows);
MAX_JOBS limits the parallel compiles.
DROT_WHEEL_LABEL is added to the version of a wheel, since a wheel fits one torch: torch2.13.cpu makes
drot-0.1.0+torch2.13.cpu.
"""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
#: without the label of a wheel
VERSION = runpy.run_path(str(ROOT / "drot" / "core" / "version.py"))["__version__"]


def tool(name: str) -> str:
    """Path of a build tool in this Python environment, which need not be activated, or else on PATH."""
    scripts = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    found = shutil.which(name, path=os.pathsep.join(scripts))
    if found is None:
        sys.exit(f"building drot needs {name}, which was not found; install it with: pip install {name}")
    return found


def torch_version() -> str:
    try:
        import torch
    except ImportError:
        sys.exit(
            "building drot needs torch in the active environment; install torch, then: "
            "pip install --no-build-isolation ."
        )
    return torch.__version__


def check_headers() -> None:
    """Ends with one line if the headers of this Python are missing, which a system installs on their own."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").exists():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"building drot needs Python.h of {python}, which is not in {folder}: install its headers, "
            f"on Debian and Ubuntu with: apt install {python}-dev"
        )


class CMakeBuild(build_ext):
    """Builds the only Extension; it lists no sources, since CMakeLists.txt does."""

    def build_extension(self, ext: Extension) -> None:
        check_headers()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        # pip gives an editable install a temporary folder, which would leave nothing for the next build
        kept = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        # a folder per torch version: CMake's cache holds paths of torch
        build = ROOT / (kept if self.editable_mode else self.build_temp) / f"torch-{torch_version()}"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            tool("cmake"),
            *("-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DDROT_WITH_CUDA={os.environ.get('DROT_WITH_CUDA', 'AUTO')}",
            f"-DDROT_ARCH_LIST={os.environ.get('TORCH_CUDA_ARCH_LIST', '')}",
            f"-DDROT_VERSION={VERSION}",
            f"-DDROT_OUTPUT_DIRECTORY={build}",
            f"-DDROT_OUTPUT_NAME={target.name}",
        ]
        compile_ = [tool("cmake"), "--build", str(build)]
        if jobs := os.environ.get("MAX_JOBS"):
            compile_ += ["--parallel", jobs]
        refused = build / "refused.txt"
        refused.unlink(missing_ok=True)
        for command in (configure, compile_):
            if subprocess.run(command).returncode:
                sys.exit(refused.read_text() if refused.exists() else "building drot failed; see above")
        # copied even if ninja had nothing to do: the file at target may be built for another torch
        target.parent.mkdir(parents=True, exist_ok=True)
        # renamed, since to overwrite a module that a running process has mapped would crash the process
        part = target.with_name(f"{target.name}.part")
        shutil.copyfile(build / target.name, part)
        part.replace(target)


label = os.environ.get("DROT_WHEEL_LABEL")
setup(
    ext_modules=[Extension("drot._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    options={"egg_info": {"tag_build": f"+{label}"}} if label else {},
)
