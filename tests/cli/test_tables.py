"""The progress bar, the progress lines without a terminal, and the table of a manifest."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from drot.cli import progress_bars, tables
from drot.config import Recipe, RotationConfig, resolve
from drot.core.events import ProgressEvent


def training(layer, layers, losses, steps=None):
    """The events of one training. It stops early if `steps` is greater than the number of losses - 1."""
    steps = len(losses) - 1 if steps is None else steps
    return [
        ProgressEvent(phase="rotate", layer=layer, layers=layers, step=step, steps=steps, loss=loss)
        for step, loss in enumerate(losses)
    ]


def event(phase, layer=0, layers=2):
    return ProgressEvent(phase=phase, layer=layer, layers=layers)


def positions(events, shared=False):
    """The completed share of the bar after each event."""
    with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as bars:
        progress = progress_bars.BarProgress(bars, shared=shared)
        shares = []
        for event in events:
            progress(event)
            task = bars.tasks[0]
            shares.append(task.completed / task.total)
    return shares


def test_bar_moves_forward_within_a_pass():
    events = []
    for layer in range(2):
        where = dict(layer=layer, layers=2)
        events.append(ProgressEvent(phase="calibrate", **where))
        events += [ProgressEvent(phase="rotate", step=i, steps=4, loss=1.0, **where) for i in range(5)]
        events.append(ProgressEvent(phase="prune", **where))
    shares = positions(events)
    assert shares == sorted(shares)
    assert shares[5] == pytest.approx(0.45) and shares[6] == shares[5] and shares[7] == 0.5


def test_bar_starts_again_for_the_next_pass():
    """A shared rotation: calibrate all layers, train once, prune all layers."""
    events = [ProgressEvent(phase="calibrate", layer=i, layers=4) for i in range(4)]
    events += [ProgressEvent(phase="rotate", layers=4, step=i, steps=10) for i in (1, 10)]
    events += [ProgressEvent(phase="prune", layer=i, layers=4) for i in range(4)]
    assert positions(events, shared=True) == [0, 0.25, 0.5, 0.75, 0.1, 1.0, 0, 0.25, 0.5, 0.75]


def test_bar_does_not_start_again_for_layers_side_by_side():
    """The end of layer 0 comes when layer 2 is being calibrated."""
    events = [event("calibrate", i, 4) for i in range(3)] + training(0, 4, [1.0])
    assert positions(events) == [0, 0.25, 0.5, 0.5]


def test_the_time_left_is_not_known_at_first_and_at_the_end():
    clock = iter(range(1000))
    column = progress_bars.TimeLeftColumn()
    shown = []
    with Progress(console=Console(file=io.StringIO()), get_time=lambda: float(next(clock))) as bars:
        progress = progress_bars.BarProgress(bars)
        shown.append(column.render(bars.tasks[0]).plain)
        for step in range(1, 5):
            progress(ProgressEvent(phase="evaluate", step=step, steps=4))
            shown.append(column.render(bars.tasks[0]).plain)
    assert shown[:2] == ["-", "-"] and shown[-1] == "-"
    assert all(left.startswith("0:00:") and left > "0:00:00" for left in shown[2:-1])


def lines(events, **options):
    file = io.StringIO()
    progress = progress_bars.LineProgress(Console(file=file), **options)
    for one in events:
        progress(one)
    progress.close()
    return [line.rpartition(" (")[0] for line in file.getvalue().splitlines()]


def test_lines_of_one_layer_after_the_other():
    events = []
    for layer in range(2):
        events += [event("calibrate", layer), *training(layer, 2, [4.0 - layer, 3.0, 2.0 - layer])]
        events.append(event("prune", layer))
    events += [ProgressEvent(phase="evaluate", step=step, steps=2) for step in (1, 2)]
    assert lines(events) == [
        "layer 0 (1 of 2): rotated, loss 4 -> 2 in 2 steps",
        "layer 0 (1 of 2): pruning",
        "layer 1 (2 of 2): rotated, loss 3 -> 1 in 2 steps",
        "layer 1 (2 of 2): pruning",
        "evaluated 2 windows",
    ]


def test_lines_of_dense_hessians():
    """All layers are trained before the first is pruned, and a training may stop before its last step."""
    events = []
    for layer in range(2):
        events += [event("calibrate", layer), *training(layer, 2, [4.0, 3.0 - layer], steps=9)]
    events += [event("prune", 0), event("prune", 1)]
    assert lines(events, label="entropy") == [
        "layer 0 (1 of 2): rotated, entropy 4 -> 3 in 1 step",
        "layer 1 (2 of 2): rotated, entropy 4 -> 2 in 1 step",
        "layer 0 (1 of 2): pruning",
        "layer 1 (2 of 2): pruning",
    ]


def test_lines_of_layers_in_parallel():
    """Each training has one line, printed when it ends."""
    events = [event("calibrate", 0), event("calibrate", 1)]
    events += [training(layer, 2, [5.0, 3.0 - layer])[-1] for layer in (1, 0)]
    assert lines(events) == [
        "layer 1 (2 of 2): rotated, loss 2 in 1 step",
        "layer 0 (1 of 2): rotated, loss 3 in 1 step",
    ]


def test_lines_of_a_shared_rotation():
    """There is one training for all layers, and its line names no layer."""
    events = [event("calibrate", 0), event("calibrate", 1), *training(0, 2, [4.0, 3.0], steps=5)]
    assert lines([*events, event("prune", 0)], shared=True) == [
        "all layers: rotated, loss 4 -> 3 in 1 step",
        "layer 0 (1 of 2): pruning",
    ]
    assert lines(events, shared=True) == ["all layers: rotated, loss 4 -> 3 in 1 step"]


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
    assert positions(streamed) == [0, 0.25, 0.75]
    assert lines(streamed)[1:] == [f"reading the text ({n}.0 million characters)" for n in (1, 3)]


def test_a_bar_whose_end_is_not_known_has_no_total():
    with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as bars:
        progress = progress_bars.BarProgress(bars)
        progress(event("prune"))
        progress(ProgressEvent(phase="tokenize", steps=1000))
        assert bars.tasks[0].total is None and bars.tasks[0].description == "tokenising"
        assert len(bars.tasks) == 1


def test_a_new_bar_says_at_once_what_it_is_of(monkeypatch):
    with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as bars:
        progress = progress_bars.BarProgress(bars)
        shown = []
        add = bars.add_task
        monkeypatch.setattr(
            bars, "add_task", lambda words, **options: (shown.append(words), add(words, **options))[1]
        )
        progress(ProgressEvent(phase="evaluate", step=1, steps=4))
    assert shown == ["evaluating"]


@pytest.mark.parametrize(
    ("phase", "done"), [("stream", "streamed"), ("export", "exported"), ("apply", "made again")]
)
def test_layers_are_named_as_in_every_other_line(phase, done):
    assert lines([event(phase, 0), event(phase, 1)]) == [
        f"layer 0 (1 of 2): {done}",
        f"layer 1 (2 of 2): {done}",
    ]


def test_a_long_evaluation_is_not_silent(monkeypatch):
    clock = iter(range(0, 1000, 4))  # each line and each look at the clock takes 4 s
    monkeypatch.setattr(progress_bars.time, "perf_counter", lambda: float(next(clock)))
    shown = lines([ProgressEvent(phase="evaluate", step=step, steps=8) for step in range(1, 9)])
    assert shown[-1] == "evaluated 8 windows"
    assert shown[:-1] == ["evaluated 3 of 8 windows", "evaluated 6 of 8 windows"]


def test_short_texts_are_counted_in_characters():
    shown = lines([ProgressEvent(phase="tokenize", steps=steps) for steps in (20_123, 120_000)])
    assert shown == [
        "tokenising the text (20123 characters)",
        "tokenising the text (0.1 million characters)",
    ]


def test_a_fine_tuning_has_a_line_for_each_tenth():
    events = [ProgressEvent(phase="finetune", step=i, steps=40, loss=4 - i / 40) for i in range(1, 41)]
    shown = lines([ProgressEvent(phase="evaluate", step=3, steps=3), *events])
    assert shown[:2] == ["evaluated 3 windows", "fine-tuning step 4/40, loss 3.9"]
    assert len(shown) == 11 and shown[-1] == "fine-tuning step 40/40, loss 3"
    assert lines(events[:3]) == [] and positions(events) == [step / 40 for step in range(1, 41)]


@pytest.mark.parametrize("width", [80, 100])
def test_table_of_a_shared_rotation(monkeypatch, width):
    """The table shows dense Hessians, and the figures of the only training as means over the layers."""
    file = io.StringIO()
    monkeypatch.setattr(tables, "output", lambda: Console(file=file, width=width))
    linears = {"q_proj": {"sparsity": 0.5, "output_error": 0.25, "damping": 0.01}}
    layers = [{"layer": i, "linears": linears, "seconds": 0.1, "rotation": {"damping": {}}} for i in range(2)]
    trained = dict(loss_before=800.0, loss_after=600.0, entropy_before=16021.0, entropy_after=14180.0)
    manifest = {
        "recipe": resolve(Recipe(rotation=RotationConfig(mode="shared"))).to_dict(),
        "calibration": {"shape": [2, 8]},
        "sparsity": 0.5,
        "relative_logit_error": 1e-6,
        "stock_architecture": True,
        "dtype": "float32",
        "device": "cpu",
        "seconds": {"total": 2.0},
        "shared_rotation": trained | {"loss_curve": [800.0, 700.0, 600.0], "seconds": 1.0},
        "layers": layers,
    }
    tables.print_manifest(manifest)
    text = file.getvalue()
    assert "dense Hessians" in " ".join(text.split())
    assert "shared training  2 steps, loss 400 -> 300, entropy 16021 -> 14180 a layer" in text
    assert max(map(len, text.splitlines())) <= width
    manifest["recipe"]["rotation"]["objective"] = "entropy"
    file.truncate(0)
    tables.print_manifest(manifest)
    assert "2 steps, entropy 16021 -> 14180 a layer" in file.getvalue()


def timed(peaks, work):
    """A manifest with the entries about time."""
    seconds = {"load": 1.0, "rotate": 6.0, "recover": 0.0, "total": 8.0}
    return {"seconds": seconds, "work": work, "peaks": peaks}


def rows_of(table):
    cells = [list(column.cells) for column in table.columns]
    return [list(row) for row in zip(*cells, strict=True)]


def test_table_of_the_time_against_the_peak_of_the_machine():
    """6e12 operations in fp32 take 2 s at the peak, 4e12 in bf16 take 1 s: half of the 6 s that they took."""
    peaks = {"float32": 3e12, "bfloat16": 4e12, "copy": 1e10}
    work = {"rotate": {"float32": 6e12, "bfloat16": 4e12}, "load": {"bytes": 5e8}}
    table = tables.times_table(timed(peaks, work))
    assert [column.header for column in table.columns] == ["phase", "seconds", "share", "rate", "of peak"]
    assert rows_of(table) == [
        ["rotate", "6.0", "75.0%", "1.67 TFLOP/s", "50.0%"],
        ["load", "1.0", "12.5%", "500 MB/s", "5.0%"],
        ["other", "1.0", "12.5%", "-", "-"],
        ["total", "8.0", "100.0%", "-", "-"],
    ]
    assert table.caption is None
    # float16 has the peak of bfloat16; fp64 has none
    assert rows_of(tables.times_table(timed(peaks, {"rotate": {"float16": 6e12}})))[0][-1] == "25.0%"
    assert rows_of(tables.times_table(timed(peaks, {"rotate": {"float64": 6e12}})))[0][-1] == "-"


def test_table_of_the_time_without_a_measured_peak():
    table = tables.times_table(timed(None, {"rotate": {"float32": 6e9}}))
    assert rows_of(table)[0] == ["rotate", "6.0", "75.0%", "1 GFLOP/s"]
    assert "drot info --measure" in table.caption
    older = {"seconds": {"total": 2.0}}
    assert tables.times_table(older) is None


@pytest.mark.parametrize("work", [{}, {"float32": 0.0}, {"float32": 1.0, "bfloat16": -1.0}])
def test_work_without_operations_has_no_rate_or_the_rate_0(work):
    """A manifest that was edited, found by the fuzz test."""
    assert tables.rate_text(work, 2.0) in ("-", "0 B/s")
