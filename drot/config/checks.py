"""Checks of single values, with the field's name in the message."""

import math
import typing
from typing import Any

from drot.errors import UserError


def one_of(name: str, value: object, allowed: Any) -> None:
    choices = typing.get_args(allowed)
    if value not in choices:
        raise UserError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}")


def at_least(name: str, value: float, low: float) -> None:
    if not (_finite(value) and value >= low):
        raise UserError(f"`{name}` must be a finite number of at least {low}; got {value!r}")


def above_zero(name: str, value: float) -> None:
    if not (_finite(value) and value > 0):
        raise UserError(f"`{name}` must be a finite number above 0; got {value!r}")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole_number(name: str, value: int, low: int, high: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"`{name}` must be a whole number {allowed}; got {value!r}")


def true_or_false(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise UserError(f"`{name}` must be true or false; got {value!r}")


def text(name: str, value: str) -> None:
    if not isinstance(value, str) or not value:
        raise UserError(f"`{name}` must be text; got {value!r}")
