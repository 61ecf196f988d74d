"""The device `second` (device.py) in the place of a GPU, built once and loaded by the first test.

The tests here run in a process of their own, which tests/machine/test_second_device.py starts: a device stays
registered as long as its process lives, and torch's autograd and compiler then expect it in every other test.
Hence nothing outside these tests imports `device`: the import alone gives the device its name in torch.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from compiled import compiled
from torch.utils.cpp_extension import include_paths, library_paths

from drot.machine import devices

HERE = Path(__file__).resolve().parent
#: set by tests/machine/test_second_device.py
OWN_PROCESS = "DROT_SECOND_DEVICE"
collect_ignore_glob = [] if os.environ.get(OWN_PROCESS) else ["test_*.py"]


@functools.cache
def load_device() -> None:
    import device as second

    folders = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
    links = ["-ltorch_cpu", "-lc10", *(f"-Wl,-rpath,{path}" for path in library_paths())]
    # one translation unit: each would spend most of its seconds on torch's headers
    together = [part for name in ("kernels.cpp", "graphs.cpp") for part in ("-include", str(HERE / name))]
    flags = ("-O1", "-shared", "-fPIC", *folders, *together, *links)
    second.load(compiled("runtime", *flags, folders=(HERE,)))


@pytest.fixture(autouse=True)
def second_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """drot takes the test device for a GPU that it was built for."""
    import device as second

    load_device()
    monkeypatch.setattr(devices, "GPU_TYPES", (second.NAME,))
    monkeypatch.setattr(devices, "kernel_problem", lambda capability, built: None)
    with second.available():
        yield
