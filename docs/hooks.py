"""Hooks of mkdocs: equations as MathML; the commands and their options from drot itself."""

import html
import re
from typing import Any

import latex2mathml.converter

COMMANDS = "<!-- the commands of drot -->"
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
DISPLAY = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
INLINE = re.compile(r"\$([^$\n]+?)\$")
#: escape sequences and rich markup in help texts
MARKUP = re.compile(r"\[/?[a-z ]+\]")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces $equations$ outside of code by MathML, which browsers draw without a script."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    parts = CODE.split(markdown)
    return "".join(part if index % 2 else _equations(part) for index, part in enumerate(parts))


def _equations(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        equation = latex2mathml.converter.convert(match[1].strip(), display="block")
        return f'\n<div class="equation">{equation}</div>\n'

    def inline(match: re.Match[str]) -> str:
        # markdown takes a line that begins with <math> for a block of its own, which ends the paragraph
        return f"<span>{latex2mathml.converter.convert(match[1])}</span>"

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
        lines += [f"| {_code(a.metavar)} | {_text(a.help or '')} |" for a in arguments]
        lines.append("")
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    panel = None
    for option in options:
        if option.rich_help_panel != panel:
            panel = option.rich_help_panel
            lines += ["", f"**{panel or 'Options'}**", "", "| option | |", "|---|---|"]
        names = ", ".join(map(_code, (*option.opts, *option.secondary_opts)))
        value = (option.metavar or "").strip()
        default = _default(option)
        lines.append(
            f"| {names}{f' {_code(value)}' if value else ''} | {_text(option.help or '')}{default} |"
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
    return f" Default: {_code(str(value))}."


def _code(text: str) -> str:
    """Code in a cell of a table, where a backslash before a | would be shown. A line ends behind a |."""
    kind = ' class="option"' if text.startswith("-") else ""
    return f"<code{kind}>{html.escape(text).replace('|', '&#124;<wbr>')}</code>"


def _text(text: str) -> str:
    return MARKUP.sub("", " ".join(text.split())).replace("|", "\\|")
