"""Copies between main memory and a GPU while the GPU computes: of layers, and of batches of hidden states."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from drot.machine.devices import is_gpu


class Movable(Protocol):
    """What `on_device` moves, such as the handle to a decoder layer."""

    def to(self, device: torch.device) -> Any: ...

    def tensors(self) -> Iterable[Tensor]:
        """All that is moved."""


Layer = TypeVar("Layer", bound=Movable)
#: Makes an uninitialised tensor of a shape and a dtype, in a place that it knows.
Empty = Callable[[Sequence[int], torch.dtype], Tensor]


def background_thread(name: str) -> ThreadPoolExecutor:
    """An executor with a single thread, whose torch ops use one core. The caller's ops use as many as before.

    For every thread that computes on several cores, OpenMP keeps workers. If there are more workers than
    cores, GNU's OpenMP lets all of them sleep between two ops, and the caller's small ops take several times
    as long, also while the thread does nothing.
    """
    cores = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, thread_name_prefix=name)
    # torch gives a thread its number of cores at its first op or question, which must come before ours
    thread.submit(torch.get_num_threads).result()
    thread.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(cores)  # the number that later threads take
    return thread


def on_device(
    layers: Sequence[Layer], device: torch.device, home: torch.device, *, ahead: int = 1
) -> Iterator[Layer]:
    """Yields each layer on `device`. When the caller goes on, the layer returns `home`.

    If the devices are of two types, a thread brings the next layers to `device`, and the layer before back
    home, while the caller works. So 1 + `ahead` layers lie on `device`. A layer whose home is `meta` is read
    from its files by the thread, and dropped when it returns. At the end all layers lie at home, also after
    an error.

    layers: the layers, at home. device: where the caller works. home: where the layers lie.
    ahead: how many layers the thread is ahead of the caller.
    """
    if device.type == home.type:
        for layer in layers:
            layer.to(device)
            yield layer
            layer.to(home)
        return
    copies = _copy_stream(device, "layers")

    def move(layer: Movable, target: torch.device) -> None:
        if copies is None:
            layer.to(target)
            return
        with _in_stream(copies):
            layer.to(target)
        copies.synchronize()

    thread = background_thread("drot-layers")  # makes the moves one after the other
    try:
        coming = [thread.submit(move, layer, device) for layer in layers[:ahead]]
        for index, layer in enumerate(layers):
            coming.pop(0).result()
            if copies is not None:
                # a tensor that the caller replaces leaves its memory to the next layer, which is on its way,
                # but not before the caller's stream has read it
                worker = torch.get_device_module(device).current_stream(device)
                for tensor in layer.tensors():
                    tensor.record_stream(worker)
            further = layers[index + ahead : index + ahead + 1]
            coming += [thread.submit(move, following, device) for following in further]
            yield layer
            if copies is not None:  # the move frees memory that the caller's stream may still read
                torch.get_device_module(device).current_stream(device).synchronize()
            thread.submit(move, layer, home)
    finally:
        thread.shutdown()
        for layer in layers:
            layer.to(home)


def ahead(sources: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yields each tensor on `device`.

    From main memory to a GPU, the next tensor is on its way while the caller works with a tensor. The copies
    overlap with the work if the tensors are pinned (`empty_on_host`).
    """
    copies, gpu = _copy_stream(device, "batches"), torch.get_device_module(device)
    if copies is None:
        yield from (source.to(device) for source in sources)
        return
    started: list[tuple[Tensor, torch.Event]] = []

    def hand_over() -> Tensor:
        tensor, arrived = started.pop(0)
        worker = gpu.current_stream(device)
        worker.wait_event(arrived)
        tensor.record_stream(worker)  # keeps the memory until the worker has read it
        return tensor

    for source in sources:
        with _in_stream(copies):
            started.append((source.to(device, non_blocking=True), copies.record_event()))
        if len(started) == 2:
            yield hand_over()
    if started:
        yield hand_over()


class CopiesHome:
    """Copies results of a GPU into tensors in main memory while the GPU computes the next results.

    It is a context manager. The tensors hold the results when the context ends, also after an error. The
    copies overlap with the work if the tensors are pinned (`empty_on_host`). A copy between tensors on one
    device is done at once.

    device: where the results are computed.
    """

    #: Copies that may be on their way. A result keeps its memory on the GPU until its copy is done.
    MOST = 2

    def __init__(self, device: torch.device) -> None:
        self._copies, self._device = _copy_stream(device, "results"), device
        self._gpu = torch.get_device_module(device)
        self._under_way: list[torch.Event] = []

    def __enter__(self) -> "CopiesHome":
        return self

    def __exit__(self, *error: object) -> None:
        if self._copies is not None:
            self._copies.synchronize()

    def write(self, target: Tensor, result: Tensor) -> None:
        """Copies `result` to `target`, a tensor of the same shape, which may have another dtype."""
        if self._copies is None or is_gpu(target.device):
            target.copy_(result)
            return
        if len(self._under_way) == self.MOST:
            self._under_way.pop(0).synchronize()
        self._copies.wait_stream(self._gpu.current_stream(self._device))
        with _in_stream(self._copies):
            target.copy_(result, non_blocking=True)
            self._under_way.append(self._copies.record_event())
        result.record_stream(self._copies)  # keeps the memory until the copy has read it


def copied_home(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """A function for another thread, which gives the tensors in main memory.

    It copies what the caller's stream has computed so far, in a stream of its own, while the caller goes on.
    Until then the caller must not change the tensors. Those in main memory are not copied.
    """
    held = {name: tensor.detach() for name, tensor in tensors.items()}
    devices = {tensor.device for tensor in held.values() if is_gpu(tensor.device)}
    computed = {
        device: torch.get_device_module(device).current_stream(device).record_event() for device in devices
    }

    def copies() -> dict[str, Tensor]:
        with contextlib.ExitStack() as streams:
            for device, event in computed.items():
                stream = _copy_stream(device, "saved")
                assert stream is not None
                stream.wait_event(event)
                streams.enter_context(_in_stream(stream))
            # each copy has ended when it returns, and the memory on the GPU may go
            return {name: held.pop(name).cpu() for name in list(held)}

    return copies


def pinned_bytes(size: int) -> int:
    """The bytes of main memory that torch takes for a pinned tensor of `size` bytes: a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def return_pinned_memory() -> None:
    """Gives the memory of pinned tensors that are gone back to the system; torch keeps it for later ones."""
    if torch.cuda.is_available():
        torch._C._host_emptyCache()


def empty_on(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def gathered(states: Tensor, sequences: slice | Tensor, device: torch.device) -> Tensor:
    """The rows of some sequences, on `device`."""
    if isinstance(sequences, slice) or states.device == device:
        return states[sequences].to(device)
    # sequence by sequence: so main memory gathers nothing, and the CPU does not wait
    result = torch.empty(len(sequences), *states.shape[1:], dtype=states.dtype, device=device)
    for row, index in zip(result, sequences.tolist(), strict=True):
        row.copy_(states[index], non_blocking=True)
    return result


def empty_on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor in main memory, pinned for copies to and from a GPU `device`."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_gpu(device))


def in_main_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """The tensor in main memory, pinned if it comes from a GPU or goes to the GPU `device`.

    A GPU copies pinned memory several times as fast.
    """
    other = tensor.device if device is None else device
    if tensor.device.type == "cpu" and not is_gpu(other):
        return tensor
    return empty_on_host(tensor.shape, tensor.dtype, other).copy_(tensor)


@contextlib.contextmanager
def _in_stream(stream: torch.Stream) -> Iterator[None]:
    """A context whose ops run in `stream`, and which touches no other GPU.

    torch's own context ends by making a stream of the thread's GPU current, which in a new thread is GPU 0.
    That makes a CUDA context of 0.5 GB there, for each rank of the machine.
    """
    gpu = torch.get_device_module(stream.device)
    with gpu.device(stream.device), gpu.stream(stream):
        yield


@functools.cache
def _copy_stream(device: torch.device, what: str) -> torch.Stream | None:
    """The stream for copies to or from a GPU, the same at each call; None for another device.

    torch keeps freed memory for the stream on which it was allocated: with ever new streams it would pile up.

    what: is copied; a batch does not wait until a whole layer is copied.
    """
    return torch.get_device_module(device).Stream(device) if is_gpu(device) else None
