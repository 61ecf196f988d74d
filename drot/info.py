"""What a bug report needs: versions, backends built, GPU, cuSPARSELt."""

import platform
from importlib import metadata
from typing import Any

import torch

from drot._extension import build_info
from drot.version import __version__

#: packages whose version decides how drot behaves; those after transformers are optional
PACKAGES = ("torch", "transformers", "safetensors", "datasets", "lm_eval")


def collect() -> dict[str, Any]:
    """Plain JSON types: `drot`, `python`, `platform`, `packages`, `native`, `backends`, `gpus`."""
    native = build_info()
    return {
        "drot": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "native": native,
        "backends": ["cpu", *(["cuda"] if native["cuda"] else [])],
        "gpus": _gpus(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> list[str]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        gpus.append(f"{properties.name} ({capability}, {properties.total_memory / 2**30:.0f} GiB)")
    return gpus
