"""Checks of single values, with the field's name in the message."""

import math
import typing
from pathlib import Path
from typing import Any

from drot.errors import UserError


def one_of(name: str, value: object, allowed: Any) -> None:
    choices = typing.get_args(allowed)
    if value not in choices:
        raise UserError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}")


def at_least(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not (_is_finite(value) and low <= value <= high):
        allowed = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise UserError(f"`{name}` must be a finite number {allowed}; got {value!r}")


def above_zero(name: str, value: float, high: float = math.inf) -> None:
    if not (_is_finite(value) and 0 < value <= high):
        limit = "" if high == math.inf else f" and at most {high:g}"
        raise UserError(f"`{name}` must be a finite number above 0{limit}; got {value!r}")


def whole_number(name: str, value: int, low: int, high: int | None = None) -> None:
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"`{name}` must be a whole number {allowed}; got {value!r}")


def is_a(name: str, value: object, *types: type, or_none: bool = False) -> None:
    """Raises UserError unless `value` is an instance of one of `types`, or None where `or_none` allows it.

    A bool does not count as an int.
    """
    if (value is None and or_none) or (
        isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
    ):
        return
    expected = " or ".join([*(kind.__name__ for kind in types), *(["None"] if or_none else [])])
    raise UserError(f"`{name}` must be a {expected}; got {_shortened(value)}, a {type(value).__name__}")


def path_exists(path: Path) -> bool:
    """Whether there is such a file or folder; False for a name that is too long for a file."""
    try:
        return path.exists()
    except OSError:
        return False


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shortened(value: object) -> str:
    """`value` as Python writes it, in at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
