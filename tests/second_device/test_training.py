"""The training of a rotation on the test device: its graph, and where the host waits for it."""

import gc
import itertools
import logging
import weakref
from typing import Any

import pytest
import torch
from device import graph, host_waits
from runs import one_shot, prune

from drot.machine.graph import WARM_UP
from drot.pipeline import training
from drot.rotation import train

STEPS = 40


def rotations(tmp_path, device="second", **fields: Any) -> tuple[bytes, list[list[float]]]:
    """The rotation file of a run, and the loss curve of each layer."""
    file = tmp_path / "rotations.safetensors"
    file.unlink(missing_ok=True)
    settings = one_shot(**dict(steps=STEPS, early_stop=0.0, hessians="dense") | fields)
    result = prune(None, settings, device=device, save_rotations_to=file)
    return file.read_bytes(), [layer.rotation.loss_curve for layer in result.manifest.layers]


@pytest.mark.parametrize(("device", "objective"), [("second:1", "pruned"), ("second:0", "entropy")])
def test_replays_give_the_bytes_of_calls(device, objective, tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, logger="drot"):
        replayed = rotations(tmp_path, device, objective=objective)
    assert not caplog.records
    monkeypatch.setattr("drot.machine.graph.is_gpu", lambda device: False)
    assert rotations(tmp_path, device, objective=objective) == replayed


def test_a_graph_on_a_stream_of_another_device_is_an_error(tmp_path, monkeypatch):
    """Without `stream`, torch captures on a stream of the first device: the graph of the second is empty."""
    monkeypatch.setattr(graph, "_own_stream", torch.Stream("second:0"))
    module = torch.get_device_module("second")
    monkeypatch.setattr(module, "graph", lambda captured, **options: graph(captured))
    rotations(tmp_path, "second:0")
    with pytest.raises(RuntimeError, match="does nothing where a call of the step does"):
        rotations(tmp_path, "second:1")


def test_all_graphs_of_a_device_are_captured_on_one_stream(tmp_path, monkeypatch):
    """A library keeps a workspace for each stream that it has met."""
    module, streams = torch.get_device_module("second"), []

    def recorded(captured: Any, stream: Any, **options: Any) -> graph:
        streams.append(stream)
        return graph(captured, stream)

    monkeypatch.setattr(module, "graph", recorded)
    for name in ("second:0", "second:1"):
        (tmp_path / name).mkdir()
        rotations(tmp_path / name, name)
    assert len(streams) == 6
    assert len({(stream.device, stream.stream_id) for stream in streams}) == 2
    assert {stream.device.index for stream in streams} == {0, 1}


def test_a_failed_capture_changes_nothing_and_leaves_no_stream(tmp_path, monkeypatch, caplog):
    expected = rotations(tmp_path)
    total = train._SummedObjective.__call__
    monkeypatch.setattr("drot.machine.graph._failed", set())

    def reads_the_loss(self, *arguments: Any) -> Any:
        loss, gradients = total(self, *arguments)
        assert float(loss) > 0
        return loss, gradients

    monkeypatch.setattr(train._SummedObjective, "__call__", reads_the_loss)
    stream = torch.accelerator.current_stream("second:0")
    with caplog.at_level(logging.WARNING, logger="drot"):
        assert rotations(tmp_path) == expected
    assert torch.accelerator.current_stream("second:0") == stream
    assert ["could not be captured" in record.getMessage() for record in caplog.records] == [True]


def test_objectives_in_main_memory_are_not_captured(monkeypatch, caplog):
    """Though every step takes all of them: a copy to the device is no part of a graph."""
    monkeypatch.setattr("drot.machine.graph._failed", set())
    with caplog.at_level(logging.WARNING, logger="drot"):
        prune(None, one_shot("shared", steps=STEPS, layers_per_step=99), device="second:0")
    assert not caplog.records


def test_the_last_evaluation_has_the_memory_of_the_graph(tmp_path, monkeypatch):
    total, made, seen = train._SummedObjective.__call__, [], []

    class Step(train.GraphedStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    def watched(self, *arguments: Any) -> Any:
        seen.append(sum(step() is not None for step in made))
        return total(self, *arguments)

    monkeypatch.setattr(train, "GraphedStep", Step)
    monkeypatch.setattr(train._SummedObjective, "__call__", watched)
    rotations(tmp_path)
    assert len(made) > 1 and seen[-1] == 0 < seen[-2]


@pytest.mark.parametrize(
    ("settings", "graphs"),
    [
        (dict(), False),
        (dict(sparsity="2:4", blocks=2, method="wanda"), True),
        (dict(objective="entropy"), True),
        (dict(optimizer="paper"), True),
    ],
    ids=str,
)
def test_the_host_waits_at_every_tenth_step_only(settings, graphs, tmp_path, monkeypatch):
    monkeypatch.setattr("drot.machine.graph.is_gpu", lambda device: graphs)
    begins, counts = train._Training.entropy_steps, []

    def counted(self: train._Training) -> set[int]:  # the first that each step of the loop calls
        counts.append((self, len(waits)))
        return begins(self)

    monkeypatch.setattr(train._Training, "entropy_steps", counted)
    with host_waits() as waits:
        rotations(tmp_path, **settings)
    first = [count for training, count in counts if training is counts[0][0]]
    assert len(first) == STEPS + 1
    waited = {number for number, (before, after) in enumerate(itertools.pairwise(first)) if after > before}
    expected = set(range(0, STEPS, train.REPORT_EVERY))
    if graphs and settings.get("optimizer") != "paper":
        expected.add(WARM_UP)  # the graph is captured, and compared with a call
    assert waited == expected


@pytest.mark.parametrize("graphs", [True, False])
def test_a_training_leaves_no_memory_behind(graphs, monkeypatch, tmp_path):
    """Without Python's search for circles, which comes late."""
    monkeypatch.setattr("drot.machine.graph.is_gpu", lambda device: graphs)
    module, found = torch.get_device_module("second"), []
    train_rotation = training.train_rotation

    def measured(objectives: Any, *arguments: Any) -> Any:
        before = module.memory_allocated("second:0")
        result = train_rotation(objectives, *arguments)
        kept = sum(2 * 8 * (rotation.r1.numel() + rotation.r2.numel()) for rotation in result[0])
        found.append(module.memory_allocated("second:0") - before <= kept)
        return result

    monkeypatch.setattr(training, "train_rotation", measured)
    gc.collect()
    gc.disable()
    try:
        rotations(tmp_path)
    finally:
        gc.enable()
    assert found == [True] * 3
