"""Hooks of mkdocs: equations as MathML; the options and the error messages from drot itself."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import latex2mathml.converter

MARK = "<!-- the commands of drot -->"
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
    if MARK in markdown:
        markdown = markdown.replace(MARK, commands())
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
    from drot.cli.commands import COMMANDS, imported

    return "\n".join(_command(name, imported(name)) for name in COMMANDS)


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
    from drot.cli.messages import flag, in_options

    package = Path(drot.__file__).parent
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    constants = {name: text for tree in trees.values() for name, text in _constants(tree)}
    rooms: dict[str, list[str]] = {}
    for path, tree in trees.items():
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for message in errors_of(tree, constants):
            if not re.search(r"\w", message):  # a name before the message of another exception
                continue
            text = in_options(message, flag).replace("`", "").replace("\n", " ")
            rooms.setdefault(room, []).append(text)
    lines: list[str] = []
    for room, found in rooms.items():
        lines += ["", f"**{room}**", "", *(f"- `{text}`" for text in dict.fromkeys(found))]
    return "\n".join(lines)


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names of a module that stand for a text, with the text."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr):
            yield from (
                (target.id, written(node.value)) for target in node.targets if isinstance(target, ast.Name)
            )


def errors_of(tree: ast.AST, constants: Mapping[str, str]) -> Iterator[str]:
    """The message of each exception of ERRORS that a module makes, and of each access to the hub.

    constants: name → the text for which the name stands.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id in ERRORS:
                yield written(node.args[0], constants)
            elif node.func.id == "hub_access":
                problem, advice = (written(argument, constants) for argument in node.args)
                yield f"{problem} (…): {advice}"


def written(node: ast.expr, constants: Mapping[str, str] = MappingProxyType({})) -> str:
    """The text of a string expression, with … for each value that it formats.

    constants: name → the text for which the name stands.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part, constants) for part in node.values)
    if isinstance(node, ast.BinOp):
        return written(node.left, constants) + written(node.right, constants)
    if isinstance(node, ast.Name):
        return constants.get(node.id, "…")
    return "…"
