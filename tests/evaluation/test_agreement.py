"""Agreement of two models against an fp64 reference that visits one token at a time."""

import math

import pytest
import torch
from small_models import random_tokens, small_model

from drot.evaluation import agreement as agreement_module
from drot.evaluation import predictions as predictions_module
from drot.evaluation.agreement import agreement
from drot.evaluation.perplexity import perplexity
from drot.evaluation.predictions import predict

SEQLEN = 20


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(1, 107)[0]


def one_token_at_a_time(dense, other, tokens):
    """Lists, over the windows and their positions, of equal next tokens and of KL divergences."""
    equal, kl = [], []
    for start in range(0, len(tokens) - SEQLEN + 1, SEQLEN):
        ids = tokens[None, start : start + SEQLEN]
        p, q = (model(ids).logits[0].softmax(-1) for model in (dense, other))
        for i in range(SEQLEN):
            equal.append(int(p[i].argmax()) == int(q[i].argmax()))
            kl.append(sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p[i], q[i], strict=True)))
    return equal, kl


@pytest.mark.parametrize("at_once", [1, 96 * SEQLEN * 5, 1 << 26])
def test_against_one_token_at_a_time(tokens, monkeypatch, at_once):
    """Also where a chunk of logits is one row, and where a batch has two windows and the last has one."""
    for module in (predictions_module, agreement_module):
        monkeypatch.setattr(module, "logits_at_once", lambda device: at_once)
    dense, other = small_model("llama"), small_model("llama", seed=1)
    for a, b in zip(other.parameters(), dense.parameters(), strict=True):
        a.copy_(b + 0.2 * (a - b))  # near enough that some next tokens agree
    got = agreement(predict(dense, tokens, SEQLEN), predict(other, tokens, SEQLEN))
    equal, kl = one_token_at_a_time(dense.double(), other.double(), tokens)
    assert 0.1 < got["equal_tokens"] < 0.9
    assert got["equal_tokens"] == pytest.approx(sum(equal) / len(equal))
    ordered = sorted(kl)
    assert got["kl"]["mean"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)
    assert ordered[98] <= got["kl"]["p99"] * 1.0001 and got["kl"]["p99"] <= ordered[99] * 1.0001

    assert [part["first"] for part in got["positions"]] == [
        0,
        *(p["last"] + 1 for p in got["positions"][:-1]),
    ]
    assert len(got["positions"]) == 8 and got["positions"][-1]["last"] == SEQLEN - 1
    for part in got["positions"]:
        inside = [i for i in range(len(kl)) if part["first"] <= i % SEQLEN <= part["last"]]
        assert part["equal_tokens"] == pytest.approx(sum(equal[i] for i in inside) / len(inside))
        assert part["kl"] == pytest.approx(sum(kl[i] for i in inside) / len(inside), rel=1e-4)


def test_perplexities_are_those_of_each_model(tokens):
    dense, other = small_model("qwen2"), small_model("qwen2", seed=1)
    got = agreement(predict(dense, tokens, SEQLEN), predict(other, tokens, SEQLEN))
    expected = [perplexity(model, tokens, seqlen=SEQLEN) for model in (dense, other)]
    assert [got["dense_perplexity"], got["perplexity"]] == pytest.approx(expected, rel=1e-5)
    assert got["perplexity_difference"] == got["perplexity"] - got["dense_perplexity"]


def test_the_kl_divergence_is_that_of_the_dense_model(tokens):
    """KL(dense ‖ pruned), not KL(pruned ‖ dense)."""
    dense, other = small_model("llama"), small_model("llama", seed=1)
    forward = agreement(predict(dense, tokens, SEQLEN), predict(other, tokens, SEQLEN))["kl"]["mean"]
    backward = agreement(predict(other, tokens, SEQLEN), predict(dense, tokens, SEQLEN))["kl"]["mean"]
    _, kl = one_token_at_a_time(dense.double(), other.double(), tokens)
    assert forward == pytest.approx(sum(kl) / len(kl), rel=1e-4) and abs(forward / backward - 1) > 1e-3


def test_a_model_agrees_with_itself(tokens):
    model = small_model("mistral", dtype=torch.bfloat16)
    got = agreement(predict(model, tokens, SEQLEN), predict(model, tokens, SEQLEN))
    assert got["equal_tokens"] == 1 and got["kl"] == {"mean": 0, "p99": 0}


def test_windows_shorter_than_the_ranges():
    tokens = random_tokens(1, 9)[0]
    model = small_model("llama")
    got = agreement(predict(model, tokens, 3), predict(model, tokens, 3))
    assert [(part["first"], part["last"]) for part in got["positions"]] == [(0, 0), (1, 1), (2, 2)]


def test_progress(tokens):
    model, events = small_model("llama"), []
    agreement(predict(model, tokens, SEQLEN), predict(model, tokens, SEQLEN), progress=events.append)
    assert [(event.phase, event.step, event.steps) for event in events] == [("evaluate", 5, 5)]
