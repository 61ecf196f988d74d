"""The dataclasses of the configuration: each field once, with its type, bounds, default and description."""

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from drot.core.validation import user_error

Settings = TypeVar("Settings", bound=type)

#: A bool is no int and "4" is no number; the defaults are checked too.
STRICT = ConfigDict(
    strict=True,
    allow_inf_nan=False,
    validate_default=True,
    extra="forbid",
    use_attribute_docstrings=True,
)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def settings(cls: Settings) -> Settings:
    """Makes a class of declared fields a frozen dataclass, whose wrong values raise a UserError of one line.

    The docstring below a field describes it, in the reference and in the help of its option.
    """
    made: Any = dataclass(frozen=True, kw_only=True, config=STRICT)(cls)
    made.__init__ = _with_user_errors(made.__init__, fields_of(made))
    checked: Settings = made
    return checked


def fields_of(cls: type) -> dict[str, FieldInfo]:
    """Name → the declaration of each field of a class that `settings` made."""
    declared: dict[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return declared


def description_of(cls: type, field: str) -> str:
    """The description of a field, in one line."""
    return " ".join((fields_of(cls)[field].description or "").split())


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
