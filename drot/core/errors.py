"""The errors whose message is one line for the user, and the quotes of other errors in it."""

from collections.abc import Sequence
from typing import Any

#: most characters of a library's message in a message of drot
LONGEST_QUOTE = 300


class UserError(ValueError):
    """A mistake in the input: one line that says what was expected, what came and what to do.

    The message names configuration fields and arguments as Python does, in backticks: `hessians`, or with
    a value `hessians="dense"`, `resume=True`. The command line shows them as its options (drot/cli/app.py),
    prints the line and exits with status 2. Every other exception is a fault of drot (status 1).
    """


class ToldElsewhere(UserError):
    """An error that another rank of the run tells (drot/machine/ranks.py)."""


class BrokenModelError(ArithmeticError):
    """A model whose loss is NaN or infinite, so that no measure of it means anything.

    finished: the figures of the models that were measured beside it.

    The message is one line. The command line prints it and exits with status 1.
    """

    finished: Sequence[dict[str, Any]] = ()


def quoted(error: BaseException) -> str:
    """The message of a library's exception, as one line that a message of drot can quote.

    Backticks would name a field of drot. The name of the class goes before a message that says little without
    it, such as KeyError's.
    """
    text = " ".join(str(error).replace("`", "'").split())
    if not text or isinstance(error, LookupError | ArithmeticError | TypeError | AttributeError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3] + "..."
