"""The text in the rows of a dataset: a column of text, or of chats, which the chat template formats."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from drot.config import CalibrationConfig
from drot.core.errors import UserError, quoted

#: what stands between two documents
SEPARATOR = "\n\n"
#: half of a character outside of the first plane, which JSON can hold alone and UTF-8 cannot
SURROGATE = re.compile("[\ud800-\udfff]")
#: the column of a chat dataset, whose values are lists of {"role": ..., "content": ...}
MESSAGES = "messages"


def texts(rows: Iterable[Any], text_column: str, source: str, tokenizer: Any) -> Iterator[str]:
    """The text of every row. Rows whose text is null, as for removed documents, are left out."""
    for number, row in enumerate(rows, 1):
        column, text = text_column, row
        if isinstance(row, dict):
            if column == CalibrationConfig.text_column and column not in row and MESSAGES in row:
                column = MESSAGES
            if column not in row:
                raise UserError(
                    f"{source}, row {number}: there is no column {column!r}; the columns are "
                    f"{', '.join(map(str, row))}: name one of them as `text_column`"
                )
            text = row[column]
        if _is_chat(text):
            yield _format_chat(text, tokenizer, f"{source}, row {number}")
        elif isinstance(text, str):
            yield text
        elif text is not None:
            where = f"column {column!r}" if isinstance(row, dict) else "a row"
            raise UserError(
                f"{source}, row {number}: {where} must hold text or chats, got {type(text).__name__}: "
                "name another column as `text_column`"
            )


def _is_chat(value: Any) -> bool:
    """Whether `value` is a list of messages, each with a role and a content."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


def _format_chat(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f"{where} holds a chat, but the tokenizer of the model has no chat template: copy the "
            "tokenizer's files of a chat model, or name a column of text as `text_column`"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # the template is a program of the model's author
        raise UserError(
            f"{where}: the tokenizer's chat template refuses the chat ({quoted(error)}): leave it out"
        ) from error
