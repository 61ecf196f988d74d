"""The errors that a caller can mend."""


class UserError(ValueError):
    """A mistake in the input: one line that says what was expected, what came and what to do.

    The command line prints it and exits with status 2; anything else is a fault of ours (status 1).
    """
