"""--progress: events as JSON, and no other value than its own."""

import json
import logging
import math

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
    first = {"phase": "prune", "layer": 0, "layers": 2, "step": 0, "steps": 0, "loss": None}
    # step 1 of the training comes too soon after the line before
    last = {"phase": "rotate", "layer": 1, "layers": 2, "step": 2, "steps": 2, "loss": None}
    assert found == [first, last]


def test_a_wrong_value_is_refused_before_the_run(capsys):
    prune("--progress", "xml")
    assert "--progress must be one of auto, json, none" in one_line(capsys.readouterr().err)
