"""The test device itself: it finds what a GPU would find, and computes what the CPU computes."""

import gc
from collections.abc import Callable

import device as second
import pytest
import torch

from drot.machine import devices, transfer

FIRST, OTHER = torch.device("second:0"), torch.device("second:1")


def test_ops_have_the_cpus_bytes():
    x = torch.randn(6, 4)
    on = x.to(FIRST)
    assert on.device == FIRST
    for op in (
        lambda x: x @ x.T,
        lambda x: x[1:, ::2].T.softmax(-1),
        lambda x: x.unfold(0, 2, 1).sum(-1),
        lambda x: x[x > 0],
        lambda x: x.t().contiguous().view(2, 12).cumsum(0),
        lambda x: torch.linalg.cholesky_ex(x.T @ x)[0],
    ):
        assert torch.equal(op(on).cpu(), op(x))
    assert torch.equal(torch.add(on, 1, out=torch.empty(0, device=FIRST)).cpu(), x + 1)


def test_gradients_stay_on_the_device():
    linear = torch.nn.Linear(4, 3)
    x = torch.randn(5, 4)
    (expected,) = torch.autograd.grad(linear(x).square().sum(), [linear.weight])
    linear.to(OTHER)(x.to(OTHER)).square().sum().backward()
    assert linear.weight.grad.device == OTHER
    assert torch.equal(linear.weight.grad.cpu(), expected)


@pytest.mark.parametrize(
    "op",
    [
        lambda a, b: a + b,
        lambda a, b: torch.mm(a, b),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a.addmm_(a, b),
        lambda a, b: torch.add(a, a, out=b),
        lambda a, b: torch.where(a > 0, a, b),
    ],
)
@pytest.mark.parametrize("elsewhere", ["cpu", "second:1"])
def test_tensors_of_two_devices_are_refused(op: Callable, elsewhere: str):
    a, b = torch.ones(4, 4, device=FIRST), torch.ones(4, 4, device=elsewhere)
    op(a, a.clone())
    with pytest.raises(RuntimeError, match="at least two devices"):
        op(a, b)


def test_a_number_of_the_cpu_is_accepted():
    assert float(torch.ones(3, device=FIRST).mul(torch.tensor(2.0)).sum()) == 6


def test_the_memory_is_not_main_memory():
    x = torch.ones(3, device=FIRST)
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    assert bool(torch.empty(3, device=FIRST).isnan().all())  # nobody wrote it


def test_bytes_are_counted_and_limited():
    gpu = torch.get_device_module(FIRST)
    gc.collect()
    before = gpu.memory_allocated(FIRST)
    gpu.reset_peak_memory_stats(FIRST)
    x = torch.empty(1000, dtype=torch.bfloat16, device=FIRST)
    del x
    assert gpu.memory_allocated(FIRST) == before
    assert gpu.max_memory_allocated(FIRST) == before + 2000
    with second.limited(0, before + 2000):
        assert gpu.mem_get_info(FIRST) == (2000, before + 2000)
        torch.empty(2000, dtype=torch.uint8, device=FIRST)
        torch.empty(2001, dtype=torch.uint8, device=OTHER)
        with pytest.raises(torch.OutOfMemoryError, match="second:0 is out of memory"):
            torch.empty(2001, dtype=torch.uint8, device=FIRST)


def test_memory_that_torch_keeps_is_left(monkeypatch):
    gpu, free = torch.get_device_module(FIRST), devices.free_memory(FIRST)
    monkeypatch.setattr(gpu, "memory_reserved", lambda device: gpu.memory_allocated(device) + 5000)
    assert devices.free_memory(FIRST) == free + 5000


def test_host_waits_are_counted_with_their_place():
    x = torch.ones(4, device=FIRST)
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned() and not torch.empty(4).is_pinned()
    with second.host_waits() as waits:
        y = x * 2 + x.sum()
        pinned.copy_(y, non_blocking=True)
        y.copy_(pinned, non_blocking=True)
        y.to(OTHER)
    assert waits == []
    for wait in (
        lambda: float(x.sum()),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: torch.equal(x, x),
        lambda: x.cpu(),
        lambda: torch.empty(4).copy_(x, non_blocking=True),  # to pageable memory
        lambda: x.copy_(pinned),
        lambda: torch.get_device_module(FIRST).current_stream(FIRST).synchronize(),
        lambda: x.bool().any().__bool__(),
    ):
        with second.host_waits() as waits:
            wait()
        assert waits and all("test_device.py" in stack[-1].filename for _, stack in waits)


def test_streams_and_events():
    gpu = torch.get_device_module(FIRST)
    stream = gpu.Stream(OTHER)
    with gpu.stream(stream):
        assert gpu.current_stream(OTHER) == stream and gpu.current_device() == 1
    assert gpu.current_stream(OTHER) != stream and gpu.current_device() == 0
    event = stream.record_event()
    gpu.current_stream(FIRST).wait_event(event)
    torch.ones(3, device=OTHER).record_stream(stream)


def test_copies_in_a_thread_touch_no_other_device(monkeypatch):
    """Where a stream is made current, a GPU gets a context, and memory for it."""
    current, real = set(), torch.accelerator.set_stream

    def noted(stream):
        current.add(stream.device)
        real(stream)

    monkeypatch.setattr(torch.accelerator, "set_stream", noted)
    there, home = [torch.ones(3, device=OTHER)], torch.zeros(3)

    def copies():
        assert torch.equal(next(transfer.ahead([torch.ones(3)], OTHER)).cpu(), torch.ones(3))
        with transfer.CopiesHome(OTHER) as results:
            results.write(home, there[0])
        return transfer.copied_home({"x": there[0]})()

    (found,) = transfer.background_thread("test").submit(copies).result().values()
    assert torch.equal(found, home) and torch.equal(home, torch.ones(3))
    assert current == {OTHER}


@pytest.fixture
def graph():
    gpu = torch.get_device_module(FIRST)

    def capture(step, device=FIRST, **options):
        captured = gpu.CUDAGraph()
        with gpu.device(device), gpu.graph(captured, **options):
            return step(), captured.replay

    return capture


def test_a_graph_launches_again_what_it_captured(graph):
    stream = torch.Stream(FIRST)
    x = torch.ones(3, device=FIRST)
    result, replay = graph(lambda: x.mul_(2) + torch.tensor([1.0, 2.0]).sum(), stream=stream)
    assert x.tolist() == [1, 1, 1]  # a capture changes nothing
    replay()
    x.add_(1)
    replay()
    assert x.tolist() == [6, 6, 6] and result.tolist() == [9, 9, 9]


def test_a_graph_on_the_stream_of_another_device_is_empty(graph, monkeypatch):
    """As torch.cuda.graph without `stream`, whose own stream lies on the first device."""
    monkeypatch.setattr(second.graph, "_own_stream", torch.Stream(FIRST))
    x = torch.ones(3, device=OTHER)
    _, replay = graph(lambda: x.mul_(2), device=OTHER)
    replay()
    assert x.tolist() == [2, 2, 2]  # launched while it should have been captured, and never again


def test_a_failed_capture_leaves_its_stream_current(graph):
    stream, gpu = torch.Stream(FIRST), torch.get_device_module(FIRST)
    before = gpu.current_stream(FIRST)
    try:
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph(lambda: float(torch.ones(3, device=FIRST).sum()), stream=stream)
        assert gpu.current_stream(FIRST) == stream
    finally:
        torch.accelerator.set_stream(before)
