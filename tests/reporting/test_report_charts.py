"""The charts of a report: what they draw."""

import pytest
from made_manifests import made_manifest

from drot.config import Recipe
from drot.reporting.charts import charts_of
from drot.reporting.runs import Run

pytest.importorskip("matplotlib", reason="a chart needs matplotlib")


def run(layers=1, name="run", mode="layer", **changes) -> Run:
    recipe = Recipe().replace(mode=mode, steps=20)
    return Run(name, made_manifest(recipe, layers=layers, **changes), {})


def chart(report, title):
    return next(each for each in charts_of(report) if axis_of(each).get_title() == title)


def axis_of(drawn):
    return drawn.figure.axes[0]


@pytest.mark.parametrize("layers", [1, 30])
def test_a_training_is_a_line_for_each_layer(layers):
    report = run(layers)
    for index, layer in enumerate(report.manifest.layers):
        end = 0.2 + 0.02 * index
        layer.rotation.loss_curve = [1 - (1 - end) * step / 20 for step in range(21)]
    drawn = chart(report, "Loss as a share of the start")
    lines = axis_of(drawn).lines
    assert [line.get_ydata()[-1] for line in lines] == pytest.approx([0.2 + 0.02 * i for i in range(layers)])
    assert len({line.get_color() for line in lines}) == layers
    assert ("to 20% of its start in layer 0, where it falls most" in drawn.caption) == (layers > 1)
