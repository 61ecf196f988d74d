"""Parsing of the arguments `device` and `dtype`, which have the same values everywhere in drot."""

import functools
import logging
import os
import re

import torch

from drot._C import build_info
from drot.core.checks import is_a
from drot.core.errors import UserError
from drot.core.version import BUILD_COMMAND

logger = logging.getLogger("drot")

#: how the native extension was built: version, torch, compiler, cuda, cuda_architectures, no_cuda_reason,
#: cusparselt. A value is "" if it does not apply.
BUILD_INFO = build_info()
#: the types of the GPUs that drot computes on
GPU_TYPES = ("cuda",)
#: the compute capability of the first GPUs with sparse tensor cores, for which the kernels compile
LEAST_CAPABILITY = 8, 0
DTYPES_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str | torch.dtype, field: str = "dtype") -> torch.dtype:
    """The torch dtype named `float32`, `bfloat16` or `float16`; one of these, or torch.float64, as it is.

    Raises UserError for another. field: the argument that holds `name`, for the error message.
    """
    if name in (*DTYPES_BY_NAME.values(), torch.float64):
        return name
    if name not in DTYPES_BY_NAME:
        raise UserError(f"`{field}` must be auto or one of {', '.join(DTYPES_BY_NAME)}; got {name!r}")
    return DTYPES_BY_NAME[name]


def computing_dtype(dtype: str | torch.dtype, device: torch.device) -> str | torch.dtype:
    """The dtype in which `drot prune` and `drot eval` compute on `device`.

    `auto` is `float32` on a CPU, which computes faster and more exactly in it than in the 16-bit dtypes. On a
    GPU `auto` stays `auto`, the checkpoint's own. Any other dtype is returned as it is.
    """
    return "float32" if dtype == "auto" and device.type == "cpu" else dtype


def dtype_name(dtype: str | torch.dtype) -> str:
    """The name of a dtype in manifests and messages: `bfloat16` for torch.bfloat16. A name stays as it is."""
    return str(dtype).removeprefix("torch.")


def is_gpu(device: torch.device) -> bool:
    """Whether `device` is a GPU: with memory, streams and graphs of its own, and copies from pinned memory.

    `torch.get_device_module(device)` has its streams and the figures of its memory.
    """
    return device.type in GPU_TYPES


@torch.compiler.assume_constant_result
def has_kernels(device: torch.device) -> bool:
    """Whether drot's ops run on `device`: on a CPU, and on a GPU whose architecture drot was built for."""
    return _has_kernels(device)


@functools.cache  # every MLP asks
def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "cpu" or is_gpu(device)
    built = BUILD_INFO["cuda_architectures"]
    return bool(built) and kernel_problem(torch.cuda.get_device_capability(device), built) is None


def total_memory(device: torch.device) -> int:
    """The bytes of memory that `device` has, used or not."""
    if is_gpu(device):
        return torch.get_device_module(device).get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: torch.device) -> int:
    """The bytes of memory that `device` has left for tensors, for a CPU those that it has.

    Of a GPU, memory that torch keeps and no tensor has counts as left.
    """
    if is_gpu(device):
        gpu = torch.get_device_module(device)
        kept = gpu.memory_reserved(device) - gpu.memory_allocated(device)
        return gpu.mem_get_info(device)[0] + kept
    return total_memory(device)


def pick_device(name: str | torch.device, *, kernels: bool = False) -> torch.device:
    """The device named `cpu`, `cuda` or `cuda:N`. `auto` is `cuda`, or the CPU without a GPU.

    The device is named as tensors name theirs, so that the two compare as equal: a GPU with its index, which
    is that of torch's current GPU for `cuda`, and the CPU without one.

    Raises UserError for another name, for a GPU that torch does not find, and for a GPU for which drot was
    not built, or, with `kernels`, has none (`check_gpu`).
    """
    is_a("device", name, str, torch.device)
    kind = GPU_TYPES[0]
    gpu = torch.get_device_module(kind)
    gpus = gpu.device_count() if gpu.is_available() else 0
    try:
        device = torch.device(name if name != "auto" else kind if gpus else "cpu")
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", kind):
        raise UserError(f"`device` must be auto, cpu or cuda[:N]; got {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    if not gpus:
        raise UserError(f'`device` is {name!r}, but torch finds no GPU: use `device="cpu"`')
    if (device.index or 0) >= gpus:
        raise UserError(
            f"`device` must be at most cuda:{gpus - 1}, the last GPU that torch finds; got {name!r}"
        )
    if device.index is None:
        device = torch.device(kind, gpu.current_device())
    check_gpu(device, kernels)
    return device


@functools.cache
def check_gpu(device: torch.device, kernels: bool = False) -> None:
    """Compares the GPU `device` with the architectures for which drot was built.

    Raises UserError if drot was built with CUDA but not for this GPU, whose first op would end with 'no
    kernel image'. Warns if drot was built without CUDA: dense models run all the same. With `kernels`, for
    packed weights and for pruning, it raises UserError then too.

    This is done at the first use of a GPU and not by `import drot`: to ask for the GPU takes torch's start of
    CUDA, about a second, after which a process cannot fork.
    """
    gpu = torch.get_device_module(device)
    major, minor = gpu.get_device_capability(device)
    problem = kernel_problem((major, minor), BUILD_INFO["cuda_architectures"])
    if problem is None:
        return
    line = f"{gpu.get_device_name(device)} has compute capability {major}.{minor}, but drot {problem}"
    if BUILD_INFO["cuda"] or (kernels and device.type == "cuda"):
        raise UserError(f'{line}; or use `device="cpu"`')
    logger.warning("%s", line)


def kernel_problem(capability: tuple[int, int], built: str) -> str | None:
    """Says what to rebuild if drot's kernels do not run on a GPU; None if they do.

    Machine code runs on GPUs of the same major number and the same or a later minor number, PTX on the same
    and all later GPUs. Of an architecture with an `a`, both run on exactly that capability; with an `f`, on
    GPUs of its major number from its minor number on (CUDA C++ Programming Guide, compute capabilities).

    capability: the compute capability of the GPU.
    built: the architectures of the build, separated by spaces, as in `8.0 9.0a 12.0+PTX`; "" without CUDA.
    """
    if any(_runs_on(capability, name) for name in built.split()):
        return None
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        without = f": `DROT_WITH_CUDA=0 {BUILD_COMMAND}` builds it without them" if built else ""
        return f"has kernels only for GPUs of {least} and later{without}"
    was_built = f"was built for {', '.join(built.split())}" if built else "was built without CUDA"
    name = ".".join(map(str, capability))
    return f"{was_built}: rebuild it with `TORCH_CUDA_ARCH_LIST={name} {BUILD_COMMAND}`"


def _runs_on(capability: tuple[int, int], architecture: str) -> bool:
    found = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", architecture)
    assert found is not None, f"{architecture} is no architecture"
    major, minor, kind, ptx = int(found[1]), int(found[2]), found[3], found[4]
    if kind == "a":
        return capability == (major, minor)
    if ptx and not kind:
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor
