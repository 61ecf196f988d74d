"""How `--help` shows what typer declares."""

from typing import Any


def without_flag_values(params: list[Any]) -> list[Any]:
    """`params`, in which the metavar of every option without a value is blank.

    typer itself would show `--resume <bool>`.
    """
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = " "
    return params
