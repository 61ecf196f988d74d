"""Layers and batches that are copied while the caller works: the order of the moves, and the values."""

import threading

import pytest
import torch
from small_models import random_tokens, small_model

from drot.architectures import architecture_of, decoder_layers
from drot.calibration.stream import CalibrationStream
from drot.calibration.transfer import ahead, empty_on_host, layers_on_device

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


def test_a_thread_moves_the_next_layer_while_the_caller_works():
    moves, at_work = [], []
    layers = [RecordedLayer(index, moves) for index in range(4)]
    for index, layer in layers_on_device(layers, ELSEWHERE, CPU):
        assert layer is layers[index] and layer.place == ELSEWHERE
        at_work.append(index)
        assert (
            sum(other.place == ELSEWHERE for other in layers) <= 3
        )  # the layer before may be on its way home
    assert at_work == [0, 1, 2, 3] and all(layer.place == CPU for layer in layers)
    assert {thread for _, _, thread in moves} == {"drot-layers"}
    assert [move[:2] for move in moves] == [
        (0, "meta"), (1, "meta"), (0, "cpu"), (2, "meta"), (1, "cpu"), (3, "meta"), (2, "cpu"), (3, "cpu"),
    ]  # fmt: skip


def test_all_layers_are_at_home_after_an_error():
    layers = [RecordedLayer(index, [], fails=index == 2) for index in range(4)]
    seen: list[int] = []
    walk = layers_on_device(layers, ELSEWHERE, CPU)
    with pytest.raises(MemoryError, match="full"):
        seen.extend(index for index, _ in walk)
    assert seen == [0, 1] and all(layer.place == CPU for layer in layers)
    walk = layers_on_device(layers[:2], ELSEWHERE, CPU)
    next(walk)
    walk.close()  # as after an error of the caller
    assert all(layer.place == CPU for layer in layers)


def test_on_one_device_the_caller_moves_the_layers():
    moves = []
    layers = [RecordedLayer(index, moves) for index in range(2)]
    assert [index for index, _ in layers_on_device(layers, CPU, CPU)] == [0, 1] and moves == []


def test_layers_without_a_thread_left_behind():
    before = threading.active_count()
    list(layers_on_device([RecordedLayer(0, [])], ELSEWHERE, CPU))
    list(layers_on_device([], ELSEWHERE, CPU))
    assert threading.active_count() == before


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_tensors_arrive_in_order(count, device):
    sources = [empty_on_host(torch.empty(64, 64), torch.device(device)).fill_(i) for i in range(count)]
    found = []
    for tensor in ahead(iter(sources), torch.device(device)):
        assert tensor.device.type == device
        found.append(float((tensor @ tensor).mean()) / 64)
    assert found == [float(i * i) for i in range(count)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU")
def test_an_offloaded_stream_computes_as_a_stream_on_the_gpu(monkeypatch):
    monkeypatch.setattr("drot.calibration.stream.TOKENS_PER_BATCH", {"cpu": 24})
    gpu = torch.device("cuda")
    model = small_model("llama")
    arch = architecture_of(model.config)
    streams = [
        CalibrationStream.embed(model, arch, random_tokens(7, 12), gpu, offload=offload)
        for offload in (False, True)
    ]
    assert streams[1].hidden_states.is_pinned()
    for index, layer in layers_on_device(list(decoder_layers(model, arch)), gpu, CPU):
        for stream in streams:
            stream.advance(layer, index)
        assert torch.equal(*(stream.hidden_states.cpu() for stream in streams))
    assert all(parameter.device == CPU for parameter in model.parameters())
