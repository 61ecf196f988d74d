"""Checks of arguments, with the argument's name in the message."""

import reprlib

from drot.core.errors import UserError

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 10
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200


def is_a(name: str, value: object, *types: type, or_none: bool = False) -> None:
    """Raises UserError unless `value` is an instance of one of `types`, or None where `or_none` allows it.

    A bool does not count as an int.
    """
    if (value is None and or_none) or (
        isinstance(value, types) and not (isinstance(value, bool) and bool not in types)
    ):
        return
    expected = " or ".join([*(kind.__name__ for kind in types), *(["None"] if or_none else [])])
    article = "an" if expected[0] in "aeiou" else "a"
    got = f"got {shortened(value)}, a {type(value).__name__}"
    raise UserError(f"`{name}` must be {article} {expected}; {got}")


def is_callable(name: str, value: object, *, or_none: bool = False) -> None:
    """Raises UserError unless `value` can be called, or is None where `or_none` allows it."""
    if not (callable(value) or (value is None and or_none)):
        raise UserError(f"`{name}` must be callable; got {shortened(value)}, a {type(value).__name__}")


def counted(count: int, noun: str) -> str:
    """A number with its noun, as in `1 layer` and `2 layers`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shortened(value: object) -> str:
    """`value` as Python writes it, in at most 60 characters.

    Aliases let a YAML file of a few lines stand for lists of billions of elements, so that not the whole of a
    value is written and then cut off.
    """
    try:
        text = " ".join(_SHORT.repr(value).split())
    except ValueError:  # a number of thousands of digits
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
