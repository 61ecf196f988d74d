"""Fixtures that every test shares."""

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch

# torch.compile keeps what it compiled for the processor that it saw; another one, or one whose instructions
# were lowered by ATEN_CPU_CAPABILITY, must not meet it
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(tempfile.gettempdir(), f"drot-tests-inductor-{torch.backends.cpu.get_cpu_capability()}"),
)


def devices() -> list[str]:
    """Every test of an op runs on each of these."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def measurements_apart(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's own file of measurements is neither read nor written."""
    monkeypatch.setenv("DROT_CACHE", str(tmp_path_factory.getbasetemp() / "drot-cache"))


@pytest.fixture(autouse=True)
def no_compiled_code_left() -> Iterator[None]:
    """A process may compile one function a few times only; each test has that number for itself."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
