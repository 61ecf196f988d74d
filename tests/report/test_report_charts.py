"""The charts of a report: what they draw for a few layers and for many, and where lines coincide."""

import itertools

import pytest
from made_manifests import made_agreement, made_evaluation, made_manifest

from drot.config import Recipe
from drot.reporting.charts import MOST_LINES, charts_of, perplexity_charts
from drot.reporting.evaluations import measurements
from drot.reporting.reading import Run

pytest.importorskip("matplotlib", reason="a chart needs matplotlib")


def run(layers=1, name="run", mode="layer", **changes) -> Run:
    recipe = Recipe().replace(mode=mode, steps=20)
    return Run(name, made_manifest(recipe, layers=layers, **changes), {})


def chart(report, name):
    return next((each for each in charts_of(report) if each.name == name), None)


def axis_of(drawn):
    (axis,) = drawn.figure.axes
    return axis


@pytest.mark.parametrize(("layers", "lines"), [(MOST_LINES, MOST_LINES), (30, 3)])
def test_many_layers_are_a_band(layers, lines):
    report = run(layers)
    for index, layer in enumerate(report.manifest.layers):
        end = 0.2 + 0.02 * index
        layer.rotation.loss_curve = [1 - (1 - end) * step / 20 for step in range(21)]
    drawn = chart(report, "training")
    axis = axis_of(drawn)
    assert len(axis.lines) == lines  # of a band: the median, the best layer and the worst
    assert len(axis.collections) == (2 if layers > MOST_LINES else 0)
    assert ("bands" in drawn.caption) == (layers > MOST_LINES)
    assert f"to 20% of its start in layer 0, where it falls most, and to {0.2 + 0.02 * (layers - 1):.0%}" in (
        drawn.caption
    )
    if layers > MOST_LINES:
        assert list(axis.lines[0].get_ydata())[-1] == pytest.approx(0.49)  # the median of 0.2 … 0.78
        assert [text.get_text() for text in axis.texts] == ["0", "29"]


def test_a_training_that_ended_keeps_its_loss_in_the_band():
    report = run(30)
    report.manifest.layers[0].rotation.loss_curve = [1.0, 0.9, 0.05]
    axis = axis_of(chart(report, "training"))
    lowest = axis.collections[0].get_paths()[0].vertices[:, 1].min()
    assert lowest == pytest.approx(0.05)
    assert list(axis.lines[0].get_xdata()) == list(range(21))


def test_lines_that_coincide_are_both_seen():
    """One shot and as written are the same without a solver: the lower line is wider, and dashes differ."""
    report = run(3)
    for layer in report.manifest.layers:
        layer.linears["q_proj"].output_error = layer.linears["q_proj"].one_shot.after.output_error
    lines = axis_of(chart(report, "output-error")).lines
    assert list(lines[1].get_ydata()) == list(lines[2].get_ydata())
    widths = [line.get_linewidth() for line in lines]
    assert all(below >= above + 1 for below, above in itertools.pairwise(widths))
    assert lines[1].get_linestyle() != lines[2].get_linestyle()


def test_equal_peaks_of_memory_are_a_sentence_and_no_chart():
    peaks = {phase: {"process": 2**30} for phase in ("load", "rotate", "save")}
    order = {"load": 1.0, "rotate": 6.0, "save": 1.0, "total": 10.0}
    assert chart(run(peak_memory=peaks, seconds=order), "memory") is None
    rising = {"save": {"process": 2**32}, "rotate": {"process": 2**31}, "load": {"process": 2**30}}
    drawn = chart(run(peak_memory=rising, seconds=order), "memory")
    names = [label.get_text() for label in axis_of(drawn).get_yticklabels()]
    assert names == ["load", "rotate", "save"]  # in the order of time


def test_a_comparison_begins_with_perplexities():
    def evaluated(name, mode, value):
        entry = made_evaluation({"text": value}, agreement={"text": made_agreement(5.0)})
        return run(name=name, mode=mode, evaluations=[entry])

    runs = [evaluated("plain", "none", 7.0), evaluated("rotated", "layer", 5.5), run(name="not measured")]
    (drawn,) = perplexity_charts(runs, [measurements(each, runs) for each in runs])
    axis = axis_of(drawn)
    labels = {label.get_text(): label.get_fontweight() for label in axis.get_yticklabels()}
    assert labels == {"dense": "normal", "plain": "normal", "rotated": "bold"}
    assert {text.get_text().strip(): text.get_fontweight() for text in axis.texts} == {
        "5.000": "normal", "7.000": "normal", "5.500": "bold",
    }  # fmt: skip
    assert drawn.caption == "The lowest perplexity of the pruned models is 5.500, of rotated."
