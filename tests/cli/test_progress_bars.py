"""The progress bar, and the progress lines without a terminal."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from drot.cli import progress_bars
from drot.core.events import PHASES, ProgressEvent


def training(layer, layers, losses, steps=None):
    """The events of one training, of its beginning if `steps` is greater than the number of losses - 1."""
    steps = len(losses) - 1 if steps is None else steps
    return [
        ProgressEvent(phase="rotate", layer=layer, layers=layers, step=step, steps=steps, loss=loss)
        for step, loss in enumerate(losses)
    ]


def event(phase, layer=0, layers=2):
    return ProgressEvent(phase=phase, layer=layer, layers=layers)


def positions(events):
    """Words of each bar → its completed share, after each event."""
    with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as bars:
        progress = progress_bars.BarProgress(bars)
        found = []
        for event in events:
            progress(event)
            found.append({task.description: task.completed / task.total for task in bars.tasks})
    return found


def test_phases_that_go_through_the_layers_have_a_bar_each():
    events = [event("calibrate", 1, 4), *training(1, 4, [1.0, 0.5], steps=4), event("prune", 1, 4)]
    *_, before, last = positions([ProgressEvent(phase="evaluate", step=1, steps=4), *events])
    assert before == {
        "layer 1 (2 of 4): calibrating": 0.25,
        "layer 1 (2 of 4): rotating, step 1 of 4, loss 0.5": 1.25 / 4,
    }
    assert last == before | {"layer 1 (2 of 4): pruning": 0.25}


def test_a_shared_rotation_has_a_bar_of_its_steps():
    events = [event("calibrate", 3, 4), *training(0, 0, [4.0, 3.0], steps=10), event("prune", 0, 4)]
    assert positions(events)[2]["rotating, step 1 of 10, loss 3"] == 0.1


def lines(events):
    file = io.StringIO()
    progress = progress_bars.LineProgress(Console(file=file))
    for one in events:
        progress(one)
    return [line.rpartition(" (")[0] for line in file.getvalue().splitlines()]


def test_a_training_has_a_line_at_its_end():
    """In whichever order the layers are trained."""
    events = []
    for layer in range(2):
        events += [event("calibrate", layer), *training(layer, 2, [4.0 - layer, 3.0, 2.0 - layer])]
    events += [event("prune", 0), event("prune", 1)]
    events += [ProgressEvent(phase="evaluate", step=step, steps=2) for step in (1, 2)]
    assert lines(events) == [
        "layer 0 (1 of 2): rotating, step 2 of 2, loss 2",
        "layer 1 (2 of 2): rotating, step 2 of 2, loss 1",
        "layer 0 (1 of 2): pruning",
        "layer 1 (2 of 2): pruning",
        "evaluating, window 2 of 2",
    ]
    assert lines(training(0, 0, [4.0, 3.0])) == ["rotating, step 1 of 1, loss 3"]  # one R1 for all layers


def test_reading_a_text_and_loading_a_model_are_shown():
    events = [ProgressEvent(phase="read"), ProgressEvent(phase="tokenize", steps=31_540_000)]
    events += [ProgressEvent(phase="load"), ProgressEvent(phase="save")]
    assert lines(events) == [
        "reading the text",
        "tokenising the text (31.5 million characters)",
        "loading the model",
        "saving the model",
    ]
    streamed = [ProgressEvent(phase="read", step=step, steps=4_000_000) for step in (0, 1_000_000, 3_000_000)]
    assert [list(bars.values()) for bars in positions(streamed)] == [[0], [0.25], [0.75]]
    assert lines(streamed)[1:] == [f"reading the text ({n}.0 million characters)" for n in (1, 3)]


def test_a_bar_whose_end_is_not_known_has_no_total():
    with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as bars:
        progress = progress_bars.BarProgress(bars)
        progress(event("prune"))
        progress(ProgressEvent(phase="tokenize", steps=1000))
        (task,) = bars.tasks
        assert task.total is None and task.description == "tokenising the text (1000 characters)"


def test_a_bar_starts_again_for_another_evaluation():
    events = [ProgressEvent(phase="evaluate", step=step, steps=4) for step in (2, 4, 1, 4)]
    assert [list(bars.values()) for bars in positions(events)] == [[0.5], [1], [0.25], [1]]


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_words(phase):
    doing = PHASES[phase].doing
    (layers,), (steps,) = ([event(phase, 1)], [ProgressEvent(phase=phase, step=3, steps=4, loss=0.25)])
    assert (f"layer 1 (2 of 2): {doing}" in progress_bars.words(layers)) == PHASES[phase].layers
    counted = PHASES[phase].unit not in ("", "character")
    assert (f"{doing}, {PHASES[phase].unit} 3 of 4" in progress_bars.words(steps)) == counted


def test_a_long_evaluation_is_not_silent(monkeypatch):
    clock = iter(range(0, 1000, 4))  # each line and each look at the clock takes 4 s
    monkeypatch.setattr(progress_bars.time, "perf_counter", lambda: float(next(clock)))
    shown = lines([ProgressEvent(phase="evaluate", step=step, steps=8) for step in range(1, 9)])
    assert shown == ["evaluating, window 3 of 8", "evaluating, window 6 of 8", "evaluating, window 8 of 8"]


def test_a_long_fine_tuning_has_few_lines(monkeypatch):
    """An hour with a step a second: the silence grows with the time."""
    clock = iter(range(10000))
    monkeypatch.setattr(progress_bars.time, "perf_counter", lambda: float(next(clock)))
    events = [ProgressEvent(phase="finetune", step=i, steps=3600, loss=4 - i / 3600) for i in range(1, 3601)]
    shown = lines(events)
    assert 20 < len(shown) < 60 and shown[-1] == "fine-tuning, step 3600 of 3600, loss 3"
    assert shown[0].startswith("fine-tuning, step 10 of 3600")
