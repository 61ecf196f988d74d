"""What the commands say on stderr: messages, and the form of their progress."""

import sys

from drot.core.errors import UserError

#: the values of --progress. auto: bars on a terminal, otherwise lines.
FORMS = ("auto", "json", "none")


class Form:
    """The form of the progress of the command that runs."""

    chosen = FORMS[0]

    @classmethod
    def choose(cls, form: str) -> None:
        """Raises UserError unless `form` is one of FORMS."""
        if form not in FORMS:
            raise UserError(f"`progress` must be one of {', '.join(FORMS)}; got {form!r}")
        cls.chosen = form


def tell(text: str) -> None:
    """Prints a message to stderr."""
    print(text, file=sys.stderr)
