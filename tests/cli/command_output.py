"""Helpers for tests of the command line."""


def one_line(text):
    """`text`, which must be the one line of an error message of drot."""
    assert text.count("\n") == 1 and text.startswith("drot: "), text
    return text
