"""The steps of a run: their order, their seconds, and what the caller hears of them."""

from time import process_time

import pytest
import torch
from runs import TOKENS, one_shot, prune, recipe
from small_models import small_model

from drot.checkpoint.resume import RunState
from drot.config import resolve
from drot.core.events import ProgressEvent, silent
from drot.pipeline import watch
from drot.pipeline.context import RunContext
from drot.pipeline.run import PruningRun
from drot.pipeline.watch import Watch

CPU = torch.device("cpu")


# ---- seconds -----------------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch):
    """The time that a watch reads, in its only entry."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now[0])
    return now


def test_the_seconds_of_a_step_add_up(now):
    found = Watch(CPU)
    for now[0], stop in ((1, 3), (10, 10.5)):
        with found.during("prune"):
            now[0] = stop
    assert found.seconds["prune"] == 2.5
    assert sum(found.seconds.values()) == 2.5 and list(found.seconds) == list(watch.STEPS)


def test_a_step_inside_of_another_counts_for_both(now):
    found = Watch(CPU)
    with found.during("calibrate"):
        now[0] = 1
        with found.during("save"):
            now[0] = 3
        now[0] = 4
    assert (found.seconds["calibrate"], found.seconds["save"]) == (4, 2)


def test_a_step_that_fails_ends():
    context = context_of(recipe("none"))
    with pytest.raises(MemoryError), context.during("prune", context.model.layers[1]):
        raise MemoryError
    assert context.watch.seconds["prune"] > 0 and context.watch.peaks.keys() == {"prune"}


# ---- progress ----------------------------------------------------------------------------------------


def test_announced_steps_and_advances_are_reported():
    seen: list[ProgressEvent] = []
    context = context_of(recipe("none"), seen.append)
    with context.during("calibrate", announced=True), context.during("merge", context.model.layers[1]):
        pass
    with context.during("prune", context.model.layers[1], announced=True):
        pass
    context.report("rotate", 2, done=10, total=50, loss=0.5)
    assert seen == [
        ProgressEvent(phase="calibrate", layer=0, layers=0),
        ProgressEvent(phase="prune", layer=1, layers=3),
        ProgressEvent(phase="rotate", layer=2, layers=3, step=10, steps=50, loss=0.5),
    ]


# ---- a run -------------------------------------------------------------------------------------------


def context_of(chosen, progress=silent):
    return RunContext(small_model("llama"), resolve(chosen, down_width=48), TOKENS, CPU, progress)


def steps_of(context, out):
    """The steps of a run whose finished layers are saved, each with the number of its layer if it has one."""
    found, during = [], context.during

    def note(step, layer=None, **options):
        found.append(step if layer is None else f"{step} {layer.index}")
        return during(step, layer, **options)

    context.during = note
    PruningRun(context).execute(RunState(out, {}))
    return found


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
            "check merge prune calibrate merge save save",
        ),
    ],
    ids=["layer", "recover", "none", "shared"],
)
def test_the_steps_of_a_run(chosen, before, steps, tmp_path):
    """The advance to the next layer is part of `calibrate`, and the way back to its basis part of `merge`.

    A layer is brought into its saved form first, and then written.
    """
    found = steps_of(context_of(chosen), tmp_path / "out")
    if chosen.rotation.mode != "none":  # without rotations there is no solver, and no weights of tokens
        weigh = ["weigh", "weigh 0", "weigh 1", "weigh 2", "weigh", "weigh 2", "weigh 1", "weigh 0", "weigh"]
        assert found[:9] == weigh and found.pop() == "check"  # at the end of the logits
        del found[:9]
    assert found == before + [f"{step} {layer}" for layer in range(3) for step in steps.split()]


def test_the_losses_of_the_training_are_heard(tmp_path):
    heard = []
    steps_of(context_of(recipe(steps=10), heard.append), tmp_path / "out")
    heard = [event for event in heard if event.loss is not None]
    assert {(event.phase, event.layer, event.steps) for event in heard} == {
        ("rotate", i, 10) for i in range(3)
    }
    assert [event.step for event in heard if event.layer == 1] == [0, 10]


def test_the_manifest_says_where_the_time_went(tmp_path, monkeypatch):
    monkeypatch.setattr(watch.time, "perf_counter", process_time)  # to which other programs add nothing
    started = process_time()
    seconds = prune(chosen=one_shot(), out=tmp_path / "out").manifest.seconds
    passed = process_time() - started
    assert 0.7 * passed < sum(seconds.phases.values()) <= seconds.total <= passed
    assert {step for step, value in seconds.phases.items() if value > 0} == set(watch.STEPS) - {
        "distill",
        "recover",
        "weigh",
    }
