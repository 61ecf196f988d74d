"""Any dataset on the hub as a text, read by the package datasets from a local folder, and chats."""

import dataclasses
import json

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drot.checkpoint.load import load_tokenizer
from drot.config import CalibrationConfig, FinetuneConfig
from drot.core.errors import UserError
from drot.evaluation.perplexity import load_eval_tokens
from drot.finetuning.text import split_text
from drot.reporting.demo import HELD_OUT, MODEL
from drot.text.source import READ_EVERY, load_calibration, read_text, tokenize

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]


def tokenizer(template=TEMPLATE):
    """A tokenizer with one token a character, and one for each special token."""
    alphabet = sorted(set("abcdefghijklmnopqrstuvwxyz 0123456789\n"))
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|end|>"]})
    made.chat_template = template
    return made


CARD = """---
configs:
- config_name: plain
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
  default: true
- config_name: chats
  data_files:
  - {split: train, path: chats.jsonl}
  - {split: held, path: chats.jsonl}
---
"""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A folder in place of the hub's dataset some-org/some.name; gives the arguments of load_dataset."""
    folder = tmp_path / "some-dataset"
    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    for split in ("train", "test"):
        rows = [{"text": f"{split} document {i}", "id": i} for i in range(200)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": CHAT}) for _ in range(50)))
    seen, real = [], datasets.load_dataset

    def load_dataset(path, **options):
        seen.append((path, options))
        return real(str(folder), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return seen


@pytest.mark.parametrize(
    ("source", "asked", "starts"),
    [
        ("some-org/some.name", ("train", None, "train"), "train document 0\n\ntrain document 1\n\n"),
        ("some-org/some.name:test", ("train", None, "test"), "test document 0\n\n"),
        ("some-org/some.name:plain:train", ("test", "plain", "train"), "train document 0\n\n"),
        ("some-org/some.name", ("test", None, "test"), "test document 0\n\n"),
    ],
)
def test_any_dataset_on_the_hub_is_a_text(hub, source, asked, starts):
    split, name, named_split = asked
    assert read_text(source, split, "text").startswith(starts)
    assert hub == [
        ("some-org/some.name", {"name": name, "split": named_split, "streaming": True}),
    ]


def test_a_dataset_is_read_only_as_far_as_needed(monkeypatch):
    read = []
    rows = datasets.IterableDataset.from_generator(
        lambda: ({"text": read.append(i) or "0123456789"} for i in range(10000))
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: rows)
    load_calibration(CalibrationConfig(source="a/b", nsamples=2, seqlen=5), tokenizer())
    assert 8 <= len(read) < 50
    config = FinetuneConfig(held_out=1)
    replace = dataclasses.replace
    config = replace(config, text=replace(config.text, source="a/b", nsamples=3, seqlen=5))
    read.clear()
    training, held_out = split_text(config, tokenizer())
    assert training.shape == (3, 5) and held_out.shape == (1, 5) and len(read) < 50
    read.clear()
    load_eval_tokens("a/b", tokenizer())  # an evaluation reads the whole split
    assert len(read) == 10000


def test_a_long_text_reports_how_far_it_is_read(monkeypatch):
    rows = [{"text": "x" * READ_EVERY}] * 3
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: rows)
    events = []
    read_text("a/b", "train", "text", max_tokens=READ_EVERY, progress=events.append)
    assert [(e.phase, e.step, e.steps) for e in events] == [
        ("read", i * READ_EVERY, 8 * READ_EVERY) for i in range(4)
    ]


def test_tokens_are_those_of_the_whole_text_in_one_piece(tmp_path):
    """Progress does not cut the text: the ids are those of one call, and the event comes before it."""
    text, real, events = HELD_OUT.read_text(encoding="utf-8")[:50000], load_tokenizer(MODEL), []
    ids = tokenize(text, real, events.append)
    assert ids.tolist() == real(text, add_special_tokens=False).input_ids
    assert [(e.phase, e.steps) for e in events] == [("tokenize", len(text))]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("column", ["messages", "dialogue"])
def test_a_file_of_chats(tmp_path, suffix, column):
    path, rows = tmp_path / f"chats.{suffix}", [{column: CHAT, "id": 1}] * 2
    if suffix == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if suffix == "jsonl" else json.dumps(rows))
    one = "<|user|>hello<|end|><|assistant|>good day<|end|>"
    text_column = "text" if column == "messages" else column
    assert read_text(str(path), "train", text_column, tokenizer()) == f"{one}\n\n{one}"


def test_a_chat_is_tokenised_as_the_template_of_the_tokenizer_does(tmp_path):
    path, made = tmp_path / "chats.jsonl", tokenizer()
    path.write_text(json.dumps({"messages": CHAT}))
    length = len(made.apply_chat_template(CHAT, tokenize=True)["input_ids"])
    settings = CalibrationConfig(source=str(path), nsamples=1, seqlen=length - 1)
    tokens = load_calibration(settings, made)
    expected = made.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    assert tokens.tolist() == [expected[:-1]]
    assert made.convert_tokens_to_ids("<|user|>") in tokens


def test_chats_on_the_hub(hub):
    text = read_text("some-org/some.name:chats:held", "train", "text", tokenizer())
    assert text.count("<|assistant|>good day<|end|>") == 50


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": CHAT}, None, "row 1 holds a chat, but the tokenizer of the model has no chat template"),
        ({"messages": CHAT}, "{{ raise_exception('roles!') }}", r"refuses the chat \(roles!\)"),
        ({"messages": ["a", "b"]}, TEMPLATE, "column 'messages' must hold text or chats, got list"),
        ({"messages": [{"from": "human", "value": "x"}]}, TEMPLATE, "must hold text or chats, got list"),
        (
            {"chat": CHAT},
            TEMPLATE,
            "row 1: there is no column 'text'; the columns are chat: name one of them",
        ),
    ],
)
def test_the_message_for_a_bad_chat_is_one_line(tmp_path, row, template, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=message) as error:
        read_text(str(tmp_path / "a.jsonl"), "train", "text", tokenizer(template))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("some-org/some.name:nosuch", r"cannot read .*nosuch from the hub .*name it as org/name:split"),
        ("some-org/some.name:nosuch:train", r"cannot read .* from the hub .*nosuch"),
    ],
)
def test_a_split_or_a_configuration_that_is_not_there(hub, source, message):
    with pytest.raises(UserError, match=message) as error:
        read_text(source, "train", "text")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source", ["data/missing.txt", "./nope", "/no/such/folder", "a/b/c", "nothing", "a/b:"]
)
def test_a_missing_file_is_not_looked_for_on_the_hub(monkeypatch, source):
    def refuse(*args, **options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match="which is no such name and no file"):
        read_text(source, "train", "text")


def test_a_file_goes_before_a_dataset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").write_text("x")
    with pytest.raises(UserError, match="suffix must be one of"):
        read_text("org/name", "train", "text")
