"""The charts of a report: what they draw."""

import pytest
from made_manifests import made_agreement, made_evaluation, made_manifest

from drot.config import Recipe
from drot.reporting.charts import charts_of, perplexity_charts
from drot.reporting.runs import Run, measurements

pytest.importorskip("matplotlib", reason="a chart needs matplotlib")


def run(layers=1, name="run", mode="layer", **changes) -> Run:
    recipe = Recipe().replace(mode=mode, steps=20)
    return Run(name, made_manifest(recipe, layers=layers, **changes), {})


def chart(report, name):
    return next((each for each in charts_of(report) if each.name == name), None)


def axis_of(drawn):
    (axis,) = drawn.figure.axes
    return axis


@pytest.mark.parametrize("layers", [1, 30])
def test_a_training_is_a_line_for_each_layer(layers):
    report = run(layers)
    for index, layer in enumerate(report.manifest.layers):
        end = 0.2 + 0.02 * index
        layer.rotation.loss_curve = [1 - (1 - end) * step / 20 for step in range(21)]
    drawn = chart(report, "training")
    lines = axis_of(drawn).lines
    assert [line.get_ydata()[-1] for line in lines] == pytest.approx([0.2 + 0.02 * i for i in range(layers)])
    assert len({line.get_color() for line in lines}) == layers
    assert ("to 20% of its start in layer 0, where it falls most" in drawn.caption) == (layers > 1)


def test_a_comparison_begins_with_perplexities():
    def evaluated(name, mode, value):
        entry = made_evaluation({"text": value}, agreement={"text": made_agreement(5.0)})
        return run(name=name, mode=mode, evaluations=[entry])

    runs = [evaluated("plain", "none", 7.0), evaluated("rotated", "layer", 5.5), run(name="not measured")]
    (drawn,) = perplexity_charts(runs, [measurements(each, runs) for each in runs])
    axis = axis_of(drawn)
    assert [label.get_text() for label in axis.get_yticklabels()] == ["dense", "plain", "rotated"]
    assert [text.get_text().strip() for text in axis.texts] == ["5.000", "7.000", "5.500"]
    assert drawn.caption == "The lowest perplexity of the pruned models is 5.500, of rotated."
