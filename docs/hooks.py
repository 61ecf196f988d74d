"""Hooks of mkdocs: equations as MathML; the options and the error messages from drot itself."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import latex2mathml.converter
import typer.main

COMMANDS = "<!-- the commands of drot -->"
MESSAGES = "<!-- the messages of drot -->"
#: the exceptions whose messages a user meets
ERRORS = ("UserError", "WriteError", "BrokenModelError", "InvarianceError")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
DISPLAY = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
INLINE = re.compile(r"\$([^$\n]+?)\$")
#: escape sequences and rich markup in help texts
MARKUP = re.compile(r"\[/?[a-z ]+\]")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces $equations$ outside of code by MathML, which browsers draw without a script."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    if MESSAGES in markdown:
        markdown = markdown.replace(MESSAGES, messages())
    parts = CODE.split(markdown)
    return "".join(part if index % 2 else _equations(part) for index, part in enumerate(parts))


def _equations(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        return f"\n<div>{latex2mathml.converter.convert(match[1].strip(), display='block')}</div>\n"

    def inline(match: re.Match[str]) -> str:
        return latex2mathml.converter.convert(match[1])

    return INLINE.sub(inline, DISPLAY.sub(block, text))


def commands() -> str:
    """A section for each command: its first sentence, its usage, and a table of its options."""
    from drot.cli.app import app

    group: Any = typer.main.get_command(app)
    return "\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    lines = [f"## drot {name}", "", _text(command.help or ""), ""]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join(["drot", name, *(a.metavar for a in arguments), "[OPTIONS]"])
    lines += ["```text", usage, "```", ""]
    if arguments:
        lines += ["| argument | |", "|---|---|"]
        lines += [f"| `{a.metavar}` | {_text(a.help or '')} |" for a in arguments]
        lines.append("")
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    panel = None
    for option in options:
        if option.rich_help_panel != panel:
            panel = option.rich_help_panel
            lines += ["", f"**{panel or 'Options'}**", "", "| option | |", "|---|---|"]
        names = ", ".join(f"`{n}`" for n in (*option.opts, *option.secondary_opts))
        value = (option.metavar or "").strip()
        default = _default(option)
        lines.append(
            f"| {names}{f' `{_text(value)}`' if value else ''} | {_text(option.help or '')}{default} |"
        )
    if command.epilog:
        lines += ["", _text(command.epilog)]
    return "\n".join([*lines, ""])


def _default(option: Any) -> str:
    value = option.default
    if (
        value in (None, "", False, ())
        or option.is_flag
        or callable(value)
        or "Default" in (option.help or "")
    ):
        return ""
    return f" Default: `{value}`."


def _text(text: str) -> str:
    return MARKUP.sub("", " ".join(text.split())).replace("|", "\\|")


def messages() -> str:
    """The messages of drot's exceptions, as a list for each room."""
    import drot
    from drot.cli.app import in_options

    package = Path(drot.__file__).parent
    rooms: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for message in _messages(ast.parse(path.read_text(encoding="utf-8"))):
            text = in_options(message).replace("`", "").replace("\n", " ")
            rooms.setdefault(room, []).append(text)
    lines: list[str] = []
    for room, found in rooms.items():
        lines += ["", f"**{room}**", "", *(f"- `{text}`" for text in dict.fromkeys(found))]
    return "\n".join(lines)


def _messages(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ERRORS
            and node.args
        ):
            text = _written(node.args[0])
            if re.search(r"\w", text.replace("…", "")):
                yield text


def _written(node: ast.expr) -> str:
    """The text of a string expression, with … for each value that it formats."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_written(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _written(node.left) + _written(node.right)
    return "…"
