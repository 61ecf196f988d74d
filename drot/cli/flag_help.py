"""How `--help` shows options without a value."""

from typing import Any


def without_flag_values(params: list[Any]) -> list[Any]:
    """`params`, whose options without a value have a blank metavar: typer would show `--resume <bool>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = " "
    return params
