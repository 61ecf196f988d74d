"""What all commands share: help, version, completion, and the library's messages in the words of options."""

import ast
import inspect
import json
import logging
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch
from made_manifests import made_manifest

import drot
from drot.checkpoint.manifest import write_manifest
from drot.cli import app as cli
from drot.cli.app import app, describe
from drot.cli.commands import COMMANDS, flags_of, imported
from drot.cli.messages import flag, in_options
from drot.cli.options import ANY_DTYPE
from drot.cli.prune import FIRST
from drot.config import QUALITIES, Method
from drot.config.rotation import FAST_STEPS
from drot.evaluation.variants import SHAPES
from drot.machine.devices import DTYPES_BY_NAME

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
    assert cli.run(["prune", "--help-all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    panels = [line.split("─ ")[1].split(" ─")[0] for line in lines if line.startswith("╭")]
    assert panels[2:] == [
        "Model",
        "Recipe",
        "Pruning",
        "Recovery",
        "Rotation",
        "Calibration",
        "Output",
        "Run",
    ]
    assert any("--method" in line and f"[{'|'.join(get_args(Method))}]" in line for line in lines)


def test_help_of_prune_shows_the_options_that_people_use_first(capsys):
    for option in ("--help", "--help-all"):
        assert cli.run(["prune", option]) == 0
        shown = set(re.findall(r"^│ (--\S+)", capsys.readouterr().out, re.MULTILINE))
        expected = {flag(name) for name in FIRST} if option == "--help" else options_of_prune()
        assert shown == expected | {"--help", "--help-all"}
    assert len(FIRST) == 10


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("prune m --nothing", "drot prune --help-all"),
        ("prune m --nsamples x", "drot prune --help-all"),
        ("prune m --lr", "drot prune --help-all"),
        ("prune m --out", "drot prune --help"),
        ("eval m --nothing", "drot eval --help"),
        ("eval", "drot eval --help"),
    ],
)
def test_a_usage_error_names_the_help_that_has_the_option(line, hint, capsys):
    assert cli.run(line.split()) == 2
    assert capsys.readouterr().err.endswith(f"({hint} lists the options)\n")


def test_a_misspelt_command_names_the_help_that_has_the_commands(capsys):
    assert cli.run(["nothing"]) == 2
    assert capsys.readouterr().err.endswith("(drot --help lists the commands)\n")


@pytest.mark.parametrize("line", ["prune m --nsamples ten", "bench --repeats ten"])
def test_a_usage_error_says_what_came(line, capsys):
    assert cli.run(line.split()) == 2 and "'ten'" in capsys.readouterr().err  # typer words the rest


@pytest.mark.parametrize("command", COMMANDS)
def test_the_docstring_of_a_command_has_its_parameters(command):
    """An option stands in it, with its help; a parameter that it does not name would have no option."""
    module = import_module(f"drot.cli.{COMMANDS[command]}")
    named = inspect.signature(getattr(module, COMMANDS[command])).parameters.keys() - {"ctx", "settings"}
    settings = {option.name for option in getattr(module, "SETTINGS", ())}
    shown = {param.name: param for param in imported(command).params}
    assert named | settings == shown.keys() - {"help", "help_all", "progress"}
    assert all(param.help for param in shown.values())


def test_values_in_help_texts_are_those_of_the_program():
    help = {option.name: option.help for option in imported("prune").params}["quality"]
    for name, values in QUALITIES.items():
        assert f"{name}: {', '.join(map(str, values.values()))}" in help
    layer, shared = FAST_STEPS.values()
    assert f"fast also sets --steps to {layer}, and to {shared} with stock and light." in help
    shapes = {option.name: option for option in imported("bench").params}["shape"]
    assert shapes.metavar == f"[{'|'.join(SHAPES)}]"
    assert f"[{'|'.join(['auto', *DTYPES_BY_NAME])}]" == ANY_DTYPE


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_an_option_without_a_value_shows_none(command, capsys, monkeypatch):
    """typer shows `--help <bool>`, which looks as if the option wanted a value."""
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--help " in shown and "bool" not in shown.lower()


def options_of_prune() -> set[str]:
    params = imported("prune").params
    return {param.opts[0] for param in params if param.param_type_name == "option"}


def options() -> dict[str, object]:
    """Every option of every command."""
    return {name: param for command in COMMANDS for param in imported(command).params for name in param.opts}


@pytest.mark.parametrize(
    ("option", "typed", "offered"),
    [("--method", "", set(get_args(Method))), ("--rotation", "s", {"shared", "stock"})],
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
    python_only = {"distillation", "models", "tokenizer"}
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
    for command in app.registered_commands:
        assert imported(command.name).help.split("\n")[0] == command.help
    code = "import sys; from drot.cli import app; app.run(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"pydantic", "drot.config", "drot.cli.prune", "drot.cli.sweep"} & set(loaded)
    assert "drot.cli.commands" in loaded


@pytest.mark.slow
def test_a_reader_of_stdout_that_has_ended_is_no_fault_of_drot():
    """As with `drot prune --help | head -1`."""
    for arguments in (["prune", "--help"], ["info", "--json"]):
        command = [sys.executable, "-P", "-c", "from drot.cli.app import main; main()", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert (process.stderr.read(), process.wait()) == (b"", 128 + signal.SIGPIPE)


def test_help_and_mistakes_import_no_torch(tmp_path):
    """torch takes seconds; an answer that needs no model comes without it."""
    write_manifest(tmp_path, made_manifest())
    lines = [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in COMMANDS),
        ["prune", "m", "--nothing"],
        ["prune", "m", "--out", "o", "--nsamples", "0"],
        ["prune", "m", "--out", "o", "--rotation", "none", "--lr", "1"],
        ["eval", "m", "--seqlen", "x"],
        ["eval", "./nothing"],
        ["eval", "m", "--against", "a/b/c"],
        ["eval", "m", "--ppl", "nothing.txt"],
        ["report", "nothing"],
        ["prune", "m", "--out", "o", "--calibration", "own,nothing.txt=2"],
        ["info", str(tmp_path)],
    ]
    code = (
        "import sys, json; from drot.cli import app; "
        "statuses = [app.run(line) for line in json.loads(sys.argv[1])]; "
        "print(statuses, {'torch', 'transformers'} & {*sys.modules})"
    )
    command = [sys.executable, "-P", "-c", code, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    statuses = [0] * (2 + len(COMMANDS)) + [2] * 9 + [0]
    assert done.stdout.splitlines()[-1] == f"{statuses} set()"


def test_a_warning_names_options(caplog, monkeypatch):
    """The library says it in the names of fields."""

    def info(*arguments, **options):
        logging.getLogger("drot").warning("`mode=none` leaves %s alike, or another `lr`", "`both`")
        logging.getLogger("another").warning("`mode=none` of another library")

    monkeypatch.setattr("drot.machine.environment.collect", info)
    monkeypatch.setattr("drot.cli.info._facts", lambda data: {})
    assert cli.run(["info"]) == 0
    assert caplog.messages == [
        "--rotation none leaves `both` alike, or another --lr",
        "`mode=none` of another library",
    ]


@pytest.mark.parametrize(
    ("command", "cure"), [("prune", "give --fit, as in --fit 24GB"), ("eval", "use another device")]
)
def test_a_full_device_is_no_fault_of_drot(command, cure):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    status, line = describe(error, debug=False, command=command)
    assert status == 2 and line.startswith(f"the device has too little memory: {cure}") and "2.00 GiB" in line
