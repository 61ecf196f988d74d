"""Layers, batches and results that are copied while the caller works: the order, and the values."""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from small_models import random_tokens, small_model

from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.machine import transfer
from drot.machine.transfer import (
    CopiesHome,
    ahead,
    background_thread,
    empty_on_host,
    in_main_memory,
    on_device,
)
from drot.model.decoder import DecoderModel

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


class RecordedLayer:
    """Records its moves; `fails` raises at the move to the device."""

    def __init__(self, index, moves, fails=False):
        self.index, self.moves, self.fails, self.place = index, moves, fails, CPU

    def to(self, place):
        if self.fails and place != CPU:
            raise MemoryError("full")
        if place != self.place:
            self.moves.append((self.index, place.type, threading.current_thread().name.partition("_")[0]))
        self.place = place


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_thread_moves_the_next_layer_while_the_caller_works():
    moves, at_work = [], []
    layers = [RecordedLayer(index, moves) for index in range(4)]
    for layer in on_device(layers, ELSEWHERE, CPU):
        assert layer.place == ELSEWHERE
        at_work.append(layer.index)
        assert (
            sum(other.place == ELSEWHERE for other in layers) <= 3
        )  # the layer before may be on its way home
    assert at_work == [0, 1, 2, 3] and all(layer.place == CPU for layer in layers)
    assert {thread for _, _, thread in moves} == {"drot-layers"}
    assert [move[:2] for move in moves] == [
        (0, "meta"), (1, "meta"), (0, "cpu"), (2, "meta"), (1, "cpu"), (3, "meta"), (2, "cpu"), (3, "cpu"),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_thread_is_several_layers_ahead(count):
    """Never more, and the layers still come in their order."""
    moves, most = [], []
    layers = [RecordedLayer(index, moves) for index in range(count)]
    for number, layer in enumerate(on_device(layers, ELSEWHERE, CPU, ahead=3)):
        assert layer.index == number and layer.place == ELSEWHERE
        wait_until(lambda: sum(move[1] == "meta" for move in moves) == min(number + 4, count))  # noqa: B023
        most.append(sum(other.place == ELSEWHERE for other in layers))
    assert max(most) <= 1 + 3 + 1 and all(layer.place == CPU for layer in layers)
    assert [index for index, place, _ in moves if place == "meta"] == list(range(count))


def test_all_layers_are_at_home_after_an_error():
    layers = [RecordedLayer(index, [], fails=index == 2) for index in range(4)]
    seen: list[int] = []
    walk = on_device(layers, ELSEWHERE, CPU)
    with pytest.raises(MemoryError, match="full"):
        seen.extend(layer.index for layer in walk)
    assert seen == [0, 1] and all(layer.place == CPU for layer in layers)
    walk = on_device(layers[:2], ELSEWHERE, CPU)
    next(walk)
    walk.close()  # as after an error of the caller
    assert all(layer.place == CPU for layer in layers)


def test_on_one_device_the_caller_moves_the_layers():
    moves = []
    layers = [RecordedLayer(index, moves) for index in range(2)]
    assert list(on_device(layers, CPU, CPU)) == layers and moves == []


def test_layers_without_a_thread_left_behind():
    before = threading.active_count()
    list(on_device([RecordedLayer(0, [])], ELSEWHERE, CPU))
    list(on_device([], ELSEWHERE, CPU))
    assert threading.active_count() == before


def test_a_layer_is_read_while_the_caller_works_on_the_layer_before():
    """The read of layer 1 ends before the caller is done with layer 0; layer 2 waits until 0 is dropped."""
    read = [threading.Event() for _ in range(3)]

    class Read:
        def __init__(self, index):
            self.index = index

        def to(self, place):
            if place == CPU:
                assert self.index < 2 or dropped == [0]
                read[self.index].set()
            elif self.index not in dropped:
                dropped.append(self.index)

    dropped: list[int] = []
    for layer in on_device([Read(index) for index in range(3)], CPU, ELSEWHERE):
        assert all(event.wait(5) for event in read[: layer.index + 2]), "the next layer was not read ahead"
    assert dropped == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_tensors_arrive_in_order(count, device):
    sources = [empty_on_host((64, 64), torch.float32, torch.device(device)).fill_(i) for i in range(count)]
    found = []
    for tensor in ahead(iter(sources), torch.device(device)):
        assert tensor.device.type == device
        found.append(float((tensor @ tensor).mean()) / 64)
    assert found == [float(i * i) for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_results_come_home(count, device):
    where = torch.device(device)
    places = [empty_on_host((64, 64), torch.bfloat16, where).zero_() for _ in range(count)]
    with CopiesHome(where) as home:
        for i, place in enumerate(places):
            home.write(place, torch.full((64, 64), float(i), device=where).T)
    assert [float(place.float().mean()) for place in places] == list(range(count))


class RecordedStream:
    """A stream for copies that only records what is asked of it, in `said`."""

    device = CPU

    def __init__(self, said):
        self.said, self.events = said, 0

    def wait_stream(self, worker):
        self.said.append(f"waits for {worker}")

    def record_event(self):
        self.events += 1
        return RecordedEvent(self.said, self.events)

    def synchronize(self):
        self.said.append("all done")


class RecordedEvent:
    def __init__(self, said, number):
        self.said, self.number = said, number

    def synchronize(self):
        self.said.append(f"copy {self.number} done")


@pytest.fixture
def said(monkeypatch):
    """What is asked of a GPU's streams, with the CPU in the place of a GPU."""
    said: list[str] = []
    stream = RecordedStream(said)
    monkeypatch.setattr(transfer, "_copy_stream", lambda device, what: stream)
    monkeypatch.setattr(torch.cpu, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cpu, "device", lambda device: contextlib.nullcontext(), raising=False)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device: "the worker")
    copy = torch.Tensor.copy_

    def copy_(place, source, non_blocking=False):
        said.append("copies" if non_blocking else "copies at once")
        return copy(place, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, used: said.append("keeps the result"))
    return said


def test_a_result_is_copied_while_the_caller_works_on(said):
    """A copy begins when its result is computed. The third waits for the first: two are on their way."""
    places = torch.zeros(3, 4)
    with CopiesHome(CPU) as home:
        for i in range(3):
            home.write(places[i], torch.full((4,), float(i)))
    started = ["waits for the worker", "copies", "keeps the result"]
    assert said == [*started, *started, "copy 1 done", *started, "all done"]
    assert places[:, 0].tolist() == [0, 1, 2]


def test_the_copies_are_done_after_an_error(said):
    def work():
        with CopiesHome(CPU) as home:
            home.write(torch.zeros(4), torch.ones(4))
            raise MemoryError

    with pytest.raises(MemoryError):
        work()
    assert said[-1] == "all done"


def test_no_pass_of_a_stream_waits_for_its_copies(said, monkeypatch):
    """Not for its outputs, nor for rotated states, nor for what is kept of a layer."""
    monkeypatch.setattr("drot.calibration.stream.TOKENS_PER_BATCH", {"cpu": 24})
    model = DecoderModel(small_model("llama"))
    stream = CalibrationStream.embed(model, random_tokens(7, 12), CPU)
    layer = model.layers[0]
    _, o, mlp, down = layer.groups
    passes = {
        "whole layer": lambda: stream.advance(layer),
        "rotate": lambda: stream.rotate(torch.eye(32)),
        "hessians": lambda: stream.hessians(layer, [down], advance=True),
        "inputs of o": lambda: list(kept.inputs(o)),
        "outputs of o": lambda: list(kept.inputs(mlp)),
        "advance": lambda: kept.advance(),
    }
    kept = LayerPass(layer, stream)
    for name, work in passes.items():
        said.clear()
        work()
        copies = [line for line in said if line.startswith("copies")]
        assert (name, copies) == (name, 4 * ["copies"])  # 7 sequences in batches of 2
        assert said[-1] == "all done"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU")
def test_an_offloaded_stream_computes_as_a_stream_on_the_gpu(monkeypatch):
    monkeypatch.setattr("drot.calibration.stream.TOKENS_PER_BATCH", {"cpu": 24})
    gpu = torch.device("cuda")
    model = DecoderModel(small_model("llama"))
    streams = [
        CalibrationStream.embed(model, random_tokens(7, 12), gpu, empty=empty)
        for empty in (None, partial(empty_on_host, device=gpu))
    ]
    assert streams[1].hidden_states.is_pinned()
    for layer in on_device(model.layers, gpu, CPU):
        for stream in streams:
            stream.advance(layer)
        assert torch.equal(*(stream.hidden_states.cpu() for stream in streams))
    assert all(parameter.device == CPU for parameter in model.model.parameters())


def test_a_background_thread_computes_on_one_core_and_leaves_the_others_to_the_caller():
    threads, large = torch.get_num_threads(), torch.ones(1 << 20)
    torch.set_num_threads(2)
    try:
        large.isfinite().all()  # starts the caller's own workers
        before = set(os.listdir("/proc/self/task"))
        with background_thread("test") as thread:
            assert thread.submit(lambda: bool(large.isfinite().all())).result()
            assert thread.submit(torch.get_num_threads).result() == 1
            # no worker of its own; a thread of an earlier test may end meanwhile
            assert len(set(os.listdir("/proc/self/task")) - before) == 1
            assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(threads)


def test_main_memory_is_pinned_for_a_gpu(monkeypatch):
    """A tensor that stays on the CPU is not copied; for a GPU it is copied to where the GPU copies fast."""
    tensor, pinned = torch.arange(6.0).view(2, 3), []
    monkeypatch.setattr(transfer, "is_gpu", lambda device: device == ELSEWHERE)

    def empty(shape, dtype, device):
        pinned.append(device)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(transfer, "empty_on_host", empty)
    assert in_main_memory(tensor) is tensor and in_main_memory(tensor, CPU) is tensor
    copy = in_main_memory(tensor, ELSEWHERE)
    assert copy is not tensor and torch.equal(copy, tensor) and pinned == [ELSEWHERE]
