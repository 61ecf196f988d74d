"""What all commands share: help, version, completion, and the library's messages in the words of options."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import drot
from drot.cli import app as cli
from drot.cli.commands import COMMANDS, imported
from drot.cli.messages import flag, flags_of, in_options

PACKAGE = Path(drot.__file__).resolve().parent


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"drot {drot.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(command, capsys):
    assert cli.run([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Example: drot {command}" in shown
    example = shown.split("Example: drot ")[1].split("&&")[0].split()
    context = imported(command).make_context(command, example[1:])
    assert context.params


def test_prunes_options_are_grouped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.run(["prune", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    panels = [line.split("─ ")[1].split(" ─")[0] for line in lines if line.startswith("╭")]
    assert panels == [
        "Arguments",
        "Options",
        "Pruning",
        "Recovery",
        "Rotation",
        "Calibration",
        "Output",
        "Run",
    ]
    assert any("--method" in line and "[magnitude|wanda|sparsegpt]" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_an_option_without_a_value_shows_none(command, width, capsys, monkeypatch):
    """typer shows `--help <bool>`, which looks as if the option wanted a value."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--help " in shown and "bool" not in shown.lower()


def options() -> dict[str, object]:
    """Every option of every command."""
    return {name: param for command in COMMANDS for param in imported(command).params for name in param.opts}


@pytest.mark.parametrize(
    ("option", "typed", "offered"),
    [("--method", "", {"magnitude", "wanda", "sparsegpt"}), ("--rotation", "s", {"shared"})],
)
def test_the_shell_completes_choices(option, typed, offered):
    command = imported("prune")
    (parameter,) = (param for param in command.params if option in param.opts)
    context = command.make_context("prune", ["m", "--out", "o"])
    assert {item.value for item in parameter.shell_complete(context, typed)} == offered


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ('needs `hessians="dense"`, got `mode="layer"`', "needs --hessians dense, got --rotation layer"),
        ("`resume=True` or `layers_per_step=4`", "--resume or --layers-per-step 4"),
        ("`lr` must be above 0", "--lr must be above 0"),
        ("a `b c` stays", "a `b c` stays"),
    ],
)
def test_fields_are_shown_as_options(message, shown):
    assert in_options(message, flags_of("prune").get) == shown


def test_a_command_may_have_its_own_option_for_a_field():
    for command, shown in (("finetune", "--text"), ("prune", "--calibration"), ("sweep", "source")):
        assert in_options("`source` must be c4", flags_of(command).get) == f"{shown} must be c4"
    kept = "`tokenizer` and an odd ` stay"
    assert in_options(kept, flags_of("prune").get) == kept


def test_every_field_that_a_message_names_has_an_option():
    python_only = {"tokenizer"}
    named = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if called == "UserError":
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        named |= {match[1] for match in re.finditer(r"`(\w+)(?:=[^`]*)?`", part.value)}
    assert len(named) > 10
    known = options()
    for name in named - python_only:
        option = flag(name).split()[0]
        assert option in known, f"a message names `{name}`, and no command has {option}"


def test_the_list_of_commands_needs_none_of_them(capsys):
    """`drot --help` has the first line of each command's help, and imports neither commands nor pydantic."""
    for name, first_line in COMMANDS.items():
        assert imported(name).help.split("\n")[0] == first_line
    code = "import sys; from drot.cli import app; app.run(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"pydantic", "drot.config", "drot.cli.prune", "drot.cli.sweep"} & set(loaded)
    assert "drot.cli.commands" in loaded
