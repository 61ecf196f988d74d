"""Perplexity against a reference in fp64 that adds the loss of one token at a time."""

import math

import pytest
from small_models import random_tokens, small_model

from drot.core.errors import BrokenModelError, UserError
from drot.evaluation import predictions
from drot.evaluation.perplexity import check_logits, perplexity


def one_token_at_a_time(model, tokens, seqlen):
    windows = []
    for start in range(0, len(tokens) - seqlen + 1, seqlen):
        ids = tokens[start : start + seqlen]
        log_p = model.double()(ids[None]).logits[0].log_softmax(-1)
        windows.append(-sum(float(log_p[i, ids[i + 1]]) for i in range(seqlen - 1)) / (seqlen - 1))
    return math.exp(sum(windows) / len(windows))


@pytest.mark.parametrize("windows", [1, 3, 100])
@pytest.mark.parametrize("length", [60, 67])
def test_whole_windows_count_alike(length, windows, monkeypatch):
    monkeypatch.setattr(predictions, "logits_at_once", lambda device: windows * 12 * 96)
    tokens = random_tokens(1, length)[0]
    got = perplexity(small_model("llama"), tokens, seqlen=12)
    assert got == pytest.approx(one_token_at_a_time(small_model("llama"), tokens, 12), rel=1e-5)


def test_progress_ends_at_the_last_window(monkeypatch):
    monkeypatch.setattr(predictions, "logits_at_once", lambda device: 2 * 12 * 96)
    events = []
    perplexity(small_model("llama"), random_tokens(1, 60)[0], seqlen=12, progress=events.append)
    assert [(event.step, event.steps) for event in events] == [(2, 5), (4, 5), (5, 5)]


@pytest.mark.parametrize(
    ("factor", "loss"), [(1e6, r"\d"), (math.inf, "nan"), (math.nan, "nan")], ids=["overflow", "inf", "nan"]
)
def test_a_model_without_a_finite_loss_has_no_perplexity(factor, loss):
    model = small_model("llama", tie_word_embeddings=False)
    model.lm_head.weight[0].mul_(factor)
    with pytest.raises(BrokenModelError, match=f"the model's loss on the text is {loss}.*, expected"):
        perplexity(model, random_tokens(1, 60)[0], seqlen=12)


def test_logits_that_are_not_finite_are_refused_before_tasks():
    model = small_model("llama")
    check_logits(model)
    model.model.norm.weight[3] = math.nan
    with pytest.raises(BrokenModelError, match="logits that are NaN or infinite"):
        check_logits(model)


def test_text_shorter_than_a_window():
    with pytest.raises(UserError, match="the text has 11 tokens, but one window needs 12: lower `seqlen`"):
        perplexity(small_model("llama"), random_tokens(1, 11)[0], seqlen=12)


@pytest.mark.parametrize(
    ("seqlen", "message"),
    [(0, "must be at least 2"), (1, "must be at least 2"), (129, "must be at most 128, the positions of")],
)
def test_windows_that_the_model_cannot_read(seqlen, message):
    with pytest.raises(UserError, match=message):
        perplexity(small_model("llama"), random_tokens(1, 200)[0], seqlen=seqlen)


def test_tokens_of_another_vocabulary():
    with pytest.raises(UserError, match="must be below 96, the model's vocabulary; got 99"):
        perplexity(small_model("llama"), random_tokens(1, 60, vocab=100)[0], seqlen=12)
