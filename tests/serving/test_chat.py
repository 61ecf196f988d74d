"""`drot chat`, with a person at the terminal and with piped lines."""

import io
import shutil

import pytest

from drot.cli import app as cli
from drot.cli import chat as command
from drot.core.errors import UserError
from drot.serving.conversation import Conversation

pytestmark = pytest.mark.slow
OPTIONS = ("--max-tokens", "8", "--temperature", "0")


def chat(folder, typed, monkeypatch, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return cli.run(["chat", str(folder), *OPTIONS, *options])


@pytest.fixture(scope="module")
def plain(packed, tmp_path_factory):
    """The checkpoint without its chat template."""
    ignored = shutil.ignore_patterns("chat_template.jinja")
    return shutil.copytree(packed, tmp_path_factory.mktemp("plain") / "plain", ignore=ignored)


def test_piped_lines_are_answered_with_the_lines_before_them(packed, greedy, monkeypatch, capsys):
    assert chat(packed, "add\n\nsub\n/new\nadd\n/exit\nnever\n", monkeypatch, "--system", "Code") == 0
    head = "# system: Code\n# user: add\n"
    first = greedy(f"{head}def ", 8)
    second = greedy(f"{head}# assistant: {first}\n# user: sub\ndef ", 8)
    assert capsys.readouterr().out == f"{first}\n{second}\n{first}\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_are_refused(monkeypatch, errors):
    """In a locale without UTF-8, Python reads them as half characters."""
    piped = io.TextIOWrapper(io.BytesIO("ü\n".encode() + b"caf\xe9 x\n"), "utf-8", errors)
    monkeypatch.setattr("sys.stdin", piped)
    with pytest.raises(UserError, match="stdin must be UTF-8, got the byte 0xe9"):
        list(command._lines(False))


def test_without_a_chat_template_each_line_is_continued(plain, greedy, monkeypatch, capsys):
    assert chat(plain, "import\ndef main(\n", monkeypatch) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{greedy('import', 8)}\n{greedy('def main(', 8)}\n"
    assert "has no chat template: it continues each line as plain text" in shown.err
    assert chat(plain, "import\n", monkeypatch, "--system", "Code") == 2
    assert "--system needs a model with a chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--max-tokens", "0"], ["--temperature", "-1"], ["--temperature", "nan"]]
)
def test_wrong_numbers_are_refused(options, packed, monkeypatch, capsys):
    assert chat(packed, "add\n", monkeypatch, *options) == 2
    assert options[0] in capsys.readouterr().err


def test_a_full_context_is_refused(packed, monkeypatch, capsys):
    assert chat(packed, "x " * 3000 + "\n", monkeypatch) == 2
    assert "the model reads 512" in capsys.readouterr().err


class Typing:
    """What a person types: texts, and exceptions for Ctrl-C and Ctrl-D."""

    def __init__(self, *typed):
        self.typed = list(typed)

    def __call__(self, prompt=""):
        step = self.typed.pop(0)
        if isinstance(step, type):
            raise step
        return step


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt, "/exit"])
def test_ctrl_c_ends_an_answer_and_then_the_chat(end, packed, monkeypatch, capsys):
    typing = Typing("add", "sub", end)
    monkeypatch.setattr("builtins.input", typing)
    monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    shown = []

    def interrupted(piece):
        shown.append(piece)
        if len(shown) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "show", interrupted)
    assert cli.run(["chat", str(packed), *OPTIONS]) == 0
    assert not typing.typed and len(shown) > 1


def test_what_was_said_before_ctrl_c_is_kept(packed):
    from drot.checkpoint.load import load, load_tokenizer

    conversation = Conversation(load(packed), load_tokenizer(packed), max_tokens=8, temperature=0)

    def interrupted(piece):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.answer("add", interrupted)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    conversation.start_again()
    assert conversation.messages == []
    with pytest.raises(UserError, match="start again"):
        conversation.answer("x " * 3000, print)


def test_the_terminal_obeys_no_character_of_an_answer(capsys):
    command.show("a\x1b[2Jb\n\tc\u202e")
    assert capsys.readouterr().out == "a\\x1b[2Jb\n\tc\\u202e"
    words = "5\u202f€\u3000\u0645\u06cc\u200c\u062e \U0001f468\u200d\U0001f469"
    command.show(words)
    assert capsys.readouterr().out == words
