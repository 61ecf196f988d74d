"""Text in local files: all of it, or of a large file only what is needed."""

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from drot.core.errors import UserError, quoted
from drot.text.rows import SEPARATOR, SURROGATE, texts

#: bytes from which a .txt or .jsonl file is large, and characters that are read of any file
LARGE = 5_000_000
#: bytes that are read of a large file for each token that is needed; a token has about 4 characters
BYTES_A_TOKEN = 8
#: bytes of the longest line of a large .jsonl file
LONGEST_LINE = 1 << 26
#: characters that are decoded at a time
PART = 1 << 20
#: the entry of the first row of a text that a model wrote: SAMPLED, or the digest of the run that wrote it
WRITTEN_BY, SAMPLED = "written_by", "drot.sample"


def file_rows(path: Path) -> Iterator[Any]:
    """The rows of a file: a text, a table, a JSON list, one JSON object or JSON lines."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    content = _read_utf8(path)
    if path.suffix == ".txt":
        yield content
        return
    if path.suffix == ".json":
        try:
            data = json.loads(content or "[]")
            yield from data if isinstance(data, list) else [data]
            return
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # "Extra data" means JSON lines, which many .json files hold
                raise _not_json(path, error.lineno, error) from None
        except (RecursionError, ValueError) as error:  # deep nesting, or a number of thousands of digits
            raise _not_json(path, 1, error) from None
    yield from _json_lines(content, path, "line")


def author(path: Path) -> str | None:
    """The entry WRITTEN_BY of a .jsonl file; None of a text that no model wrote."""
    try:
        with path.open(encoding="utf-8") as rows:
            found = json.loads(rows.readline(LONGEST_LINE)).get(WRITTEN_BY)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) and re.fullmatch(rf"{SAMPLED}|[0-9a-f]{{64}}", found) else None


def _json_lines(content: str, path: Path, where: str) -> Iterator[Any]:
    # splitlines() would also split a string that contains U+2028 or U+0085
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (RecursionError, ValueError) as error:
                raise _not_json(path, number, error, where) from None


def _not_json(path: Path, line: int, error: Exception, where: str = "line") -> UserError:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else quoted(error)
    return UserError(f"{path}, {where} {line}: not valid JSON ({reason}); was the file cut off?")


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1000):
            yield from batch.to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a readable parquet file: {quoted(error)}") from None


def _read_utf8(path: Path) -> str:
    """The text of a file, as `_parts` gives it."""
    try:
        with path.open("rb") as handle:
            return "".join(_parts(path, handle))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _parts(path: Path, handle: IO[bytes], start: int = 0) -> Iterator[str]:
    """The text of `handle`, without a byte order mark and with one kind of line ends.

    It comes in parts, so that a wrong file ends early. Raises UserError unless it is UTF-8.

    start: the byte of the file at which `handle` begins.
    """
    reader = io.TextIOWrapper(handle, "utf-8" if start else "utf-8-sig")
    try:
        while part := reader.read(PART):
            if "\0" in part:  # UTF-16 of English text without a byte order mark is valid UTF-8
                raise _not_utf8(path)
            yield part
    except UnicodeDecodeError as error:
        utf16 = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        raise UserError(
            f"{path} must be UTF-8, got byte 0x{error.object[error.start]:02x} at offset "
            f"{start + handle.tell() - len(error.object) + error.start}: convert it, for example with iconv "
            f"-f {'utf-16' if utf16 else 'latin1'} -t utf-8"
        ) from None


def _not_utf8(path: Path) -> UserError:
    return UserError(
        f"{path} must be a text in UTF-8, got a zero byte: it is UTF-16 or no text; convert UTF-16 with "
        "iconv -f utf-16le -t utf-8"
    )


# ---- of a large file, only what is needed ------------------------------------------------------------


class LargeText:
    """Sequences of a large .txt or .jsonl file, of which no more is read than they need.

    For each sequence a byte of the file is drawn. The lines after it are tokenised on their own, and the
    sequence is drawn among their tokens.

    encode: function from a text to its token ids [n].
    """

    def __init__(self, path: Path, text_column: str, tokenizer: Any, encode: Callable[[str], Tensor]) -> None:
        self.path, self.size = path, path.stat().st_size
        self._column, self._tokenizer, self._encode = text_column, tokenizer, encode
        self._read = self._tokens = 0

    @property
    def tokens(self) -> int:
        """About how many tokens the file has, by those in the pieces that were read of it."""
        return self._tokens * self.size // self._read

    def sequences(self, nsamples: int, seqlen: int, seed: int, end: int | None = None) -> Tensor:
        """Token ids [nsamples, seqlen] from the bytes before `end`; None is the end of the file."""
        end, generator = self.size if end is None else end, torch.Generator().manual_seed(seed)
        drawn = [int(torch.randint(0, end, (1,), generator=generator)) for _ in range(nsamples)]
        rows = []
        for offset in drawn:
            ids = self._piece(offset, end, seqlen)[0]
            first = int(torch.randint(0, len(ids) - seqlen + 1, (1,), generator=generator))
            rows.append(ids[first : first + seqlen])
        return torch.stack(rows)

    def tail(self, count: int) -> tuple[Tensor, int]:
        """The last `count` token ids of the file, and the byte before which none of them lies."""
        ids, start = self._piece(self.size, self.size, count)
        return ids[-count:], start

    def _piece(self, offset: int, end: int, count: int) -> tuple[Tensor, int]:
        """At least `count` token ids from the bytes behind `offset`, or before `end`; and the first byte."""
        length = BYTES_A_TOKEN * count
        while True:
            start = max(0, min(offset, end - length))
            stop = min(end, start + length)
            ids = self._encode(self._text(start, stop))
            if len(ids) >= count:
                self._read += stop - start
                self._tokens += len(ids)
                return ids, start
            if length >= min(end, LONGEST_LINE + BYTES_A_TOKEN * count):
                raise UserError(
                    f"{self.path} must have at least {count} tokens, got {len(ids)}: lower `seqlen`"
                )
            length *= 2

    def _text(self, start: int, stop: int) -> str:
        """The documents in the whole lines between two bytes; the words of a .txt file without line ends."""
        with self.path.open("rb") as handle:
            handle.seek(start)
            content = handle.read(stop - start)
        if b"\0" in content:
            raise _not_utf8(self.path)
        is_text = self.path.suffix == ".txt"
        mark = b"\n" if not is_text or b"\n" in content else b" "
        first = start
        if start > 0:
            content = content.partition(mark)[2]
            first = stop - len(content)
        if stop < self.size:
            content = content.rpartition(mark)[0]
        text = "".join(_parts(self.path, io.BytesIO(content), first))
        if not is_text:
            where = f"behind byte {start}"
            rows = _json_lines(text, self.path, f"{where}, line")
            text = SEPARATOR.join(texts(rows, self._column, f"{self.path}, {where}", self._tokenizer))
        return SURROGATE.sub("\ufffd", text)
