"""`drot eval` reports a mistake before it loads the weights of the model."""

import pytest

from drot.cli import app as cli
from drot.demo.demo import HELD_OUT, MODEL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--seqlen 0",
            "--seqlen must be at least 2, since the first token of a window is not predicted; got 0",
        ),
        ("--seqlen 1", "--seqlen must be at least 2"),
        ("--seqlen 2049", "--seqlen must be at most 2048, the positions of this model; got 2049"),
        ("--ppl short.txt", "tokens, but one window needs 64: lower --seqlen"),
        (
            "--ppl c4",
            "--ppl must be wikitext2, a dataset on the hub such as org/name:split, or a .txt, .json",
        ),
        ("--device gpu", "--device must be auto, cpu or cuda[:N]"),
        ("--dtype int8", "--dtype must be auto or one of"),
    ],
)
def test_mistakes_are_found_before_the_weights_are_read(monkeypatch, capsys, tmp_path, options, message):
    monkeypatch.setattr("drot.checkpoint.load.load_model", lambda *args: pytest.fail("the weights were read"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("import sys")
    seqlen = [] if "--seqlen" in options else ["--seqlen", "64"]
    assert cli.run(["eval", str(MODEL), "--ppl", str(HELD_OUT), *seqlen, *options.split()]) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith("drot: ") and message in error
    assert all("the text" in line for line in progress)


@pytest.mark.slow
def test_an_unknown_task_is_found_before_the_weights_are_read(monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("drot.checkpoint.load.load_model", lambda *args: pytest.fail("the weights were read"))
    arguments = ["--ppl", str(HELD_OUT), "--seqlen", "64", "--tasks", "no_such_task"]
    assert cli.run(["eval", str(MODEL), *arguments]) == 2
    assert "drot: lm_eval has no task no_such_task" in capsys.readouterr().err


def test_a_missing_model(capsys, tmp_path):
    assert cli.run(["eval", str(tmp_path / "nothing"), "--ppl", str(HELD_OUT)]) == 2
    error = capsys.readouterr().err
    assert "there is no such folder" in error and error.count("\n") == 1
