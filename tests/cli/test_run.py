"""`drot run`: another Python program in a process that has imported drot."""

import sys

import pytest
from command_output import one_line

from drot.cli import app as cli

PROGRAM = """
import sys
from drot.core.import_hook import _Finder
print(sys.argv, __name__, any(isinstance(finder, _Finder) for finder in sys.meta_path))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """A program changes the command line and the path of its process."""
    monkeypatch.setattr(sys, "argv", ["drot"])
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.mark.parametrize(
    "words", [["FILE"], ["python", "FILE"], ["-m", "program"], ["python", "-m", "program"]]
)
def test_a_program_sees_its_own_command_line(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    command = [str(tmp_path / "program.py") if word == "FILE" else word for word in words]
    assert cli.run(["run", "--", *command, "7", "--debug"]) == 7
    shown = [str(tmp_path / "program.py"), "7", "--debug"]
    assert capsys.readouterr().out == f"{shown} __main__ True\n"


@pytest.mark.parametrize("words", [["program.py"], ["python", "program.py"], ["-m", "program"]])
def test_a_program_that_ends_has_status_0(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "program.py").write_text("print('done')")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["run", "--", *words]) == 0
    assert capsys.readouterr().out == "done\n"


def test_a_command_of_a_package(capsys):
    assert cli.run(["run", "--", "pytest", "--version"]) == 0
    assert pytest.__version__ in capsys.readouterr().out


def test_a_program_that_fails_shows_its_traceback(tmp_path, capsys):
    (tmp_path / "program.py").write_text("raise KeyError('x')")
    assert cli.run(["run", "--", str(tmp_path / "program.py")]) == 1
    assert capsys.readouterr().err.endswith("KeyError: 'x'\n")


@pytest.mark.parametrize("words", [["no-such-command"], ["python"], ["no-such-file.py"]])
def test_what_is_no_program_is_refused(words, capsys):
    assert cli.run(["run", "--", *words]) == 2
    assert "after --" in one_line(capsys.readouterr().err)
