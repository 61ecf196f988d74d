"""The rules for what is unusual, and what was lost and won back, on manifests made for each case."""

import copy
import re

import pytest

from drot.config import DAMPING, Recipe, resolve
from drot.report.evaluations import measurements, tasks
from drot.report.notes import RULES_IN_WORDS, summary, unusual
from drot.report.reading import Run
from drot.report.tables import lost_table


def run(name="run", mode="layer", **changes) -> Run:
    """A run of six layers in which nothing is unusual."""
    recipe = resolve(Recipe()).to_dict()
    recipe["rotation"] |= {"mode": mode, "steps": 20}
    linear = {
        "sparsity": 0.5,
        "output_error": 0.01,
        "damping": recipe["pruning"]["damping"],
        "one_shot": {
            "before": {"removed_importance": 0.12, "output_error": 0.05},
            "after": {"removed_importance": 0.03, "output_error": 0.02},
        },
    }
    curve = [1.0 - 0.1 * min(step, 8) for step in range(21)]
    trained = {"loss_curve": curve, "best_step": 20, "damping": {"attention": DAMPING}}
    layers = [
        {
            "layer": index,
            "linears": {role: copy.deepcopy(linear) for role in ("q_proj", "down_proj")},
            "rotation": copy.deepcopy(trained),
            "recovery": {"best_epoch": 3, "error_before": 0.2, "error_after": 0.1},
            "seconds": 1.0,
        }
        for index in range(6)
    ]
    manifest = {
        "base_model": "model",
        "recipe": recipe,
        "layers": layers,
        "sparsity": 0.5,
        "seconds": {"total": 10.0},
        "relative_logit_error": 1e-7,
        "versions": {"drot": "0"},
    }
    return Run(name, manifest | changes, {"layers.0.q_proj.map_before": None})


def linear_of(report, layer, role="q_proj"):
    return report.layers[layer]["linears"][role]


def lose(report):
    for role in ("q_proj", "down_proj"):
        linear_of(report, 3, role)["output_error"] = 0.021


def lose_less(report):
    for role in ("q_proj", "down_proj"):
        linear_of(report, 3, role)["output_error"] = 0.019


def curve_of(report, curve):
    report.layers[2]["rotation"] |= {"loss_curve": curve, "best_step": len(curve) - 1}


#: a change of the run → what the only line on it says; None for no line
CASES = {
    "nothing": (lambda r: None, None),
    "lost": (lose, r"^Layer 3 lost much more .*0\.0210, is 2\.1 times"),
    "lost a little": (lose_less, None),
    "importance": (
        lambda r: linear_of(r, 1)["one_shot"]["after"].update(removed_importance=0.13),
        r"did not lower the pruned importance of 1 linear: layer 1 q_proj",
    ),
    "one-shot error": (
        lambda r: linear_of(r, 4, "down_proj")["one_shot"]["after"].update(output_error=0.06),
        r"raised the one-shot output error of 1 linear: layer 4 down_proj",
    ),
    "damping": (
        lambda r: linear_of(r, 0).update(damping=10 * DAMPING),
        r"from 0\.3 up to 3 for 1 Hessian: layer 0 q_proj",
    ),
    "damping of the training": (
        lambda r: r.layers[5]["rotation"].update(damping={"down": 1.0}),
        r"up to 1 for 1 Hessian: layer 5 inputs of down \(training\)",
    ),
    "still falling": (
        lambda r: curve_of(r, [1.0 - 0.02 * step for step in range(21)]),
        r"took all its 20 steps and the loss still fell in 1 training: layer 2",
    ),
    "stopped early": (lambda r: curve_of(r, [1.0 - 0.02 * step for step in range(11)]), None),
    "best early": (
        lambda r: r.layers[2]["rotation"].update(best_step=9),
        r"lowest long before the last step: layer 2 \(step 9 of 20\)",
    ),
    "recovery": (
        lambda r: r.layers[1]["recovery"].update(best_epoch=0),
        r"recovery did not help 1 layer, which stayed as pruned: layer 1",
    ),
    "recovery to the end": (
        lambda r: r.layers[1]["recovery"].update(best_epoch=8),
        r"best at its last epoch in layer 1: more epochs",
    ),
    "zeros": (
        lambda r: linear_of(r, 0).update(sparsity=0.6),
        r"more zeros than 2:4 .*layer 0 q_proj \(60\.0%\)",
    ),
    "invariance": (
        lambda r: r.manifest.update(relative_logit_error=5e-5),
        r"differs from the original by 5\.0e-05",
    ),
    "resumed": (lambda r: r.manifest["seconds"].update(total=3.0), r"was interrupted and continued"),
    "fine-tuning": (
        lambda r: r.manifest.update(
            finetune=[{"held_out": {"perplexity_before": 10.0, "perplexity_after": 11.0}}]
        ),
        r"Fine-tuning raised the perplexity on held-out text from 10\.000 to 11\.000",
    ),
    "old": (lambda r: r.figures.clear(), r"has no drot-figures\.npz"),
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


def test_every_rule_is_in_words():
    applied = [case for case, (_, line) in CASES.items() if line]
    assert len(RULES_IN_WORDS) == len(applied) - 2 + 1  # two rules have two cases, one needs an evaluation


def evaluation(perplexity, dense=None, **more):
    entry = {
        "seqlen": 512,
        "texts": {"text": {"sha256": "0"}},
        "perplexity": {"text": perplexity},
        "agreement": {},
        "tasks": {},
    }
    if dense is not None:
        entry["agreement"] = {
            "text": {"dense_perplexity": dense, "equal_tokens": 0.9, "kl": {"mean": 0.05, "p99": 0.5}}
        }
    return entry | more


def test_the_share_won_back_by_a_baseline():
    report = run(evaluations=[evaluation(12.0, 10.0, baselines={"not_rotated": {"text": 18.0}})])
    (entry,) = measurements(report, [report])
    assert (entry.dense, entry.unrotated) == (10.0, 18.0) and entry.share == pytest.approx(0.75)
    text = " ".join(summary(report, [entry]))
    assert "is 12.000, +2.000 against the dense model's 10.000; pruned without" in text
    assert "the model has 18.000, and 75% of that gap is closed." in text
    table = lost_table(report, [entry])
    assert table.rows[0][1:] == ["10.000", "18.000", "12.000", "75%"]
    assert table.rows[1][1:4] == ["100.0%", "–", "90.0%"]


def test_the_share_won_back_by_another_run():
    rotated = run(evaluations=[evaluation(12.0)])
    plain = run("plain", "none", evaluations=[evaluation(18.0, 10.0)])
    other_text = run("other", "none", evaluations=[evaluation(9.0, texts={"text": {"sha256": "1"}})])
    other_model = run("foreign", "none", base_model="other", evaluations=[evaluation(9.0, 1.0)])
    (entry,) = measurements(rotated, [rotated, other_text, other_model, plain])
    assert (entry.dense, entry.unrotated, entry.unrotated_name) == (10.0, 18.0, "plain")
    (alone,) = measurements(rotated, [rotated])
    assert alone.share is None and alone.dense is None
    (own,) = measurements(plain, [rotated, plain])
    assert own.unrotated is None  # it is not compared with itself


def test_worse_than_without_the_rotation():
    report = run(evaluations=[evaluation(19.0, 10.0, baselines={"not_rotated": {"text": 18.0}})])
    assert unusual(report, measurements(report, [report])) == [
        "On text, the perplexity is worse than without the rotation."
    ]


def test_the_latest_evaluation_counts_and_one_with_agreement_first():
    report = run(
        evaluations=[evaluation(12.0, 10.0), evaluation(13.0), evaluation(None, tasks={"piqa": 0.5})]
    )
    (entry,) = measurements(report, [report])
    assert entry.perplexity == 12.0
    assert tasks(report) == {"piqa": 0.5}
    (entry,) = measurements(run(evaluations=[evaluation(None)]), [])
    assert summary(run(), [entry])[-1] == "The perplexity on text (windows of 512) is not finite."
