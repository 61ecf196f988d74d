"""The errors whose message is one line for the user."""


class UserError(ValueError):
    """A mistake in the input: one line that says what was expected, what came and what to do.

    The message names configuration fields and arguments as Python does, in backticks: `hessians`, or with
    a value `hessians="dense"`, `resume=True`. The command line shows them as its options (drot/cli/app.py),
    prints the line and exits with status 2. Every other exception is a fault of drot (status 1).
    """


class BrokenModelError(ArithmeticError):
    """A model whose loss is NaN or infinite, so that no measure of it means anything.

    The message is one line, as that of a UserError. The command line prints it and exits with status 1.
    """
