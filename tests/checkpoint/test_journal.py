"""The journal of an unfinished run, whose content a stranger may have written."""

import json
import os

import pytest
import torch

from drot.checkpoint.resume import RunState, read_journal
from drot.checkpoint.verify import verify_folder
from drot.core.errors import UserError
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (3, "layer_00000: .*, got 3: copy the file again"),
        ({"bytes": None}, r"lacks layer_00000\.bytes: it was edited; copy it again"),
        ({"bytes": "5"}, r"layer_00000\.bytes: .*, got '5': copy the file again"),
        ({"sha256": None}, r"lacks layer_00000\.sha256"),
        ({"machine": [1]}, r"layer_00000\.machine: .*, got \[1\]"),
        ({"record": "{"}, r"layer_00000\.record: .*, got '{'"),
    ],
)
def test_entries_that_fit_their_digest_and_no_part(tmp_path, change, message):
    """A stranger made the digest too. Neither the check of the folder nor a resumed run goes on."""
    state = RunState(tmp_path / "out", {"a": 1}, {"threads": 1})
    state.save("layer_00000", {"x": torch.ones(3)}, {"seconds": 1})
    file = state.folder / "parts.json"
    entry = read_journal(file)["layer_00000"]
    if change != 3:
        change = {key: value for key, value in (entry | change).items() if value is not None}
    file.write_text(json.dumps(with_digest({"layer_00000": change})))
    for use in (lambda: verify_folder(state.folder), lambda: RunState(tmp_path / "out", {"a": 1})):
        with pytest.raises(UserError, match=rf"parts\.json:? {message}"):
            use()


def test_a_whole_journal(tmp_path):
    (tmp_path / "parts.json").write_text(json.dumps(with_digest({"a": {"b": [1.5, None]}})))
    assert read_journal(tmp_path / "parts.json") == {"a": {"b": [1.5, None]}}
