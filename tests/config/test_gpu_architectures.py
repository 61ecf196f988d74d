"""Whether a GPU runs the kernels of a build, and the line that says what to rebuild."""

import logging

import pytest
import torch
from torch._subclasses import FakeTensorMode, fake_tensor

import drot
from drot.core.errors import UserError
from drot.machine import devices
from drot.machine.devices import kernel_problem, pick_device
from drot.reporting.demo import MODEL
from drot.sparse.linear import SparseLinear

DEFAULT = "8.0 9.0 10.0 12.0+PTX"


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        *(
            ((major, minor), DEFAULT, True)
            for major, minor in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 1)]
        ),
        ((7, 5), DEFAULT, False),
        ((11, 0), DEFAULT, False),
        ((13, 0), DEFAULT, True),  # compiled from PTX
        ((8, 0), "8.6", False),
        ((9, 0), "9.0a", True),
        ((9, 1), "9.0a", False),
        ((10, 0), "9.0a+PTX", False),
        ((10, 0), "9.0+PTX", True),
        ((10, 3), "10.0f", True),
        ((12, 0), "10.0f", False),
        ((8, 0), "", False),
    ],
)
def test_which_gpus_run_a_build(capability, built, runs):
    assert (kernel_problem(capability, built) is None) == runs


def test_no_build_runs_a_gpu_before_8_0():
    line = "has kernels only for GPUs of 8.0 and later"
    without = "`DROT_WITH_CUDA=0 pip install --no-build-isolation .` builds it without them"
    assert kernel_problem((7, 5), DEFAULT) == f"{line}: {without}"
    assert kernel_problem((6, 1), "") == line


def gpu(monkeypatch, capability, built, cuda="13.0", count=1, current=0):
    """Makes torch find GPUs of this capability, and drot built for the architectures `built`."""
    devices.check_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(devices, "BUILD_INFO", {"cuda": cuda, "cuda_architectures": built})


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_a_gpu_without_kernels_is_refused_in_one_line(monkeypatch, name):
    gpu(monkeypatch, (11, 0), DEFAULT)
    line = (
        "A GPU has compute capability 11.0, but drot was built for 8.0, 9.0, 10.0, 12.0+PTX: rebuild it with "
        '`TORCH_CUDA_ARCH_LIST=11.0 pip install --no-build-isolation .`; or use `device="cpu"`'
    )
    with pytest.raises(UserError) as raised:
        pick_device(name)
    assert str(raised.value) == line
    assert pick_device("cpu") == torch.device("cpu")
    gpu(monkeypatch, (9, 0), DEFAULT)
    assert pick_device(name).type == "cuda"


def test_a_device_is_named_as_tensors_name_theirs(monkeypatch):
    """torch.device("cuda") is not equal to the device of a tensor on it, and neither is cpu:0."""
    gpu(monkeypatch, (9, 0), DEFAULT, count=2, current=1)
    second = torch.device("cuda:1")
    assert [pick_device(name) for name in ("auto", "cuda", torch.device("cuda"))] == [second] * 3
    assert [pick_device(name) for name in ("cpu", "cpu:0")] == [torch.empty(0).device] * 2


def test_a_packed_weight_on_a_gpu_without_kernels_is_refused_in_one_line(monkeypatch):
    """Its compressed form is the first op that runs there when transformers loads a packed checkpoint."""
    gpu(monkeypatch, (11, 0), DEFAULT)
    compress = "drot.sparse.linear.sparse24_compress"
    monkeypatch.setattr(compress, lambda values, positions: positions.new_empty(9))
    # torch would first make a tensor on the GPU, which is not there
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
    with FakeTensorMode():
        values = torch.empty(8, 16, dtype=torch.bfloat16, device="cuda")
        linear = SparseLinear(values, torch.empty(8, 4, dtype=torch.uint8, device="cuda"))
        with pytest.raises(UserError, match="^A GPU has compute capability 11.0, but drot was built for 8.0"):
            linear.compress()
        assert linear.compressed is None
        gpu(monkeypatch, (9, 0), "", cuda="")
        with pytest.raises(UserError, match="but drot was built without CUDA"):
            linear.compress()
        gpu(monkeypatch, (9, 0), DEFAULT)
        linear.compress()
        assert linear.compressed is not None


def test_a_build_without_cuda_prunes_on_no_gpu(monkeypatch, caplog):
    """The first op would end in torch's NotImplementedError, in the middle of a run."""
    gpu(monkeypatch, (9, 0), "", cuda="")
    with pytest.raises(
        UserError, match='^A GPU has .* built without CUDA: rebuild it .*; or use `device="cpu"`'
    ):
        drot.prune(MODEL, drot.Recipe())
    assert not caplog.records


def test_a_build_without_cuda_warns_once(monkeypatch, caplog):
    gpu(monkeypatch, (9, 0), "", cuda="")
    with caplog.at_level(logging.WARNING, "drot"):
        assert [pick_device("cuda").type for _ in range(2)] == ["cuda", "cuda"]
    assert [record.getMessage() for record in caplog.records] == [
        "A GPU has compute capability 9.0, but drot was built without CUDA: rebuild it with "
        "`TORCH_CUDA_ARCH_LIST=9.0 pip install --no-build-isolation .`"
    ]


def test_ops_run_on_the_gpus_of_the_build_alone(monkeypatch):
    """On others a dense model with R3 takes torch's functions."""
    monkeypatch.setitem(devices.BUILD_INFO, "cuda", "13.0")
    monkeypatch.setitem(devices.BUILD_INFO, "cuda_architectures", "9.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9 - device.index, 0))
    devices._has_kernels.cache_clear()
    try:
        assert [devices.has_kernels(torch.device("cuda", index)) for index in (0, 1)] == [True, False]
        assert devices.has_kernels(torch.device("cpu"))
    finally:
        devices._has_kernels.cache_clear()
