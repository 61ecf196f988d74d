"""The tasks `own`: questions made from a text, and the model's choices."""

import json
import sys

import pytest
import torch
from small_models import random_text, random_tokens, save_small_model, small_model

import drot
from drot.checkpoint.load import load_tokenizer
from drot.checkpoint.manifest import read_manifest
from drot.cli import app as cli
from drot.config import CalibrationConfig, Recipe
from drot.core.errors import UserError
from drot.evaluation.choices import ANSWER, CHOICES, CONTEXT, LENGTH, NEAR, SHORTEST, questions, score
from drot.evaluation.evaluate import evaluate
from drot.evaluation.perplexity import load_eval_tokens
from drot.evaluation.predictions import Predictions, predict
from drot.reporting.demo import HELD_OUT, MODEL

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("length", [SHORTEST, 300, 5000])
def test_one_answer_follows_and_three_lie_near_by(length):
    tokens = torch.randperm(length)  # each token occurs once, so its place is known
    found = questions(tokens, 200)
    assert len(found) == min(200, length - LENGTH + 1)
    places = tokens.argsort()[found]  # [questions, CHOICES, LENGTH]
    assert (places.diff(dim=2)[:, :, : CONTEXT - 1] == 1).all() and (places[:, 0].diff(dim=1) == 1).all()
    assert (places[:, :, :CONTEXT] == places[:, :1, :CONTEXT]).all()
    answers = places[:, :, CONTEXT:]
    assert (answers.diff(dim=2) == 1).all()
    right, wrong = answers[:, :1, 0], answers[:, 1:, 0]
    assert ((wrong - right).abs() <= NEAR).all()
    assert ((wrong >= right + ANSWER) | (wrong + ANSWER <= right - CONTEXT)).all()
    assert all(len(set(row)) == CHOICES - 1 for row in wrong.tolist())
    assert torch.equal(questions(tokens, 200), found) and len(found[:, 0, 0].unique()) == len(found)


@pytest.mark.parametrize("tokens", [torch.arange(SHORTEST - 1), torch.zeros(500, dtype=torch.long)])
def test_a_text_without_questions_is_refused(tokens):
    with pytest.raises(UserError, match="the tasks `own` need a text"):
        questions(tokens)


def test_the_choice_is_the_most_probable_answer():
    """Against the probabilities of each answer's tokens one after the other, in fp64."""
    model, tokens = small_model("llama"), random_tokens(1, 800, seed=3)[0]
    asked = questions(tokens, 30)
    right = 0
    with torch.no_grad():
        reference = model.double()
        for answers in asked:
            likelihoods = []
            for row in answers:
                total = 0.0
                for place in range(CONTEXT, LENGTH):
                    logits = reference(row[None, :place]).logits[0, -1]
                    total += float(logits.log_softmax(-1)[row[place]])
                likelihoods.append(total)
            right += likelihoods[0] == max(likelihoods)
    found = score(predict(small_model("llama"), asked.flatten(), LENGTH))
    assert found.accuracy == pytest.approx(right / 30)
    assert found.stderr == pytest.approx((found.accuracy * (1 - found.accuracy) / 30) ** 0.5)


def test_a_model_that_knows_nothing_chooses_no_right_answer():
    asked = questions(random_tokens(1, 300)[0], 20).flatten(0, 1)
    same = Predictions(asked, 96, lambda batch: torch.zeros(*asked[batch].shape, 96), torch.device("cpu"))
    assert score(same).accuracy == 0


def test_the_dense_model_knows_more_than_a_pruned_one():
    tokens = load_eval_tokens(str(HELD_OUT), load_tokenizer(MODEL))
    asked = questions(tokens, 30).flatten()
    model = drot.load(MODEL, device="cpu", dtype="float32")
    dense = score(predict(model, asked, LENGTH)).accuracy
    for name, weight in model.named_parameters():
        if "proj" in name:
            weight.data[weight.abs() < weight.abs().float().quantile(0.9)] = 0  # by magnitude
    assert dense > score(predict(model, asked, LENGTH)).accuracy + 0.2 and dense > 0.6


def test_without_lm_eval_and_streamed(tmp_path, monkeypatch, capsys):
    """The figures are recorded, and those of a streamed model are the same."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    dense = save_small_model(small_model("llama"), tmp_path / "dense")
    text = tmp_path / "text.txt"
    text.write_text(random_text(900))
    recipe = Recipe(calibration=CalibrationConfig(seqlen=16)).replace(steps=3, down_rotation=16)
    drot.prune(dense, recipe, out=tmp_path / "out", calibration=random_tokens(8, 16), device="cpu")
    options = ["--ppl", str(text), "--tasks", "own", "--limit", "40", "--device", "cpu", "--json"]
    figures = []
    for more in ([], ["--stream"]):
        assert cli.run(["eval", str(tmp_path / "out"), *options, *more]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0]["tasks"] == figures[1]["tasks"] and list(figures[0]["tasks"]) == [f"own:{text}"]
    evaluate([tmp_path / "out"], ppl=[text], tasks=["own"], device="cpu")
    *_, entry = read_manifest(tmp_path / "out").evaluations
    assert "lm_eval" not in entry.versions and entry.task_details[f"own:{text}"].metric == "acc"
    assert cli.run(["eval", str(tmp_path / "out"), "--ppl", str(text), "--tasks", "own", "--no-record"]) == 0
    assert "own" in capsys.readouterr().out
    with pytest.raises(UserError, match="the tasks `own` are made from a text, got none: name one as `ppl`"):
        evaluate([tmp_path / "out"], tasks=["own"])
