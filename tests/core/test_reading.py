"""The reading of JSON files: what is refused, and messages that name the entry in one line."""

import json
import os
import tracemalloc

import pytest

from drot.config import Recipe
from drot.core.checks import shortened
from drot.core.errors import UserError, quoted
from drot.core.hashes import FileRecord
from drot.core.reading import check_schema, read_json
from drot.model.schema import ModelConfig, WeightIndex


def test_the_largest_seed_of_a_recipe_is_read(tmp_path):
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps({"calibration": {"seed": 2**64 - 1}}))
    assert Recipe.from_file(file).calibration.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not valid JSON"),
        ("[]", "must hold a JSON object, got \\[\\]"),
        ("\xe9", "is not valid JSON"),
        ('{"a": {"b": [1, NaN]}}', "a.b.1 must be a finite number, got nan"),
        ('{"a": 1e999}', "a must be a finite number, got inf"),
        ('{"a": 18446744073709551616}', "a must be a number of 64 bits"),
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
        ('{"a": ' * 100 + "1" + "}" * 100, "nested more than 64 levels"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": 1,\n "b": {"a": 2,\n  "a": 3}}', "'a' stands twice in one object, see lines 1, 2, 3"),
        ('{"a\\nb": {"c": NaN}}', r"'a\\nb'.c must be a finite number"),
    ],
)
def test_files_that_are_refused(tmp_path, content, message):
    file = tmp_path / "some.json"
    file.write_text(content, encoding="latin1")
    with pytest.raises(UserError, match=message) as caught:
        read_json(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_file(tmp_path):
    with pytest.raises(UserError, match="must be a file, got a folder"):
        read_json(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        read_json(tmp_path / "no.json")


def test_pipes_and_huge_files_are_not_read(tmp_path):
    """The reading of a pipe that nobody writes to never ends; a sparse file of 20 GB takes one block."""
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UserError, match="must be a file, got a pipe, a device or a socket"):
        read_json(tmp_path / "pipe.json")
    with (tmp_path / "huge.json").open("wb") as handle:
        handle.truncate(20 * 10**9)
    with pytest.raises(UserError, match="must have at most 67108864 bytes, got 20000000000"):
        read_json(tmp_path / "huge.json")


def test_a_short_file_takes_little_memory(tmp_path):
    (tmp_path / "short.json").write_text('{"a": 1}')
    tracemalloc.start()
    try:
        read_json(tmp_path / "short.json")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_as_it_should_be(tmp_path):
    data = {"a": [1, 2.5, None, True, {"b": "text"}], "c": -(2**63) + 1}
    (tmp_path / "some.json").write_text(json.dumps(data))
    assert read_json(tmp_path / "some.json") == data


@pytest.mark.parametrize(
    ("schema", "data", "message"),
    [
        (ModelConfig, {}, "^file lacks model_type: it was edited"),
        (ModelConfig, {"model_type": "llama", "vocab_size": True}, "vocab_size: .* integer, got True"),
        (ModelConfig, {"model_type": "llama", "vocab_size": 8.0}, "vocab_size: .* integer, got 8.0"),
        (ModelConfig, {"model_type": "llama", "rms_norm_eps": 1}, "rms_norm_eps: .* less than 1, got 1"),
        (
            FileRecord,
            {"sha256": "0", "bytes": 1, "layers": 3},
            "^file has layers, which this version of drot does not support",
        ),
        (FileRecord, {"sha256": "0", "bytes": 1, "a\nb": 3}, r"^file has 'a\\nb', which this version"),
        (
            WeightIndex,
            {"metadata": {}, "weight_map": {"a": "b/c"}},
            "weight_map.a: must be the name of a file",
        ),
        (WeightIndex, {"metadata": {}, "weight_map": {}}, "weight_map: .* at least 1 item"),
    ],
)
def test_schemas(schema, data, message):
    with pytest.raises(UserError, match=message) as caught:
        check_schema(schema, data, "file")
    assert "\n" not in str(caught.value)


def test_quotes_are_short_and_in_one_line():
    assert quoted(KeyError("nope")) == "KeyError: 'nope'"
    assert quoted(ValueError("`a` is\n  wrong")) == "'a' is wrong"
    assert len(quoted(ValueError("x" * 1000))) == 300
    assert len(shortened("x" * 1000)) == 60 and shortened("a\nb") == r"'a\nb'"
    assert shortened(10**5000) == "a very long int"
