"""Results on stdout: JSON, lines, tables of text, and what a manifest says."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import to_jsonable_python
from rich.box import SIMPLE_HEAD
from rich.filesize import decimal as size_text
from rich.table import Table as RichTable

from drot.checkpoint.disk_space import weight_file_bytes, why_larger
from drot.cli.safe_text import SafeConsole

if TYPE_CHECKING:  # imported when something is printed: help prints no manifest
    from drot.checkpoint.manifest import CheckpointManifest
    from drot.checkpoint.tables import Table
    from drot.config import CalibrationConfig

#: characters of the longest number, such as `17414 → 15115`, and of the narrowest column that is folded
NUMBER, FOLDED = 16, 8


def output() -> SafeConsole:
    """A console that prints to the current stdout; 100 columns wide if stdout is not a terminal."""
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=100)


def print_json(data: Any) -> None:
    """Prints `data` as standard JSON, which has no Infinity and no NaN: they become null."""
    print(json.dumps(to_jsonable_python(data, inf_nan_mode="null")))


def print_line(line: str) -> None:
    """Prints one line on stdout, without breaking it."""
    output().print(line, soft_wrap=True)


def print_table(table: "Table", *, texts: int = 1, narrow: bool = False) -> None:
    """Prints a table, whose first `texts` columns hold text and whose others hold numbers.

    Nothing is cut off: what is too long is folded, and a number only where the numbers alone are too wide.
    narrow: without vertical lines.
    """
    console = output()
    look: dict[str, Any] = dict(box=SIMPLE_HEAD, padding=(0, 1, 0, 0)) if narrow else {}
    shown = RichTable(title=table.caption, title_justify="left", **look)
    longest = [max(len(row[index]) for row in table.cells if row) for index in range(len(table.headings))]
    whole = [index >= texts and size <= NUMBER for index, size in enumerate(longest)]
    taken = sum(size if keep else FOLDED for size, keep in zip(longest, whole, strict=True))
    room = taken + 3 * len(longest) < console.width
    for index, heading in enumerate(table.headings):
        justify: Literal["left", "right"] = "right" if index >= texts else "left"
        no_wrap = room and whole[index] and longest[index] >= len(heading)
        shown.add_column(heading, justify=justify, no_wrap=no_wrap, overflow="fold")
    for cells in table.cells:
        shown.add_row(*cells) if cells else shown.add_section()
    console.print(shown)


def print_facts(found: Iterable[tuple[str, str]]) -> None:
    """Prints a line for each fact: its name and its value."""
    lines = RichTable(show_header=False, box=None, pad_edge=False)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for name, value in found:
        lines.add_row(name, value)
    output().print(lines)


def saved_line(source: str, out: Path) -> str:
    """Says where a checkpoint was saved, and how many bytes its weights and those of its source have."""
    before, after = weight_file_bytes(source), weight_file_bytes(out)
    if after is None:
        return f"Saved to {out}"
    if before is None:  # a model on the hub
        return f"Saved to {out}: {size_text(after)}"
    why = f" ({why_larger(source, out)})" if after > before else ""
    sizes = f"{size_text(before)} -> {size_text(after)}"
    return f"Saved to {out}: {sizes}, {after / before:.2f} of the bytes{why}"


def judging(out: Path, text: "CalibrationConfig", against: str | None = None) -> tuple[str, str]:
    """The command that measures the perplexity of a checkpoint, and the text on which it does.

    text: with which the checkpoint was made. If it lies in files, the machine may have no network.
    against: the model with which the command compares the checkpoint.
    """
    from drot.text.names import are_files

    command, measured = f"drot eval {shlex.quote(str(out))}", "wikitext2"
    if against is not None:
        command = f"{command} --against {shlex.quote(against)}"
    if are_files(text.source):
        command, measured = f"{command} --ppl TEXT.txt", "a text of yours that drot has not read"
    if text.seqlen is not None:
        command = f"{command} --seqlen {text.seqlen}"
    return command, measured


def print_manifest(manifest: "CheckpointManifest") -> None:
    """Prints a few lines about a checkpoint and, if drot pruned it, a row for each layer and each phase."""
    from drot.checkpoint.manifest import Manifest
    from drot.checkpoint.tables import facts, layers_table, times_table

    print_facts(facts(manifest))
    if isinstance(manifest, Manifest):
        print_table(layers_table(manifest), texts=0)
        print_table(times_table(manifest))


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
