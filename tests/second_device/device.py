"""The test device `second`: two devices with the CPU's ops, where a tensor can be on the wrong device.

It is torch's PrivateUse1, built of `runtime.cpp` and `kernels.cpp`. Every op has the CPU's values. As on a
GPU, an op with tensors on two devices is an error, and so is memory beyond a limit. The tests count its
bytes, and the places where the host waits for it. Its graphs replay what was launched on the stream that
captured them.
"""

import contextlib
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import define, impl

from drot.machine.products import add_product, product

NAME = "second"
COUNT = 2

torch.utils.rename_privateuse1_backend(NAME)

#: of each host wait: why the host waited, and the Python stack
Waits = list[tuple[str, traceback.StackSummary]]
_recorded: list[Waits] = []


@contextlib.contextmanager
def host_waits() -> Iterator[Waits]:
    """Records where the host waits for the device."""
    waits: Waits = []
    _recorded.append(waits)
    try:
        yield waits
    finally:
        _recorded.remove(waits)


@contextlib.contextmanager
def available() -> Iterator[None]:
    """A context in which torch finds the devices."""
    torch.ops.second.set_available(True)
    try:
        yield
    finally:
        torch.ops.second.set_available(False)


@contextlib.contextmanager
def limited(index: int, size: int) -> Iterator[None]:
    """A context in which device `index` has `size` bytes of memory."""
    before = torch.ops.second.limit(index)
    torch.ops.second.set_limit(index, size)
    try:
        yield
    finally:
        torch.ops.second.set_limit(index, before)


def _record(why: str) -> None:
    for waits in _recorded:
        waits.append((why, traceback.extract_stack()[:-1]))


class Graph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._drop = torch.ops.second.drop_graph

    def capture_begin(self, **options: Any) -> None:
        torch.ops.second.begin_capture()

    def capture_end(self) -> None:
        self._number = torch.ops.second.end_capture()

    def replay(self) -> None:
        torch.ops.second.replay(self._number)

    def __del__(self) -> None:
        if self._number is not None:
            self._drop(self._number)


class graph:
    """As torch.cuda.graph: without `stream` it captures on one stream of the device that is current first,
    and a capture that fails leaves its stream current."""

    _own_stream: torch.Stream | None = None

    def __init__(self, captured: Graph, stream: Any = None, capture_error_mode: str = "global") -> None:
        if stream is None:
            graph._own_stream = graph._own_stream or torch.Stream(f"{NAME}:{_index()}")
        self._captured, self._stream = captured, stream or graph._own_stream

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._captured.capture_begin()

    def __exit__(self, *error: object) -> None:
        self._captured.capture_end()
        self._stream.__exit__(*error)


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    """As torch.cuda.stream: afterwards the streams before are current, whatever became current meanwhile."""
    if stream is None:
        yield
        return
    before = [torch.accelerator.current_stream(device) for device in (stream.device.index, _index())]
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        for each in before:
            torch.accelerator.set_stream(each)


def _index(device: Any = None) -> int:
    index = None if device is None else torch.device(device).index
    return torch.ops.second.current_device() if index is None else index


def _module() -> types.ModuleType:
    """The functions of torch.cuda that drot and torch call, for this device."""
    second = torch.ops.second
    module: Any = types.ModuleType(f"torch.{NAME}")

    def total(device: Any = None) -> int:
        return second.limit(_index(device))

    module.is_available = module.is_initialized = second.is_available
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.device_count = lambda: COUNT if second.is_available() else 0
    module.current_device = second.current_device
    module.set_device = lambda device: second.set_device(_index(device))
    module.device = lambda device: torch.accelerator.device_index(_index(device))
    module.get_device_name = lambda device=None: "second device"
    module.get_device_capability = lambda device=None: (9, 0)
    module.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=total(device))
    module.Stream = lambda device=None: torch.Stream(torch.device(NAME, _index(device)))
    module.stream = _on_stream
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.memory_allocated = lambda device=None: second.allocated(_index(device))
    module.memory_reserved = module.memory_allocated
    module.mem_get_info = lambda device=None: (
        total(device) - second.allocated(_index(device)),
        total(device),
    )
    module.max_memory_allocated = lambda device=None: second.peak(_index(device))
    module.reset_peak_memory_stats = lambda device=None: second.reset_peak(_index(device))
    module.CUDAGraph, module.graph = Graph, graph
    return module


# ---- products with sums in fp32, which torch has for a GPU alone ---------------------------------------
# As ops of the library `second` they run like all others: on the CPU's views, and captured by a graph.


def _add_product(
    total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, beta: float, alpha: float, out: Tensor
) -> Tensor:
    return add_product(out.copy_(total).mul_(beta), a, b, alpha)


def _define_products() -> None:
    second = torch.ops.second
    define("second::product", "(Tensor a, Tensor b, ScalarType dtype) -> Tensor")
    scalars = "ScalarType dtype, float beta, float alpha"
    define(
        "second::add_product", f"(Tensor total, Tensor a, Tensor b, {scalars}, Tensor(a!) out) -> Tensor(a!)"
    )
    impl("second::product", "CPU", product)
    impl("second::add_product", "CPU", _add_product)

    def add(
        total: Tensor,
        a: Tensor,
        b: Tensor,
        dtype: torch.dtype,
        *,
        beta: float = 1,
        alpha: float = 1,
        out: Tensor,
    ) -> Tensor:
        return second.add_product(total, a, b, dtype, beta, alpha, out)

    for op in ("mm", "bmm"):
        impl(f"aten::{op}.dtype", "PrivateUse1", second.product)
    for op in ("addmm", "baddbmm"):
        impl(f"aten::{op}.dtype_out", "PrivateUse1", add)


def load(library: Path | str) -> None:
    """Registers the device that `library` was built for. A process loads it once."""
    torch.ops.load_library(library)
    torch._register_device_module(NAME, _module())
    impl("second::host_waits", "CompositeExplicitAutograd", _record)
    _define_products()
