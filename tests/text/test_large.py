"""Large local files: what is read of them, and that the sequences are parts of the text."""

import json
import re
from pathlib import Path

import pytest
import torch

from drot.config import CalibrationConfig, FinetuneConfig
from drot.core.errors import UserError
from drot.finetuning.text import split_text
from drot.text.files import BYTES_A_TOKEN, LARGE, LargeText
from drot.text.source import load_calibration, tokenize

SEQLEN = 50


class Words:
    """A tokenizer with one token a number, which counts the characters that it gets."""

    chat_template = None

    def __init__(self):
        self.characters = 0

    def __call__(self, text, **options):
        self.characters += len(text)
        return type("Encoding", (), {"input_ids": [int(word) for word in re.findall(r"\d+", text)]})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The numbers from 0 on in each kind of file, 10 in a line or a document; `a.txt` has no line at all."""
    folder = tmp_path_factory.mktemp("large")
    lines = [" ".join(f"é{n}," for n in range(start, start + 10)) for start in range(0, 800_000, 10)]
    (folder / "lines.txt").write_text("\n".join(lines))
    (folder / "crlf.txt").write_bytes("\r\n".join(lines).encode())
    (folder / "a.txt").write_text(" ".join(lines))
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"body": line}) for line in lines))
    assert all(file.stat().st_size > LARGE for file in folder.iterdir())
    return folder


def settings(path, **options):
    options = {"nsamples": 6, "seqlen": SEQLEN, "text_column": "body"} | options
    return CalibrationConfig(source=str(path), **options)


@pytest.mark.parametrize("name", ["lines.txt", "crlf.txt", "a.jsonl"])
def test_no_more_is_read_than_the_sequences_need(files, name):
    tokenizer = Words()
    found = load_calibration(settings(files / name), tokenizer)
    assert found.shape == (6, SEQLEN)
    assert (found.diff() == 1).all()  # parts of the text, without a gap
    assert tokenizer.characters <= 4 * 6 * BYTES_A_TOKEN * SEQLEN
    assert torch.equal(found, load_calibration(settings(files / name), Words()))
    assert not torch.equal(found, load_calibration(settings(files / name, seed=1), Words()))


def test_a_text_without_lines_is_cut_anywhere(files):
    """At a space: a piece begins and ends with a whole number."""
    found = load_calibration(settings(files / "a.txt", nsamples=40), Words())
    assert found.shape == (40, SEQLEN) and (found.diff() == 1).all()


def test_the_sequences_come_from_everywhere(files):
    """With 400 uniform positions a quarter of the text has 100 ± 9 of them."""
    starts = load_calibration(settings(files / "lines.txt", nsamples=400), Words())[:, 0]
    counts = torch.histc(starts.double(), 4, 0, 800_000)
    assert counts.sum() == 400 and (counts - 100).abs().max() < 40


def test_the_held_out_end_is_not_trained_on(files):
    config = FinetuneConfig(text=settings(files / "a.jsonl", nsamples=300), held_out=4)
    training, held_out = split_text(config, Words())
    assert held_out.flatten().tolist() == list(range(800_000 - 4 * SEQLEN, 800_000))
    assert training.shape == (300, SEQLEN) and int(training.max()) < int(held_out.min())


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_large_file_that_is_too_short_for_its_sequences_is_drawn_once(name, tmp_path, monkeypatch, caplog):
    """As a small file is. One with just enough tokens keeps its random places, without a warning."""
    lines = [" ".join(map(str, range(start, start + 10))) for start in range(0, 8000, 10)]
    rows = lines if name == "a.txt" else [json.dumps({"body": line, "id": "x" * 99}) for line in lines]
    (tmp_path / name).write_text("\n".join(rows))
    small = load_calibration(settings(tmp_path / name, nsamples=161), Words())
    caplog.clear()
    monkeypatch.setattr("drot.text.source.LARGE", 1000)
    found = load_calibration(settings(tmp_path / name, nsamples=161), Words())
    assert torch.equal(found, torch.arange(8000).reshape(160, SEQLEN)) and torch.equal(found, small)
    assert f"{name} has 8000 tokens, fewer than 161 sequences of 50" in caplog.text
    caplog.clear()
    found = load_calibration(settings(tmp_path / name, nsamples=160), Words())
    large = LargeText(tmp_path / name, "body", Words(), lambda text: tokenize(text, Words()))
    assert torch.equal(found, large.sequences(160, SEQLEN, 0)) and not caplog.text


def test_a_large_file_with_too_few_tokens(tmp_path):
    (tmp_path / "a.txt").write_text(" " * LARGE + "1 2 3 ")
    with pytest.raises(UserError, match=r"a.txt must have at least 50 tokens, got 3: lower `seqlen`"):
        load_calibration(settings(tmp_path / "a.txt"), Words())


def test_mistakes_in_a_large_file_are_one_line(tmp_path):
    file: Path = tmp_path / "a.jsonl"
    file.write_text('{"body": "1"}\n{"body": 2\n' * (LARGE // 20))
    with pytest.raises(UserError, match=r"a.jsonl, behind byte \d+, line \d+: not valid JSON") as caught:
        load_calibration(settings(file), Words())
    assert "\n" not in str(caught.value)
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 1 2 3\n" * LARGE)
    with pytest.raises(UserError, match="must be UTF-8, got byte 0xe9 at offset"):
        load_calibration(settings(tmp_path / "a.txt"), Words())


def test_mistakes_in_a_large_file_are_found_where_the_message_says(tmp_path, monkeypatch):
    monkeypatch.setattr("drot.text.source.LARGE", 1000)
    content = bytearray(b"1 2 3 4 5 6 7 8 9\n" * 1000)
    content[9005] = 0xE9
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match="got byte 0xe9 at offset 9005: convert it"):
        load_calibration(settings(tmp_path / "a.txt", nsamples=200), Words())
    rows = [json.dumps({"body": f"{number} 2 3 4 5 6 7 8 9"}) for number in range(1000, 2000)]
    rows[500] = '{"text": "1"}'
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    with pytest.raises(UserError, match=r"a\.jsonl, behind byte \d+, row \d+: there is no column") as caught:
        load_calibration(settings(tmp_path / "a.jsonl", nsamples=200), Words())
    start, row = map(int, re.findall(r"byte (\d+), row (\d+)", str(caught.value))[0])
    behind = (tmp_path / "a.jsonl").read_bytes()[start:].partition(b"\n")[2]
    assert behind.splitlines()[row - 1] == rows[500].encode()
