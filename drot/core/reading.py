"""Reading of files that a stranger may have written: bounded, strict JSON, and checked by a schema."""

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from drot.core.checks import shortened
from drot.core.errors import UserError, quoted
from drot.core.validation import file_error, printable

#: largest depth of nested lists and objects; no file that drot reads has more than 8 levels
DEEPEST = 64
#: bytes of the largest JSON file that is read; the manifest of a model of 126 layers has about 5 MB
LARGEST_FILE = 2**26
#: largest whole number: that of an int64
LARGEST = 2**64 - 1
#: Largest float, and the inverse of the smallest but 0. No figure is near to it, and no quotient of two
#: figures and no product overflows.
LARGEST_FLOAT = 1e100
#: the entry of a config with bounds, of which the upper one may be infinite
OPEN_ENDED = "time_step_limit"

Schema = TypeVar("Schema", bound=BaseModel)


class Entries(BaseModel):
    """Entries of a JSON object. Entries that are not declared are kept."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, whose numbers are finite, and neither too large nor too small.

    Raises UserError that names the file, and the entry where there is one: as `read_bytes` does, for a file
    that is not UTF-8 or not JSON, for anything but an object, for a key that stands twice, for deep nesting,
    and for NaN and other numbers that no file should hold.
    """
    return parse_json(read_bytes(file), str(file))


def read_bytes(file: Path, largest: int = LARGEST_FILE) -> bytes:
    """The content of a file. Raises UserError as `check_regular` does."""
    check_regular(file, largest)
    try:
        with file.open("rb") as handle:
            # read(n) takes memory for n bytes at once, however short the file is.
            content = handle.read(min(largest, os.fstat(handle.fileno()).st_size))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    return content


def check_regular(file: str | os.PathLike[str], largest: int | None = None) -> None:
    """Raises UserError unless `file` is a file, and of at most `largest` bytes.

    The reading of a pipe or a device might never end, and a file of any size may take no space on the disk.
    """
    try:
        found = os.stat(file)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: name another, or copy it") from None
    except OSError as error:
        raise UserError(f"cannot read {shortened(str(file))}: {error.strerror}") from None
    if largest is not None and found.st_size > largest:
        raise UserError(
            f"{file} must have at most {largest} bytes, got {found.st_size}: it is not what its name says"
        )
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a device or a socket"
        raise UserError(f"{file} must be a file, got {what}: copy it again, or name another")


def parse_json(content: bytes, file: str) -> dict[str, Any]:
    """The JSON object in `content`, as for `read_json`. Messages name it `file`."""
    try:
        data = strict_json(content.decode("utf-8"))
    except RecursionError:
        raise UserError(f"{file} is nested too deeply: copy it again") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise UserError(f"{file} is not valid JSON ({quoted(error)}): copy it again") from None
    if not isinstance(data, dict):
        raise UserError(f"{file} must hold a JSON object, got {shortened(data)}: copy it again")
    _check_values(data, file)
    return data


def strict_json(text: str) -> Any:
    """What json.loads returns. Raises ValueError for a key that stands twice, with the lines that hold it."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            name = re.compile(re.escape(json.dumps(twice)) + r"\s*:")
            lines = [text.count("\n", 0, match.start()) + 1 for match in name.finditer(text)]
            raise ValueError(f"{shortened(twice)} stands twice in one object, see lines {str(lines)[1:-1]}")
        return found

    return json.loads(text, object_pairs_hook=pairs)


def _check_values(data: dict[str, Any], file: str) -> None:
    waiting: list[tuple[str, Any, int]] = [("", data, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        unbounded = value == math.inf and OPEN_ENDED in name.split(".")
        is_number = isinstance(value, float) and value != 0 and not unbounded
        if is_number and not 1 / LARGEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
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


def leaves(entries: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Name and value of each entry, and of each entry of its objects in its place, as `rotation.steps`."""
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def check_schema(schema: type[Schema], data: Any, where: str) -> Schema:
    """`data` as an instance of its schema. Raises UserError unless it fits.

    The message names `where`, the first wrong entry and its value.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise file_error(error, where) from None
