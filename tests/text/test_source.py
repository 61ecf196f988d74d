"""Sources of calibration tokens, the positions of the sequences, and the messages for mistakes."""

import hashlib
import json
import struct

import datasets
import pytest
import torch

from drot.config import CalibrationConfig
from drot.core import hub
from drot.core.errors import UserError
from drot.text.source import as_token_ids, calibration_hash, load_calibration, read_text


class ByteTokenizer:
    """A tokenizer whose token ids are the bytes of the text."""

    def __call__(self, text, *, add_special_tokens, verbose):
        assert not add_special_tokens
        return type("Encoding", (), {"input_ids": list(text.encode())})


def load(source, nsamples=3, seqlen=4, seed=0, text_column="text"):
    settings = CalibrationConfig(
        source=str(source), nsamples=nsamples, seqlen=seqlen, seed=seed, text_column=text_column
    )
    return load_calibration(settings, ByteTokenizer())


def test_sequences_start_at_positions_of_the_generator(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 2)
    generator = torch.Generator().manual_seed(7)
    text = path.read_bytes()
    for sequence in load(str(path), nsamples=20, seed=7):
        start = int(torch.randint(0, len(text) - 4, (1,), generator=generator))
        assert bytes(sequence.tolist()) == text[start : start + 4]
    assert not torch.equal(load(str(path), seed=1), load(str(path), seed=2))


def test_a_short_text_is_drawn_once(tmp_path, caplog):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox")
    sequences = load(path, nsamples=12, seqlen=4)
    assert bytes(sequences.flatten().tolist()) == b"the quick brown "[:16]
    assert "has 19 tokens, fewer than 12 sequences of 4" in caplog.text and "4 sequences" in caplog.text
    caplog.clear()
    assert load(path, nsamples=4, seqlen=4).shape == (4, 4) and not caplog.text


@pytest.mark.parametrize("author", ["Jane", 7, "drot.sample", "0" * 64])
def test_a_text_that_a_model_wrote_is_cut_from_its_beginning(author, tmp_path):
    """By an entry of its first row. The rows of another text may name an author as well."""
    path, plain = tmp_path / "a.jsonl", tmp_path / "plain.jsonl"
    rows = [
        {"written_by": author, "text": "x", "body": "the quick brown fox jumps"},
        {"text": "y", "body": "b"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    plain.write_text("\n".join(json.dumps({"body": row["body"]}) for row in rows))
    if author in ("Jane", 7):
        assert torch.equal(load(path, text_column="body"), load(plain, text_column="body"))
    else:
        path.write_text(json.dumps({"text": "the quick brown fox", "written_by": author}))
        assert bytes(load(path, nsamples=3, seqlen=4).flatten().tolist()) == b"the quick br"


def test_lone_surrogates_are_replaced_and_counted(tmp_path, caplog):
    """As in scraped text. A whole pair is one character."""
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"text": "a \ud83d b \udc00"}' + "\n" + r'{"text": "\ud83d\ude00 whole pair"}' + "\n")
    text = read_text(str(path), "train", "text")
    assert text == "a \ufffd b \ufffd\n\n\U0001f600 whole pair"
    assert "2 lone surrogates, halves of characters, became U+FFFD" in caplog.text
    assert load(path).shape == (3, 4)


def test_a_wrong_file_of_20_gb_ends_at_once(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.json"):
        with (tmp_path / name).open("wb") as handle:
            handle.truncate(20 * 10**9)
        for read in (load, lambda path: read_text(str(path), "test", "text")):
            with pytest.raises(UserError, match="got a zero byte"):
                read(tmp_path / name)


DOCUMENTS = ["first document", "second document"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "\n\n".join(DOCUMENTS)),
        ("a.json", json.dumps([{"body": d} for d in DOCUMENTS])),
        ("a.json", json.dumps(DOCUMENTS)),
        ("a.json", "\n".join(json.dumps({"body": d}) for d in DOCUMENTS)),
        ("a.jsonl", "\n".join(json.dumps({"body": d, "id": 1}) for d in DOCUMENTS) + "\n\n"),
    ],
)
def test_every_kind_of_file_holds_the_same_text(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert read_text(str(tmp_path / name), "train", "body") == "first document\n\nsecond document"


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"body": DOCUMENTS}).to_parquet(path)
    assert read_text(str(path), "train", "body") == "first document\n\nsecond document"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "is empty"),
        ("a.txt", " \n\n ", "is empty"),
        ("a.jsonl", "", "is empty"),
        ("a.json", "[]", "is empty"),
        ("a.txt", "abc", "must have more tokens than `seqlen`, 4"),
        ("a.txt", "abc", "has 3: lower `seqlen` or give a longer text"),
        ("a.csv", "text", "the file's suffix must be one of .txt, .json, .jsonl, .parquet; got '.csv'"),
        (
            "a.jsonl",
            '{"body": "x", "id": 3}',
            "no column 'text'; the columns are body, id: name one of them as `text_column`",
        ),
        ("a.jsonl", '{"text": 3}', "column 'text' must hold text or chats, got int: name another column as"),
        ("a.jsonl", "[1, 2]", "a row must hold text or chats, got list"),
        ("a.jsonl", '{"text": null}', "is empty"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', "line 2: not valid JSON"),
        ("a.json", '{"text": "x"', "line 1: not valid JSON"),
        ("a.json", '[{"text": "x"}, {"te', "line 1: not valid JSON"),
        ("a.parquet", "no parquet", "is not a readable parquet file"),
    ],
)
def test_the_message_for_a_bad_file_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        load(str(tmp_path / name))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl"])
def test_a_file_that_is_not_utf8(tmp_path, name):
    (tmp_path / name).write_bytes("été, or 'summer'".encode("latin1"))
    with pytest.raises(UserError, match=r"UTF-8, got byte 0xe9 at offset 0: convert it, .* iconv") as error:
        load(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_a_byte_order_mark_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8-sig")
    (tmp_path / "a.json").write_text('["text"]', encoding="utf-8-sig")
    for name in ("a.txt", "a.json"):
        assert read_text(str(tmp_path / name), "train", "text") == "text"


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_rows_without_text_are_left_out(tmp_path, kind):
    rows = [{"body": "first document"}, {"body": None}, {"body": "second document"}]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if kind == "jsonl" else json.dumps(rows))
    assert read_text(str(path), "train", "body") == "first document\n\nsecond document"


def test_a_parquet_file_that_was_cut_off(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"text": DOCUMENTS * 100}).to_parquet(path)
    whole = path.read_bytes()
    for part in (whole[: len(whole) // 2], whole[: len(whole) // 4] + whole[len(whole) // 2 :]):
        path.write_bytes(part)
        with pytest.raises(UserError, match="is not a readable parquet file") as error:
            load(str(path))
        assert "\n" not in str(error.value)


def test_a_line_separator_inside_a_string_does_not_end_a_line(tmp_path):
    text = "a\u2028b\x85c"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False), encoding="utf-8")
    assert read_text(str(tmp_path / "a.jsonl"), "train", "text") == text


def test_a_missing_source(tmp_path):
    with pytest.raises(UserError, match=r"`source` must be c4, wikitext2, a dataset .* got 'nothing.txt'"):
        load("nothing.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UserError, match="which is a folder"):
        load(str(tmp_path / "folder.txt"))
    with pytest.raises(UserError, match=r"`ppl` must be wikitext2, a dataset .* got 'c4'"):
        read_text("c4", "test", "text")


@pytest.mark.parametrize("source", ["c4", "wikitext2"])
def test_hub_without_a_network(monkeypatch, source):
    def refuse(path, **options):
        raise ConnectionError("name resolution failed\nand more")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(hub, "_unreachable", lambda: "")
    with pytest.raises(UserError) as error:
        load(source)
    message = "(name resolution failed and more): without a network, name a local file as `source`"
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_right_data_are_read_from_the_hub_and_c4_only_in_part(monkeypatch):
    seen, read = [], []

    def load_dataset(path, **options):
        seen.append((path, options))
        return ({"text": read.append(i) or "0123456789"} for i in range(1000))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load("c4", nsamples=2, seqlen=5)
    assert len(read) < 20
    load("wikitext2", nsamples=2, seqlen=5)
    assert len(read) > 1000
    (c4, c4_options), (wikitext, wikitext_options) = seen
    assert (c4, c4_options["split"], c4_options["streaming"]) == ("allenai/c4", "train", True)
    assert (wikitext, wikitext_options["name"]) == ("Salesforce/wikitext", "wikitext-2-raw-v1")
    assert (wikitext_options["split"], wikitext_options["streaming"]) == ("train", False)
    read_text("wikitext2", "test", "text")
    assert seen[2][1]["split"] == "test"


def test_a_tensor_is_used_as_it_is():
    tokens = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert torch.equal(as_token_ids(tokens), tokens.long())


@pytest.mark.parametrize("tokens", [torch.zeros(2, 3), torch.arange(3), torch.zeros(0, 3, dtype=torch.long)])
def test_a_tensor_of_no_token_ids(tokens):
    with pytest.raises(UserError, match=r"must be integers of shape \[nsamples, seqlen\], got"):
        as_token_ids(tokens)


def test_the_hash_depends_on_the_ids_alone():
    tokens = torch.tensor([[1, 2], [3, 70000]])
    expected = hashlib.sha256(struct.pack("<4q", 1, 2, 3, 70000)).hexdigest()
    assert calibration_hash(tokens) == calibration_hash(tokens.int()) == expected
    assert calibration_hash(tokens.T) != expected
