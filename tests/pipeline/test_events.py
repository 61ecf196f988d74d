"""The events of a run: their order, and what the clock and the progress reports make of them."""

from time import process_time

import pytest
import torch
from runs import TOKENS, one_shot, prune, recipe
from small_models import small_model

from drot.checkpoint.resume import RunState
from drot.config import resolve
from drot.core.events import ProgressEvent, silent
from drot.machine.ranks import ALONE
from drot.pipeline import events
from drot.pipeline.context import RunContext
from drot.pipeline.events import Advanced, Announced, ProgressReports, StepBegan, StepEnded, Stopwatch
from drot.pipeline.run import PruningRun
from drot.pipeline.shared_state import SharedState

CPU = torch.device("cpu")


def began(step, layer=None):
    return StepBegan(step=step, layer=layer)


def ended(step, layer=None):
    return StepEnded(step=step, layer=layer)


# ---- the clock ---------------------------------------------------------------------------------------


@pytest.fixture
def at(monkeypatch):
    """Sends an event to a clock at a time."""
    now = [0.0]
    monkeypatch.setattr(events.time, "perf_counter", lambda: now[0])

    def send(clock, time, event):
        now[0] = time
        clock(event)

    return send


def test_the_seconds_of_a_step_add_up(at):
    clock = Stopwatch(CPU)
    for start, stop in ((1, 3), (10, 10.5)):
        at(clock, start, began("prune", 0))
        at(clock, start + 0.1, Advanced(step="prune", done=1, total=2, loss=0.0))
        at(clock, stop, ended("prune", 0))
    assert clock.seconds["prune"] == 2.5
    assert sum(clock.seconds.values()) == 2.5 and list(clock.seconds) == list(events.STEPS)


def test_a_step_inside_of_another_counts_for_both(at):
    clock = Stopwatch(CPU)
    for moment, event in (
        (0, began("calibrate")),
        (1, began("save")),
        (3, ended("save")),
        (4, ended("calibrate")),
    ):
        at(clock, moment, event)
    assert (clock.seconds["calibrate"], clock.seconds["save"]) == (4, 2)


# ---- progress ----------------------------------------------------------------------------------------


def test_announced_steps_and_advances_are_reported():
    seen: list[ProgressEvent] = []
    report = ProgressReports(seen.append, 3)
    for event in (
        Announced(step="calibrate"),
        began("calibrate"),
        began("merge", 1),
        Announced(step="prune", layer=1),
        began("prune", 1),
        ended("prune", 1),
        Advanced(step="rotate", layer=2, done=10, total=50, loss=0.5),
    ):
        report(event)
    assert seen == [
        ProgressEvent(phase="calibrate", layer=0, layers=0),
        ProgressEvent(phase="prune", layer=1, layers=3),
        ProgressEvent(phase="rotate", layer=2, layers=3, step=10, steps=50, loss=0.5),
    ]


# ---- a run -------------------------------------------------------------------------------------------


def listened(chosen):
    """The context of a run, and the list of what a listener hears of it."""
    context = RunContext(small_model("llama"), resolve(chosen, down_width=48), TOKENS, CPU, silent)
    heard = []
    context.listeners.append(heard.append)
    return context, heard


def events_of(chosen, out):
    """What a listener hears of a run whose finished layers are saved."""
    context, heard = listened(chosen)
    PruningRun(context).execute(SharedState(ALONE, out, lambda: RunState(out, {})))
    return heard


def check_balance(heard):
    """Every step ends before its run does, and the step that began last ends first."""
    open_steps = []
    for event in heard:
        if isinstance(event, StepBegan):
            open_steps.append((event.step, event.layer))
        elif isinstance(event, StepEnded):
            assert open_steps.pop() == (event.step, event.layer)
        elif isinstance(event, Advanced):
            assert open_steps[-1] == (event.step, event.layer)
    assert not open_steps


@pytest.mark.parametrize(
    ("chosen", "before", "steps"),
    [
        (
            recipe(target="self"),
            ["check", "calibrate"],
            "calibrate rotate check merge prune calibrate merge save save",
        ),
        (
            recipe(recover="block", recover_epochs=1),
            ["check", "calibrate"],
            "calibrate rotate check merge prune recover calibrate merge save save",
        ),
        (recipe("none"), ["check", "calibrate"], "prune calibrate save save"),
        (
            recipe("shared", target="self"),
            ["calibrate 0", "calibrate 1", "calibrate 2", "rotate", "check", "calibrate"],
            "merge prune calibrate merge save save",
        ),
    ],
    ids=["layer", "recover", "none", "shared"],
)
def test_the_steps_of_a_run(chosen, before, steps, tmp_path):
    """The advance to the next layer is part of `calibrate`, and the way back to its basis part of `merge`.

    A layer is brought into its saved form first, and then written.
    """
    heard = events_of(chosen, tmp_path / "out")
    check_balance(heard)
    found = [e.step if e.layer is None else f"{e.step} {e.layer}" for e in heard if isinstance(e, StepBegan)]
    if chosen.rotation.mode != "none":  # without rotations there is no solver, and no weights of tokens
        weigh = ["weigh", "weigh 0", "weigh 1", "weigh 2", "weigh", "weigh 2", "weigh 1", "weigh 0", "weigh"]
        start = found.index("weigh")
        assert found[start : start + 9] == weigh
        del found[start : start + 9]
    assert found == before + [f"{step} {layer}" for layer in range(3) for step in steps.split()]


def test_the_losses_of_the_training_are_heard(tmp_path):
    heard = [e for e in events_of(recipe(steps=10), tmp_path / "out") if isinstance(e, Advanced)]
    assert {(event.step, event.layer, event.total) for event in heard} == {
        ("rotate", i, 10) for i in range(3)
    }
    assert [event.done for event in heard if event.layer == 1] == [0, 10]


def test_a_step_that_fails_ends(tmp_path):
    context, heard = listened(recipe("none"))
    with pytest.raises(MemoryError), context.during("prune", context.model.layers[1]):
        raise MemoryError
    assert heard == [began("prune", 1), ended("prune", 1)]


def test_the_manifest_says_where_the_time_went(tmp_path, monkeypatch):
    monkeypatch.setattr(events.time, "perf_counter", process_time)  # to which other programs add nothing
    started = process_time()
    seconds = prune(chosen=one_shot(), out=tmp_path / "out").manifest.seconds
    passed = process_time() - started
    assert 0.7 * passed < sum(seconds.phases.values()) <= seconds.total <= passed
    assert {step for step, value in seconds.phases.items() if value > 0} == set(events.STEPS) - {
        "distill",
        "recover",
        "weigh",
    }
