"""The rules for what is unusual, and what was lost, on manifests made for each case."""

import re

import numpy as np
import pytest
from made_manifests import made_agreement, made_evaluation, made_manifest

from drot.checkpoint.importance import HISTOGRAM_BINS
from drot.config import Recipe, resolve
from drot.reporting.notes import summary, unusual, verdict
from drot.reporting.runs import Run, measurements, tasks
from drot.reporting.tables import lost_table, run_tables


def run(name="run", mode="layer", **changes) -> Run:
    """A run of six layers in which nothing is unusual."""
    recipe = Recipe().replace(mode=mode, steps=20, recover="block", distill_epochs=3)
    manifest = made_manifest(recipe, layers=6, roles=("q_proj", "down_proj"), **changes)
    maps = {
        "layers.0.q_proj.map_before": np.ones((2, 2), np.float16),
        "layers.0.q_proj.histogram_before": np.ones((2, HISTOGRAM_BINS), np.int64),
    }
    return Run(name, manifest, maps)


def linear_of(report, layer, role="q_proj"):
    return report.manifest.layers[layer].linears[role]


def lose(report, error):
    for role in ("q_proj", "down_proj"):
        linear_of(report, 3, role).output_error = error


def curve_of(report, curve):
    trained = report.manifest.layers[2].rotation
    trained.loss_curve, trained.best_step = curve, len(curve) - 1


#: a change of the run → what the only line on it says; None for no line
CASES = {
    "nothing": (lambda r: None, None),
    "lost": (lambda r: lose(r, 0.021), r"^Layer 3 lost much more .*0\.0210, is 2\.1 times"),
    "lost a little": (lambda r: lose(r, 0.019), None),
    "importance": (
        lambda r: setattr(linear_of(r, 1).one_shot.after, "removed_importance", 0.13),
        r"did not lower the pruned importance of 1 linear: layer 1 q_proj",
    ),
    "damping": (
        lambda r: setattr(linear_of(r, 0), "damping", 10 * resolve(Recipe()).pruning.damping),
        r"from 0\.3 up to 3 for 1 Hessian: layer 0 q_proj",
    ),
    "damping of the training": (
        lambda r: setattr(r.manifest.layers[5].rotation, "damping", {"down": 1.0}),
        r"up to 1 for 1 Hessian: layer 5 inputs of down \(training\)",
    ),
    "still falling": (
        lambda r: curve_of(r, [1.0 - 0.02 * step for step in range(21)]),
        r"took all its 20 steps and the loss still fell in 1 training: layer 2",
    ),
    "stopped early": (lambda r: curve_of(r, [1.0 - 0.02 * step for step in range(11)]), None),
    "recovery": (
        lambda r: setattr(r.manifest.layers[1].recovery, "best_epoch", 0),
        r"recovery did not help 1 layer, which stayed as pruned: layer 1",
    ),
    "layers not trained together": (
        lambda r: setattr(r.manifest.distillation, "left_out", "that takes about 9 GB, and 8 GB are free"),
        r"layers were not trained together, because that takes about 9 GB",
    ),
    "a training of all layers that did not help": (
        lambda r: setattr(r.manifest.distillation, "trained", False),
        r"training of all layers together did not help, and the weights stayed as they were pruned",
    ),
    "recovery to the end": (
        lambda r: setattr(r.manifest.layers[1].recovery, "best_epoch", 8),
        r"best at its last epoch in layer 1: more epochs",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rules(case):
    change, line = CASES[case]
    report = run()
    change(report)
    lines = unusual(report, [])
    if line is None:
        assert lines == []
    else:
        (found,) = lines
        assert re.search(line, found)


def evaluation(perplexity, dense=None, not_rotated=None, **more):
    """An evaluation on one text, with a perplexity of the dense model from the agreement with it."""
    agreement = {} if dense is None else {"text": made_agreement(dense)}
    if not_rotated is not None:
        more["baselines"] = {"dense": {}, "not_rotated": {"text": not_rotated}}
    return made_evaluation({"text": perplexity}, agreement=agreement, **more)


def test_the_gap_closed_by_a_baseline():
    report = run(evaluations=[evaluation(12.0, 10.0, not_rotated=18.0)])
    (entry,) = measurements(report)
    assert (entry.dense, entry.unrotated) == (10.0, 18.0) and entry.share == pytest.approx(0.75)
    text = " ".join(summary(report, [entry]))
    assert "is 12.000, +2.000 against the dense model's 10.000; pruned by the method alone" in text
    assert "the model has 18.000, and the run closes 75% of the gap." in text
    table = lost_table(report, [entry])
    assert table.cells[0][1:] == ["10.000", "18.000", "12.000", "75%"]
    assert table.cells[1][1:4] == ["100.0%", "-", "90.0%"]


def test_worse_than_without_the_rotation():
    report = run(evaluations=[evaluation(10.9, 10.0, not_rotated=10.8)])
    assert unusual(report, measurements(report)) == [
        "On text, the perplexity is worse than by the method alone."
    ]


def lines_on(*entries, **changes):
    report = run(evaluations=list(entries), **changes)
    measured = measurements(report)
    lines = unusual(report, measured)
    return lines, verdict(report, measured, lines)


def test_better_than_dense():
    (line,), words = lines_on(evaluation(9.5, 10.0))
    assert words == "Look at:"
    assert "better than the dense one, 9.500 against 10.000" in line and "Measure on another text" in line


def test_a_large_rise_of_the_perplexity():
    """12.7 to 17 is a third; the recipe of `run` has a recovery already."""
    (line,), _ = lines_on(evaluation(17.0, 12.7))
    assert "rose by 34%, from 12.700 to 17.000" in line
    assert "a milder --sparsity, drot finetune, and calibration text" in line and "--quality" not in line
    assert lines_on(evaluation(13.9, 12.7))[0] == []  # 9 %


def test_the_verdict_needs_a_comparison_with_the_dense_model():
    assert lines_on(evaluation(10.5, 10.0)) == ([], "Nothing is unusual.")
    for entries in ((), (evaluation(10.5),)):
        lines, words = lines_on(*entries)
        assert lines == [] and "drot eval run --against someone/some-model." in words
        assert words.endswith("Nothing is unusual.")
    words = verdict(run(), [], ["a line that is unusual"])
    assert words.startswith("No evaluation compares") and words.endswith("Look at:")


@pytest.mark.parametrize("base_model", ["/home/me/models/some-model", "some-model", ""])
def test_a_command_does_not_shorten_the_folder_of_the_dense_model(base_model):
    """The shortened name is no folder where the command is run."""
    assert "measure one with drot eval run --against ORIGINAL." in lines_on(base_model=base_model)[1]


def test_the_latest_evaluation_counts_and_one_with_agreement_first():
    report = run(
        evaluations=[evaluation(12.0, 10.0), evaluation(13.0), evaluation(None, tasks={"piqa": 0.5})]
    )
    (entry,) = measurements(report)
    assert entry.perplexity == 12.0
    assert tasks(report) == {"piqa": 0.5}
    (entry,) = measurements(run(evaluations=[evaluation(None)]))
    assert summary(run(), [entry])[-2:] == [
        "The perplexity on text (windows of 512) is not finite.",
        "The run took 10 s and at most 1.0 GiB of memory.",
    ]


def test_a_page_names_files_without_their_folders():
    """A page is passed on, and the folders of a machine are nobody's business."""
    text = "/home/me/texts/held-out.txt"
    entry = made_evaluation({text: 12.0}, agreement={text: made_agreement(10.0)}, against="/home/me/dense")
    report = run(evaluations=[entry], base_model="/home/me/models/some-model")
    source = "/home/me/texts/calibration.txt"
    report.manifest.recipe = resolve(report.manifest.recipe.replace(source=source))
    measured = measurements(report)
    tables = [*run_tables(report), lost_table(report, measured)]
    words = [*summary(report, measured), *unusual(report, measured), *(table.caption for table in tables)]
    words += [cell for table in tables for row in table.cells for cell in row]
    assert not [each for each in words if "/home/me" in each]
    for name in ("held-out.txt", "calibration.txt", "some-model"):
        assert any(name in each for each in words), name
