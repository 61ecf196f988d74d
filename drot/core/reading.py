"""Reading of JSON files, and the check of their content by a schema."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from drot.core.checks import shortened
from drot.core.errors import UserError, quoted
from drot.core.validation import file_error, printable

#: largest depth of nested lists and objects; no file that drot reads has more than 8 levels
DEEPEST = 64
#: largest whole number: that of an int64
LARGEST = 2**63 - 1
#: Largest float, and the inverse of the smallest but 0. No figure is near to it, and no quotient of two
#: figures and no product overflows.
LARGEST_FLOAT = 1e100

Schema = TypeVar("Schema", bound=BaseModel)


class Entries(BaseModel):
    """Entries of a JSON object. Entries that are not declared are kept."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, whose numbers are finite, and neither too large nor too small.

    Raises UserError that names the file, and the entry where there is one: for a file that is missing, not a
    file, not UTF-8 or not JSON, for anything but an object, for deep nesting, and for NaN and other numbers
    that no file should hold.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: copy the folder again") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    return parse_json(content, str(file))


def parse_json(content: bytes, file: str) -> dict[str, Any]:
    """The JSON object in `content`, as for `read_json`. Messages name it `file`."""
    try:
        data = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise UserError(f"{file} is nested too deeply: copy it again") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise UserError(f"{file} is not valid JSON ({quoted(error)}): copy it again") from None
    if not isinstance(data, dict):
        raise UserError(f"{file} must hold a JSON object, got {shortened(data)}: copy it again")
    _check_values(data, file)
    return data


def _check_values(data: dict[str, Any], file: str) -> None:
    waiting: list[tuple[str, Any, int]] = [("", data, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, float) and value and not 1 / LARGEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
            raise UserError(f"{file}: {name} must be a finite number, got {value}: copy the file again")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{file}: {name} must be a number of 64 bits, got {shortened(value)}")
        if isinstance(value, dict | list) and depth == DEEPEST:
            raise UserError(f"{file} is nested more than {DEEPEST} levels deep: copy it again")
        if isinstance(value, dict):
            prefix = f"{name}." if name else ""
            waiting += [(f"{prefix}{printable(key)}", item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{name}.{index}", item, depth + 1) for index, item in enumerate(value)]


def check_schema(schema: type[Schema], data: Any, where: str) -> Schema:
    """`data` as an instance of its schema. Raises UserError unless it fits.

    The message names `where`, the first wrong entry and its value.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise file_error(error, where) from None
