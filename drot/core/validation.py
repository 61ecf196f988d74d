"""From pydantic's errors to drot's: one line that names the entry, what it must be, and what came."""

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from drot.core.checks import shortened
from drot.core.errors import UserError

#: most characters of a name from outside in a message
LONGEST_NAME = 300


def user_error(error: ValidationError, fields: Mapping[str, FieldInfo]) -> UserError:
    """The UserError for wrong values of a dataclass, whose first wrong field it names.

    fields: the fields of the dataclass by their names; their types and bounds say what a value must be.
    """
    first = error.errors(include_url=False)[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, UserError):  # of a check of drot, which names its fields itself
        return raised
    name = str(first["loc"][0])
    if name not in fields:
        return UserError(f"there is no field {shortened(name)} in {error.title}: it has {', '.join(fields)}")
    return UserError(f"`{name}` must be {expected(fields[name])}; got {shortened(first['input'])}")


def file_error(error: ValidationError, where: str) -> UserError:
    """The UserError for wrong entries of a file, of which it names the first.

    where: the name of the file.
    """
    first = error.errors(include_url=False)[0]
    entry = printable(".".join(str(part) for part in first["loc"]))
    if first["type"] == "extra_forbidden":
        return UserError(f"{where} has {entry}, which this version of drot does not support: update drot")
    if first["type"] == "missing":
        return UserError(f"{where} lacks {entry}: it was edited; copy it again")
    problem = first["msg"].removeprefix("Value error, ").replace("`", "'")
    return UserError(f"{where}: {entry}: {problem}, got {shortened(first['input'])}: copy the file again")


def expected(field: FieldInfo) -> str:
    """What a value of the field must be: its title, or as in `a whole number from 0 to 1000000`."""
    if field.title:
        return field.title
    if choices := choices_of(field.annotation):
        return f"one of {', '.join(choices)}"
    kind, bounds = members_of(field.annotation)[0], list(field.metadata)
    if typing.get_origin(kind) is typing.Annotated:
        kind, *annotations = typing.get_args(kind)
        bounds += [bound for each in annotations if isinstance(each, FieldInfo) for bound in each.metadata]
    if kind not in (int, float):
        return f"a {getattr(kind, '__name__', kind)}"
    number = "a whole number" if kind is int else "a finite number"
    limits = {
        name: f"{getattr(bound, name):{'' if kind is int else 'g'}}"
        for bound in bounds
        for name in ("ge", "gt", "le", "lt")
        if hasattr(bound, name)
    }
    if limits.keys() == {"ge", "le"}:
        return f"{number} from {limits['ge']} to {limits['le']}"
    words = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
    return " ".join([number, " and ".join(f"{words[name]} {limit}" for name, limit in limits.items())])


def members_of(annotation: Any) -> list[Any]:
    """The members of a union without None; of another type, the type alone."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return [annotation]
    return [member for member in typing.get_args(annotation) if member is not type(None)]


def choices_of(annotation: Any) -> list[str]:
    """The values of a Literal, or of a union of them; [] for another type."""
    literals = [member for member in members_of(annotation) if typing.get_origin(member) is Literal]
    return [str(value) for literal in literals for value in typing.get_args(literal)]


def printable(name: str) -> str:
    """The name of an entry: as it is, or as Python writes it if it is long or has control characters."""
    return name if name.isprintable() and len(name) <= LONGEST_NAME else shortened(name)
