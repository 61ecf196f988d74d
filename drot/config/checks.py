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
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= low):
        raise UserError(f"`{name}` must be a finite number of at least {low}; got {value!r}")


def whole_number(name: str, value: int, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"`{name}` must be a whole number {allowed}; got {value!r}")
