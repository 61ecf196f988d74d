"""The machine and the versions of the libraries, which `drot info` prints and manifests record."""

import contextlib
import functools
import hashlib
import os
import platform
from importlib import metadata
from typing import Any

import torch
from torch.backends import cusparselt

from drot._C import cpu_instructions, tuning_cache_file
from drot.core import torchrun
from drot.core.checks import counted
from drot.core.version import __version__
from drot.machine.devices import BUILD_INFO, is_gpu

#: environment variables that choose the instructions, and with them the order of sums, of torch, MKL,
#: oneDNN and drot
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DROT_SIMD",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
)


def versions() -> dict[str, str]:
    """Versions of drot, the libraries that it uses, and Python."""
    return {
        "drot": __version__,
        "torch": torch.__version__,
        **_of_libraries(),
        "python": platform.python_version(),
    }


@functools.cache
def _of_libraries() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("transformers", "tokenizers", "safetensors", "numpy")}


def machine(device: torch.device) -> dict[str, Any]:
    """What the bytes of a result depend on besides the recipe and the versions, in plain JSON types.

    processor, cpu_capability: the CPU's architecture and the vector instructions that torch uses.
    kernels: the instructions that drot's CPU kernels use.
    threads: torch's threads for one operation.
    ranks: the processes that share a run (torchrun).
    gpu: name of the GPU; None on a CPU.
    math_libraries: the lines of torch's build that name MKL and oneDNN; [] without them.
    torch_build: SHA-256 of the description of torch's build, `torch.__config__.show()`.
    variables: the environment variables among VARIABLES that are set.
    """
    build = torch.__config__.show()
    return {
        "processor": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": cpu_instructions(),
        "threads": torch.get_num_threads(),
        "ranks": torchrun.world_size(),
        "gpu": device_name(device) if is_gpu(device) else None,
        "math_libraries": [line.strip(" -") for line in build.splitlines() if "Intel(R)" in line],
        "torch_build": hashlib.sha256(build.encode()).hexdigest(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def device_name(device: torch.device) -> str:
    """The name of a GPU, or `cpu`."""
    return torch.get_device_module(device).get_device_name(device) if is_gpu(device) else "cpu"


def machine_name(device: torch.device) -> str:
    """The name of a GPU, or the CPU's architecture, the instructions of drot's kernels, and the threads."""
    if is_gpu(device):
        return device_name(device)
    return f"{platform.machine()} CPU ({cpu_instructions()}), {counted(torch.get_num_threads(), 'thread')}"


def _cusparselt() -> dict[str, Any]:
    """The version of cuSPARSELt that torch finds, and the one drot was compiled with."""
    found = None
    with contextlib.suppress(RuntimeError):  # cuSPARSELt does not start without a GPU
        found = cusparselt.version() if cusparselt.is_available() else None
    return {"found": found is not None, "version": found, "compiled": BUILD_INFO["cusparselt"] or None}


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def collect() -> dict[str, Any]:
    """The versions, the compiled backends and the machine, in plain JSON types.

    drot, python, torch, transformers, tokenizers, safetensors, numpy: versions.
    built_with_torch: the torch that drot was compiled for.
    backends: list of `cpu` and `cuda`; no_cuda_reason: why `cuda` was not compiled, or None.
    cuda: {compiled, architectures, torch}; gpus: [{name, capability, memory_gib}].
    cusparselt: {found, version, compiled}; cpu: {machine, capability, kernels, threads}.
    tuning_cache: path of the file with the fastest measured algorithm of each GPU product, or None.
    """
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        **versions(),
        "built_with_torch": BUILD_INFO["torch"],
        "backends": ["cpu", "cuda"] if BUILD_INFO["cuda"] else ["cpu"],
        "no_cuda_reason": BUILD_INFO["no_cuda_reason"] or None,
        "cuda": {
            "compiled": BUILD_INFO["cuda"] or None,
            "architectures": BUILD_INFO["cuda_architectures"].split(),
            "torch": torch.version.cuda,
        },
        "gpus": [_gpu(index) for index in gpus],
        "cusparselt": _cusparselt(),
        "cpu": {
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "kernels": cpu_instructions(),
            "threads": torch.get_num_threads(),
        },
        "tuning_cache": tuning_cache_file() or None,
    }
