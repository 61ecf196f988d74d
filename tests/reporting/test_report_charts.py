"""The charts of a report: what they draw."""

import numpy as np
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


def shares(report) -> None:
    """Gives every linear of every layer an importance that the mask removes, twice as much before."""
    for layer in report.manifest.layers:
        for linear in layer.linears.values():
            linear.one_shot.before.removed_importance = 0.2
            linear.one_shot.after.removed_importance = 0.1


def test_a_layer_without_figures_is_a_gap_in_the_grid():
    report = run(layers=5)
    shares(report)
    for linear in report.manifest.layers[2].linears.values():
        linear.sparsity = 0.0
    image = axis_of(chart(report, "Pruned importance, % of not rotated")).images[0]
    values = np.ma.filled(image.get_array(), np.nan)
    assert values.shape[1] == 5 and tuple(image.get_extent()[:2]) == (-0.5, 4.5)
    assert np.isnan(values[:, 2]).all() and values[:, [0, 1, 3, 4]] == pytest.approx(0.5)


def test_the_linears_of_experts_are_a_row():
    report = run(layers=2)
    shares(report)
    for layer in report.manifest.layers:
        linear = next(iter(layer.linears.values()))
        layer.linears |= {f"experts.{i}.down_proj": linear.model_copy(deep=True) for i in range(64)}
        layer.linears["experts.3.down_proj"].one_shot.after.removed_importance = 0.2
    drawn = chart(report, "Pruned importance, % of not rotated")
    labels = [label.get_text() for label in axis_of(drawn).get_yticklabels()]
    values = axis_of(drawn).images[0].get_array()
    assert labels.count("experts.*.down") == 1 and "A cell of experts is their mean." in drawn.caption
    assert values[labels.index("experts.*.down")].tolist() == pytest.approx(2 * [(63 * 0.5 + 1) / 64])


def test_a_layer_that_is_kept_whole_has_no_entropy():
    report = run(layers=3)
    report.manifest.layers[1].rotation.entropy_before = 0.0
    assert list(report.rotations) == [0, 2]


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
