"""Texts of the library in the words of the command line: the option --hessians for the field `hessians`."""

import re
from collections.abc import Callable

from drot.config.recipe import SECTION_OF

#: field or argument → its option, where the names differ
FLAGS = {
    "mode": "--rotation",
    "blocks": "--rotation block:N",
    "source": "--calibration",
    "save_rotations_to": "--save-rotations",
    "batches": "--batch",
    "as_json": "--json",
}
#: command → options that replace those of FLAGS in its messages
FLAGS_OF_COMMANDS = {
    "finetune": {"source": "--text"},
    # fields of a recipe stand in the grid file, under their own names
    "sweep": {"ppl": "texts", **{name: name for name in SECTION_OF}},
}


def flag(field: str) -> str:
    """The option that sets a field: --block-size for `block_size`."""
    return FLAGS.get(field, "--" + field.replace("_", "-"))


def in_options(text: str, flag_of: Callable[[str], str | None]) -> str:
    """`text` with options in place of fields in backticks: --hessians dense for `hessians="dense"`.

    flag_of: field → its option; None for other names, which stay as they are.
    """

    def shown(quoted: re.Match[str]) -> str:
        name, _, value = quoted[1].partition("=")
        if (option := flag_of(name)) is None:
            return quoted[0]
        value = value.strip('"')
        return option if value in ("", "True") else f"{option} {value}"

    return re.sub("`([^`]*)`", shown, text)
