"""The journal of an unfinished run, whose content a stranger may have written."""

import json
import os

import pytest

from drot.checkpoint.resume import read_journal
from drot.core.hashes import with_digest


@pytest.mark.parametrize(
    "content", ['{"a": ' + "[" * 5000 + "]" * 5000 + "}", "[" * 5000, '{"a": 1, "a": 1}']
)
def test_a_damaged_journal_is_none(tmp_path, content):
    file = tmp_path / "parts.json"
    file.write_text(content)
    assert read_journal(file) is None
    file.unlink()
    os.mkfifo(file)
    assert read_journal(file) is None


def test_a_whole_journal(tmp_path):
    (tmp_path / "parts.json").write_text(json.dumps(with_digest({"a": {"b": [1.5, None]}})))
    assert read_journal(tmp_path / "parts.json") == {"a": {"b": [1.5, None]}}
