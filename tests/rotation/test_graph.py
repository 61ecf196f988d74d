"""A captured step gives the matrices of a step that is called, and a failed capture is reported."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_objective import build, make_layer
from torch import Tensor

from drot.config import Recipe, resolve
from drot.machine import graph
from drot.machine.graph import WARM_UP, GraphedStep, Step
from drot.rotation import optimizers, train
from drot.rotation.train import train_rotation


class Recorder:
    """As a CUDA graph: the capture changes nothing, and a replay writes to the result of the capture.

    state: returns the tensors that the step changes in place.
    """

    def __init__(self, state: Callable[[], list[Tensor]]) -> None:
        self.captures = self.replays = 0
        self.state = state

    def __call__(self, step: Step) -> tuple[Callable[[], None], Tensor]:
        self.captures += 1
        kept = [(tensor, tensor.clone()) for tensor in self.state()]
        result = torch.full_like(step(), torch.nan)
        for tensor, before in kept:
            tensor.copy_(before)

        def replay() -> None:
            self.replays += 1
            result.copy_(step())

        return replay, result


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Steps as on a GPU, which can be captured, and what captures them."""
    monkeypatch.setattr(optimizers, "on_tensor_cores", lambda x: True)
    made: list[optimizers.FastOptimizer] = []

    class Kept(optimizers.FastOptimizer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    def state() -> list[Tensor]:
        momenta = [turn._momentum for turn in made[-1]._turns]
        return [*made[-1].matrices, *momenta]

    monkeypatch.setitem(optimizers.OPTIMIZERS, "fast", Kept)
    monkeypatch.setattr(train, "FastOptimizer", Kept)
    return Recorder(state)


def config(**fields):
    return resolve(Recipe().replace(**fields)).rotation


def layer(kind="pruned", seed=0):
    weights, hessians = make_layer(seed, dtype=torch.float32)
    return build(weights, hessians, "wanda", kind, "2:4", False, product_dtype=torch.bfloat16)


def test_replays_give_the_matrices_of_calls(recorder, monkeypatch):
    problems = [layer(seed=seed) for seed in (0, 3)]
    settings = config(steps=20, early_stop=0.0)
    called, record = train_rotation(problems, settings)
    monkeypatch.setattr(train, "capture_for", lambda device: recorder)
    replayed, again = train_rotation(problems, settings)
    assert (recorder.captures, recorder.replays) == (1, 20 - WARM_UP)
    assert again["loss_curve"] == record["loss_curve"]
    assert again["best_step"] == record["best_step"] > WARM_UP
    for a, b in zip(called, replayed, strict=True):
        assert torch.equal(a.r1, b.r1) and torch.equal(a.r2, b.r2)


@pytest.mark.usefixtures("recorder")
def test_a_failed_capture_is_told_once_and_changes_nothing(monkeypatch, caplog):
    def fail(work):
        raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

    settings = config(steps=8, early_stop=0.0)
    (called,), _ = train_rotation([layer()], settings)
    monkeypatch.setattr(train, "capture_for", lambda device: fail)
    with caplog.at_level(logging.WARNING, logger="drot"):
        (again,), _ = train_rotation([layer()], settings)
    assert [record.getMessage() for record in caplog.records] == [
        "a training step could not be captured as a CUDA graph (operation not permitted when stream is "
        "capturing): its kernels, and those of later layers, are launched one by one, which is slower"
    ]
    assert torch.equal(called.r1, again.r1)


def test_steps_on_some_of_the_layers_are_not_captured(recorder, monkeypatch):
    monkeypatch.setattr(train, "capture_for", lambda device: recorder)
    train_rotation([layer(seed=seed) for seed in (0, 3)], config(steps=8, layers_per_step=1))
    train_rotation([layer()], config(steps=8, optimizer="paper"))
    assert recorder.captures == 0


def test_results_of_replays_are_new_tensors():
    x = torch.tensor([1.0])
    step = GraphedStep(lambda: x.mul_(2).clone(), Recorder(lambda: [x]), [x])
    results = [step() for _ in range(2 * WARM_UP)]
    assert [float(result) for result in results] == [2.0 ** (i + 1) for i in range(2 * WARM_UP)]


@pytest.mark.parametrize("factor", [1, 2])
def test_a_graph_that_does_nothing_is_an_error_where_a_call_does_something(factor):
    """Its loss repeats, which looks like convergence. Where the gradient is 0, a call does nothing either."""
    x = torch.tensor([1.0])
    step = GraphedStep(lambda: x.mul_(factor).clone(), lambda step: (lambda: None, step()), [x])
    for _ in range(WARM_UP):
        step()
    if factor == 1:
        assert [float(step()) for _ in range(3)] == [1, 1, 1]
    else:
        with pytest.raises(RuntimeError, match="does nothing where a call of the step does"):
            step()


def test_a_cpu_has_no_graphs():
    assert graph.capture_for(torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["entropy", "pruned"])
def test_the_graph_of_a_step_cuda(kind, monkeypatch, caplog):
    device = torch.device("cuda")

    def run() -> tuple[Tensor, list[float]]:
        moved = layer(kind).to(device)
        (rotation,), record = train_rotation([moved], config(steps=30, early_stop=0.0))
        return rotation.r1.cpu(), record["loss_curve"]

    with caplog.at_level(logging.WARNING, logger="drot"):
        replayed, curve = run()
    assert not caplog.records
    monkeypatch.setattr(train, "capture_for", lambda device: None)
    called, expected = run()
    assert curve == pytest.approx(expected, rel=1e-3)
    assert torch.allclose(replayed, called, atol=1e-2)
