"""Builds drot._C: setup.py drives CMake, CMake drives ninja. Sources and flags are in CMakeLists.txt.

DROT_WITH_CUDA=0/1 forces the CUDA side off or on; TORCH_CUDA_ARCH_LIST chooses its architectures
(default "8.0;9.0a"); MAX_JOBS limits the parallel compiles.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def tool(name: str) -> str:
    """Path of a build tool: this environment's (it need not be activated), else the system's."""
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


class CMakeBuild(build_ext):
    """One Extension, without sources of its own."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        # a folder per torch: another torch in the same checkout must not meet a stale CMake cache
        build = ROOT / self.build_temp / f"torch-{torch_version()}"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            tool("cmake"),
            *("-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DDROT_WITH_CUDA={os.environ.get('DROT_WITH_CUDA', 'AUTO')}",
            f"-DDROT_ARCH_LIST={os.environ.get('TORCH_CUDA_ARCH_LIST', '')}",
            f"-DDROT_VERSION={self.distribution.get_version()}",
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
        # copied even where ninja had nothing to do: the file there may be another torch's
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(build / target.name, target)


setup(ext_modules=[Extension("drot._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
