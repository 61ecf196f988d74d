"""The sequences for the training after the pruning: none holds text of the calibration or of another."""

import itertools

import pytest
import torch

from drot.config import CalibrationConfig
from drot.text.further import load_further
from drot.text.source import load_calibration


class Numbers:
    """A tokenizer of words that are numbers."""

    def __call__(self, text, **options):
        return type("Encoded", (), {"input_ids": [int(word) for word in text.split()]})()


def drawn(path, words, nsamples, wanted=None, seqlen=64, seed=0):
    """The calibration and the further sequences of a text of the numbers below `words`."""
    path.write_text(" ".join(map(str, range(words))))
    settings = CalibrationConfig(source=str(path), nsamples=nsamples, seqlen=seqlen, seed=seed)
    calibration = load_calibration(settings, Numbers())
    return calibration, load_further(settings, wanted or nsamples, calibration, Numbers())


def shared(one, two):
    return len(set(one.tolist()) & set(two.tolist()))


@pytest.mark.parametrize("seed", range(3))
def test_hardly_a_token_stands_in_two_sequences(seed, tmp_path):
    calibration, further = drawn(tmp_path / "text.txt", 20_000, 16, seed=seed)
    assert further.shape == (16, 64) and further.dtype == torch.int64
    for one in further:
        assert all(shared(one, other) < 24 for other in calibration)
    assert all(shared(one, two) < 24 for one, two in itertools.combinations(further, 2))
    again = drawn(tmp_path / "text.txt", 20_000, 16, seed=seed)[1]
    assert torch.equal(again, further)


def test_a_short_text_gives_what_it_has(tmp_path):
    calibration, further = drawn(tmp_path / "text.txt", 3000, 16)
    assert 2 < len(further) < 16
    assert all(shared(one, other) < 24 for one in further for other in calibration)


@pytest.mark.parametrize("words", [66, 80, 1000])
def test_a_text_that_the_calibration_holds_whole_gives_nothing(words, tmp_path, caplog):
    _, further = drawn(tmp_path / "text.txt", words, 16 if words == 1000 else 1, wanted=16)
    assert len(further) <= 1
    assert caplog.text.count("the whole text is drawn once") <= 1


def test_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr("drot.text.source.LARGE", 100)
    calibration, further = drawn(tmp_path / "text.txt", 20_000, 8)
    assert further.shape == (8, 64)
    assert all(shared(one, other) < 24 for one in further for other in calibration)
