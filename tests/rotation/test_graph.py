"""A captured step gives the matrices of a step that is called, and a failed capture is told."""

import logging
from typing import ClassVar

import pytest
import torch
from test_objective import build, make_layer
from torch import Tensor

from drot.config import RotationConfig
from drot.rotation import graph, optimizers, train
from drot.rotation.graph import WARM_UP, GraphedStep
from drot.rotation.train import train_rotation


class Recorder:
    """As a CUDA graph: a replay computes again from the tensors of the capture, into the same tensors."""

    def __init__(self):
        self.captures = self.replays = 0

    def __call__(self, work):
        self.captures += 1
        outputs = [torch.full_like(tensor, torch.nan) for tensor in self.without_effect(work)]

        def replay():
            self.replays += 1
            for static, new in zip(outputs, work(), strict=True):
                static.copy_(new)

        return replay, outputs

    @staticmethod
    def without_effect(work):
        """A capture records kernels and does not run them: what it would change in place stays."""
        kept = [(step._momentum, step._momentum.clone()) for step in Recorder.steps]
        outputs = work()
        for momentum, before in kept:
            momentum.copy_(before)
        return outputs

    steps: ClassVar[list] = []


@pytest.fixture
def on_tensor_cores(monkeypatch):
    """Steps as on a GPU, which are captured."""
    monkeypatch.setattr(optimizers, "on_tensor_cores", lambda x: True)
    Recorder.steps = []

    class Kept(optimizers.TensorCoreStep):
        def __init__(self, *args):
            super().__init__(*args)
            Recorder.steps.append(self)

    monkeypatch.setattr(optimizers, "TensorCoreStep", Kept)


def layer(kind="pruned", seed=0):
    weights, hessians = make_layer(seed, dtype=torch.float32)
    return build(weights, hessians, "wanda", kind, "2:4", False, product_dtype=torch.bfloat16)


@pytest.mark.usefixtures("on_tensor_cores")
def test_replays_give_the_matrices_of_calls(monkeypatch):
    problems = [layer(seed=seed) for seed in (0, 3)]
    settings = RotationConfig(steps=20, early_stop=0.0)
    called, record = train_rotation(problems, settings)
    recorder = Recorder()
    Recorder.steps = []
    monkeypatch.setattr(train, "capture_for", lambda device: recorder)
    replayed, again = train_rotation(problems, settings)
    assert (recorder.captures, recorder.replays) == (1, 20 - WARM_UP)
    assert again.loss_curve == record.loss_curve and again.gradient_norm == record.gradient_norm
    assert again.best_step == record.best_step > WARM_UP
    for a, b in zip(called, replayed, strict=True):
        assert torch.equal(a.r1, b.r1) and torch.equal(a.r2, b.r2)


@pytest.mark.usefixtures("on_tensor_cores")
def test_a_failed_capture_is_told_once_and_changes_nothing(monkeypatch, caplog):
    def fail(work):
        raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

    settings = RotationConfig(steps=8, early_stop=0.0)
    (called,), _ = train_rotation([layer()], settings)
    monkeypatch.setattr(train, "capture_for", lambda device: fail)
    with caplog.at_level(logging.WARNING, logger="drot"):
        (again,), _ = train_rotation([layer()], settings)
    assert [record.getMessage() for record in caplog.records] == [
        "a training step could not be captured as a CUDA graph (operation not permitted when stream is "
        "capturing): its kernels are launched one by one, which is slower"
    ]
    assert torch.equal(called.r1, again.r1)


@pytest.mark.usefixtures("on_tensor_cores")
def test_steps_on_some_of_the_layers_are_not_captured(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(train, "capture_for", lambda device: recorder)
    train_rotation([layer(seed=seed) for seed in (0, 3)], RotationConfig(steps=8, layers_per_step=1))
    train_rotation([layer()], RotationConfig(steps=8, optimizer="paper"))
    assert recorder.captures == 0


def test_outputs_of_a_replay_are_new_tensors():
    step = GraphedStep(lambda inputs: [2 * inputs[0]], Recorder())
    outputs = [step([torch.tensor([float(i)])])[0] for i in range(2 * WARM_UP)]
    assert [float(output) for output in outputs] == [2.0 * i for i in range(2 * WARM_UP)]


def test_an_input_that_a_step_overwrites_is_copied_only_if_it_is_another():
    def doubled(inputs):
        x, y = inputs
        return [x.mul_(2), x + y]

    def capture(work):
        """A replay overwrites the input of the capture, as a replay of a CUDA graph does."""
        outputs = work()

        def replay():
            for static, new in zip(outputs, work(), strict=True):
                if static is not new:
                    static.copy_(new)

        return replay, outputs

    step, x, y = GraphedStep(doubled, capture), torch.tensor([1.0]), torch.tensor([0.5])
    for i in range(2 * WARM_UP):
        before, (x, total) = x, step([x, y])
        assert float(before) == 2.0**i and float(x) == 2.0 ** (i + 1)  # the caller's tensors stay
        assert float(total) == float(x) + 0.5
    kept = x.clone()
    x.zero_()  # the step has the value already, and does not look at this tensor
    assert torch.equal(step([x, y])[0], 2 * kept)
    assert torch.equal(step([torch.tensor([3.0]), y])[0], torch.tensor([6.0]))


def test_a_cpu_has_no_graphs():
    assert graph.capture_for(torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["entropy", "pruned"])
def test_the_graph_of_a_step_cuda(kind, monkeypatch, caplog):
    device = torch.device("cuda")

    def run() -> tuple[Tensor, list[float]]:
        moved = layer(kind).to(device)
        (rotation,), record = train_rotation([moved], RotationConfig(steps=30, early_stop=0.0))
        return rotation.r1.cpu(), record.loss_curve

    with caplog.at_level(logging.WARNING, logger="drot"):
        replayed, curve = run()
    assert not caplog.records
    monkeypatch.setattr(train, "capture_for", lambda device: None)
    called, expected = run()
    assert curve == pytest.approx(expected, rel=1e-3)
    assert torch.allclose(replayed, called, atol=1e-2)
