"""What `drot info` prints."""

import platform
from importlib import metadata
from typing import Any

import torch

from drot import _C
from drot._extension import BUILD_INFO
from drot.version import __version__


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cusparselt() -> dict[str, Any]:
    """Version that torch's cuSPARSELt reports; it needs no GPU to answer."""
    found: int | None = None
    try:
        from torch.backends import cusparselt

        found = cusparselt.version() if cusparselt.is_available() else None
    except (ImportError, RuntimeError, AttributeError):
        found = None
    return {"found": found is not None, "version": found, "compiled": BUILD_INFO["cusparselt"] or None}


def collect() -> dict[str, Any]:
    """Versions, built backends and machine, in types that JSON knows.

    Keys: drot, python, torch, built_with_torch, transformers, backends (list of str),
    no_cuda_reason (why the CUDA side was not built, or None), cuda {compiled, architectures, torch},
    gpus [{name, capability, memory_gib}], cusparselt {found, version, compiled},
    cpu {machine, capability, threads}, measured_file (where the fastest ways of a GPU's products are
    remembered, or None).
    """
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return {
        "drot": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "built_with_torch": BUILD_INFO["torch"],
        "transformers": _installed("transformers"),
        "backends": ["cpu", "cuda"] if BUILD_INFO["cuda"] else ["cpu"],
        "no_cuda_reason": BUILD_INFO["no_cuda_reason"] or None,
        "cuda": {
            "compiled": BUILD_INFO["cuda"] or None,
            "architectures": BUILD_INFO["cuda_architectures"].split(),
            "torch": torch.version.cuda,
        },
        "gpus": gpus,
        "cusparselt": _cusparselt(),
        "cpu": {
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "measured_file": _C.remembered_file() or None,
    }
