"""--progress: events as JSON, and no other value than its own."""

import json
import logging
import math
from pathlib import Path

import pytest
from command_output import one_line

from drot.cli import app as cli
from drot.core.errors import UserError
from drot.core.events import ProgressEvent
from drot.pipeline import prune as pipeline


@pytest.fixture
def runs(monkeypatch):
    """Replaces the pipeline of `drot prune` by a function that reports, warns and fails."""

    def prune(model, recipe, *, progress, **options):
        progress(ProgressEvent(phase="prune", layer=0, layers=2))
        progress(ProgressEvent(phase="rotate", layer=1, layers=2, step=0, steps=2, loss=1.0))
        progress(ProgressEvent(phase="rotate", layer=1, layers=2, step=1, steps=2, loss=0.75))
        progress(ProgressEvent(phase="rotate", layer=1, layers=2, step=2, steps=2, loss=math.inf))
        logging.getLogger("drot").warning("a warning of %s", "drot")
        raise UserError("`lr` must be lower")

    monkeypatch.setattr(pipeline, "prune", prune)


def prune(*options):
    assert cli.run(["prune", "m", "--out", "o", *options]) == 2


def test_progress_as_json_is_one_object_a_line(runs, capsys):
    prune("--progress", "json")
    *events, error = capsys.readouterr().err.splitlines()
    assert error == "drot: --lr must be lower"
    found = [json.loads(line, parse_constant=pytest.fail) for line in events]
    assert all(0 <= event.pop("seconds") < 60 for event in found)
    first = {"phase": "prune", "layer": 0, "layers": 2, "step": 0, "steps": 0, "loss": None, "name": ""}
    # step 1 of the training comes too soon after the line before
    last = {"phase": "rotate", "layer": 1, "layers": 2, "step": 2, "steps": 2, "loss": None, "name": ""}
    assert found == [first, last]


@pytest.mark.parametrize(
    ("options", "problem"),
    [(["--progress", "xml"], "--progress must be one of auto, json, none")],
)
def test_wrong_values_are_refused_before_the_run(options, problem, capsys):
    prune(*options)
    assert problem in one_line(capsys.readouterr().err)


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """Replaces the measurement of `drot eval` by figures of two texts, a.txt and b.txt."""
    monkeypatch.chdir(tmp_path)
    for text in ("a.txt", "b.txt"):
        Path(text).touch()
    shown = {"tokens": 1, "windows": 1, "sha256": "0", "split": None}

    def evaluate(models, *, ppl, **options):
        one = {"seqlen": 8, "dtype": "float32", "machine": "cpu", "streamed": False, "against": None}
        rest = {"agreement": {}, "tasks": {}, "task_details": {}, "averages": {}}
        texts = dict.fromkeys(ppl, shown)
        perplexities = {text: 10.0 + 5 * index for index, text in enumerate(ppl)}
        return [{"model": m, "texts": texts, "perplexity": perplexities, **one, **rest} for m in models]

    monkeypatch.setattr("drot.evaluation.evaluate.evaluate", evaluate)


@pytest.mark.parametrize(("bound", "status"), [("10.0", 0), ("9.5", 1)])
def test_fail_above_compares_the_first_text_after_the_figures(figures, capsys, bound, status):
    arguments = ["eval", "m", "--ppl", "a.txt", "--ppl", "b.txt", "--fail-above", bound]
    assert cli.run(arguments) == status
    told = capsys.readouterr()
    assert "perplexity on b.txt" in told.out and "15.000" in told.out
    assert told.err == status * "drot: the perplexity on a.txt is above 9.5: 10.000 of m\n"


@pytest.mark.parametrize("options", [["--fail-above", "nan"], ["--fail-above", "9", "--tasks", "piqa"]])
def test_a_bound_without_meaning_is_refused(figures, options, capsys):
    assert cli.run(["eval", "m", *options]) == 2
    assert "--fail-above" in one_line(capsys.readouterr().err)
