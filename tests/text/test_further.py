"""The sequences for the training after the pruning: none holds text of the calibration or of another."""

import dataclasses
import itertools

import pytest
import torch

import drot
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


@pytest.mark.parametrize("seed", [0, 1, 2, 2**64 - 1])
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


def test_several_texts_keep_their_shares(tmp_path):
    """Also where one of them has little more than what is wanted of it."""
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(20_000))))
    (tmp_path / "b.txt").write_text(" ".join(map(str, range(20_000, 30_000))))
    settings = CalibrationConfig(source=f"{tmp_path}/a.txt=3,{tmp_path}/b.txt", nsamples=16, seqlen=64)
    calibration = load_calibration(settings, Numbers())
    further = load_further(settings, 8, calibration, Numbers())
    assert (further[:, 0] >= 20_000).tolist() == [False, False, True, False, False, False, True, False]
    assert all(shared(one, other) < 24 for one in further for other in calibration)


def test_a_text_that_is_too_short_for_its_share_leaves_the_others_theirs(tmp_path):
    (tmp_path / "long.txt").write_text(" ".join(map(str, range(20_000))))
    (tmp_path / "short.txt").write_text(" ".join(map(str, range(20_000, 20_200))))
    settings = CalibrationConfig(
        source=f"{tmp_path}/long.txt,{tmp_path}/short.txt=20", nsamples=64, seqlen=64
    )
    calibration = load_calibration(settings, Numbers())
    assert len(calibration) == 3 + 3  # a split of 6 by the shares would leave the long text none
    further = load_further(settings, 64, calibration, Numbers())
    assert len(further) == 3 and int(further.max()) < 20_000
    assert all(shared(one, other) < 24 for one in further for other in calibration)


def test_the_text_of_a_model_goes_on_where_the_calibration_ended(tmp_path):
    """Also beside a text that gave the calibration fewer sequences than its share."""
    (tmp_path / "own.jsonl").write_text(f'{{"text": "{" ".join(map(str, range(1000)))}"}}\n')
    (tmp_path / "short.txt").write_text(" ".join(map(str, range(1000, 1120))))
    settings = CalibrationConfig(source=f"{tmp_path}/short.txt,own", nsamples=16, seqlen=50)
    calibration = load_calibration(settings, Numbers(), own=tmp_path / "own.jsonl")
    assert len(calibration) == 2 + 8
    further = load_further(settings, 2, calibration, Numbers(), own=tmp_path / "own.jsonl")
    assert torch.equal(further, torch.arange(400, 450)[None])


def test_the_text_of_a_model_is_read_in_order(tmp_path):
    (tmp_path / "own.jsonl").write_text(f'{{"text": "{" ".join(map(str, range(1000)))}"}}\n')
    settings = CalibrationConfig(source="own", nsamples=4, seqlen=100)
    calibration = load_calibration(settings, Numbers(), own=tmp_path / "own.jsonl")
    further = load_further(settings, 8, calibration, Numbers(), own=tmp_path / "own.jsonl")
    assert torch.equal(torch.cat([calibration, further]).flatten(), torch.arange(1000))
    with pytest.raises(drot.UserError, match="has 1000: lower `seqlen`"):
        load_calibration(dataclasses.replace(settings, seqlen=2000), Numbers(), own=tmp_path / "own.jsonl")
