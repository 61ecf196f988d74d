"""The peak memory of each step of a run."""

import torch

from drot.pipeline.events import MemoryWatch, StepBegan, StepEnded


def test_phases_that_overlap_keep_their_peaks(monkeypatch):
    """The peak that torch counts is set back for a new phase, and the phase that still runs keeps its own."""
    peak = {"now": 10}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: peak["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda gpu: peak.update(now=1))
    memory = MemoryWatch(torch.device("cuda:0"))
    peak["now"] = 50  # before the first phase
    memory(StepBegan(step="rotate"))
    peak["now"] = 30
    memory(StepBegan(step="calibrate"))
    peak["now"] = 7
    memory(StepEnded(step="calibrate"))
    memory(StepEnded(step="rotate"))
    assert {phase: peaks["gpu"] for phase, peaks in memory.peaks.items()} == {"rotate": 30, "calibrate": 7}
    assert memory.peaks["rotate"]["process"] > 1 << 20
