"""The clock of a run: seconds by phase, in the manifest and in threads."""

import threading
import time

import pytest
import torch
from small_models import random_tokens, small_model

import drot
from drot.config import Recipe, resolve
from drot.core.events import silent
from drot.pipeline.context import RunContext

TOKENS = random_tokens(6, 32)


def recipe():
    return Recipe().with_quality("fast").replace(steps=4)


def test_the_manifest_says_where_the_time_went(tmp_path):
    started = time.perf_counter()
    manifest = drot.prune(
        small_model("llama"), recipe(), calibration=TOKENS, device="cpu", out=tmp_path / "out"
    ).manifest
    passed = time.perf_counter() - started
    seconds = manifest["seconds"]
    phases = sum(value for phase, value in seconds.items() if phase != "total")
    assert 0.7 * passed < phases <= seconds["total"] <= passed
    assert all(
        seconds[phase] > 0 for phase in ("load", "check", "calibrate", "rotate", "merge", "prune", "save")
    )
    assert "total" in drot.prune(small_model("llama"), recipe(), calibration=TOKENS).manifest["seconds"]


def test_a_phase_of_several_threads_counts_its_time_once():
    run = RunContext(small_model("llama"), resolve(recipe()), TOKENS, [torch.device("cpu")], silent)
    both = threading.Barrier(2)

    def sleep_in_phase(seconds):
        with run.clock("rotate"):
            both.wait()
            time.sleep(seconds)

    threads = [threading.Thread(target=sleep_in_phase, args=[seconds]) for seconds in (0.2, 0.4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.4 <= run.seconds["rotate"] < 0.59
    with pytest.raises(ValueError), run.clock("rotate"):
        raise ValueError
    assert not run._running
