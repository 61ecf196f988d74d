"""Fixtures for all tests."""

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, settings

# torch.compile caches code for the instruction set that torch reports; a run with another one, as with
# ATEN_CPU_CAPABILITY, needs a cache of its own
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(tempfile.gettempdir(), f"drot-tests-inductor-{torch.backends.cpu.get_cpu_capability()}"),
)

# Property tests draw the same few examples each time, and show a failing example as it was drawn, since a
# search for a smaller one takes minutes. A search for new faults, by hand:
# HYPOTHESIS_PROFILE=long pytest tests -k properties
settings.register_profile(
    "short",
    max_examples=6,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.register_profile("long", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
# Since 6.131 hypothesis draws constants from the code of the local modules that are imported, and the tests
# before in a process import some: what one run draws, the next need not draw. No setting turns this off.
if settings.default.derandomize:
    with contextlib.suppress(ImportError):
        from hypothesis.internal.conjecture import providers

        if hasattr(providers, "_get_local_constants"):
            providers._get_local_constants = lambda: providers._local_constants  # none


def devices() -> list[str]:
    """The devices on which every test with the fixture `device` runs."""
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_collection_finish() -> None:
    """The garbage collector leaves what the imports made, a million objects, out of its later passes."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_tuning_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor write the tuning cache of the user."""
    monkeypatch.setenv("DROT_CACHE", str(tmp_path_factory.getbasetemp() / "drot-cache"))


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run waits for the disk some thirty times, which takes as long as the rest of a small run."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def gradients_stay_on() -> Iterator[None]:
    """A test that turned gradients off would make the tests after it fail, in its process alone."""
    yield
    on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert on, "this test left torch.is_grad_enabled() False"


@pytest.fixture(autouse=True)
def no_compiled_code_left() -> Iterator[None]:
    """torch.compile limits how often a process compiles a function; each test starts with the full limit."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
