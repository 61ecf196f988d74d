"""The peak memory of each step of a run."""

from unittest.mock import Mock

import torch

from drot.pipeline.watch import Watch


def test_phases_that_overlap_keep_their_peaks(monkeypatch):
    """The peak that torch counts is set back for a new phase, and the phase that still runs keeps its own."""
    peak = {"now": 10}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: peak["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda gpu: peak.update(now=1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: Mock())
    watch = Watch(torch.device("cuda:0"))
    peak["now"] = 50  # before the first phase
    with watch.during("rotate"):
        peak["now"] = 30
        with watch.during("calibrate"):
            peak["now"] = 7
    assert {phase: peaks["gpu"] for phase, peaks in watch.peaks.items()} == {"rotate": 30, "calibrate": 7}
    assert watch.peaks["rotate"]["process"] > 1 << 20
