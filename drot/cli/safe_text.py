"""Text from outside on a terminal: names, paths and manifests with control characters and rich's markup."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unicodedata import category

from rich.console import Console
from rich.text import Text

#: the controls of the direction of text, which can show a text in another order
DIRECTIONS = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def visible(text: str) -> str:
    r"""`text` with an escape, such as \x1b, for each character that a terminal would obey or not show.

    A terminal obeys control characters: they move the cursor, change colours and overwrite lines. Line feeds
    are escaped too, so that a name cannot pass for another line of output.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def readable(text: str) -> str:
    """Text of any language, with an escape for each character that a terminal would obey.

    Line feeds and tabs stay, and so do the spaces and joiners that `visible` escapes: they belong to words.
    """

    def is_obeyed(character: str) -> bool:
        control = category(character) in ("Cc", "Cs") and character not in "\n\t"
        return control or character in DIRECTIONS

    return "".join(visible(character) if is_obeyed(character) else character for character in text)


class SafeConsole(Console):
    """A console that prints strings without markup and as `visible` has them, in tables too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """The string as rich prints it. rich calls this method for each string and each cell of a table."""
        return super().render_str(visible(text), **settings)


@contextlib.contextmanager
def safe_log_messages(in_words: Callable[[str], str]) -> Iterator[None]:
    """Makes each line of the log messages of drot and of all libraries `visible`.

    The messages quote names of files and tensors.

    in_words: what makes options of the fields that drot's own messages name.
    """

    class SafeRecord(logging.LogRecord):
        def getMessage(self) -> str:
            text = super().getMessage()
            if self.name == "drot":
                text = in_words(text)
            return "\n".join(map(visible, text.split("\n")))

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(SafeRecord)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)
