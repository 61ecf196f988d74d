"""The dataclasses of the configuration: each field once, with its type, bounds, default and description."""

import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from drot.core.validation import user_error

Settings = TypeVar("Settings", bound=type)

#: A bool is no int and "4" is no number; the defaults are checked too.
CONFIG = ConfigDict(strict=True, allow_inf_nan=False, validate_default=True, extra="forbid")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def settings(cls: Settings) -> Settings:
    """Makes a class of declared fields a frozen dataclass, whose wrong values raise a UserError of one line.

    The descriptions of the fields become the part `Args` of its docstring.
    """
    made: Any = dataclass(frozen=True, kw_only=True, config=CONFIG)(cls)
    made.__init__ = _with_user_errors(made.__init__, fields_of(made))
    made.__doc__ = "\n\n".join(filter(None, [inspect.cleandoc(made.__doc__), _arguments(made)]))
    checked: Settings = made
    return checked


def fields_of(cls: type) -> dict[str, FieldInfo]:
    """Name → the declaration of each field of a class that `settings` made."""
    declared: dict[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return declared


def values_of(instance: Any) -> dict[str, Any]:
    """Name → value of each field of an instance."""
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def _with_user_errors(init: Callable[..., None], declared: dict[str, FieldInfo]) -> Callable[..., None]:
    @functools.wraps(init)
    def checked(self: Any, **values: Any) -> None:
        try:
            init(self, **values)
        except ValidationError as error:
            raise user_error(error, declared) from None

    return checked


def _arguments(cls: type) -> str:
    """The part `Args` of the docstring, for the fields that `cls` itself describes."""
    lines = [
        textwrap.fill(f"{name}: {text}", 106, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name in cls.__annotations__
        if (text := fields_of(cls)[name].description)
    ]
    return "\n".join(["Args:", *lines]) if lines else ""
