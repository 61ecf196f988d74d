"""Calibration tokens: from the hub, from a local file, or from a tensor of token ids."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.errors import UserError

#: hub name → arguments of datasets.load_dataset; a streamed one comes document by document
HUB = {
    "c4": {"path": "allenai/c4", "data_files": "en/c4-train.00000-of-01024.json.gz", "streaming": True},
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "streaming": False},
}
#: hub names that calibrate (split `train`) and those that evaluate (split `test`)
SPLITS = {"train": ("c4", "wikitext2"), "test": ("wikitext2",)}
OPTION = {"train": "--calibration", "test": "--ppl"}
SUFFIXES = (".txt", ".json", ".jsonl", ".parquet")
SEPARATOR = "\n\n"


def load_calibration(
    source: str | Tensor, tokenizer: Any, *, nsamples: int, seqlen: int, seed: int, text_column: str
) -> Tensor:
    """Token ids [nsamples, seqlen], int64, on the CPU.

    source: `c4`, `wikitext2` (train splits, through `datasets`), a .txt/.json/.jsonl/.parquet file,
    or a tensor [nsamples, seqlen] of ids, whose shape then counts. Documents are joined by a blank
    line, tokenised without special tokens, and windows start where
    torch.Generator().manual_seed(seed) says, one draw a window.

    Raises UserError, in one line, for a source that is missing, empty, unreadable or too short.
    """
    if isinstance(source, Tensor):
        return check_tokens(source)
    ids = tokenize(read_text(source, "train", text_column, enough=nsamples * seqlen), tokenizer)
    if len(ids) <= seqlen:
        raise UserError(
            f"calibration text {source!r} has {len(ids)} tokens, more than seqlen {seqlen} are needed: "
            "lower --seqlen or give a longer text"
        )
    generator = torch.Generator().manual_seed(seed)
    starts = [int(torch.randint(0, len(ids) - seqlen, (1,), generator=generator)) for _ in range(nsamples)]
    return torch.stack([ids[start : start + seqlen] for start in starts])


def check_tokens(tokens: Tensor) -> Tensor:
    """A tensor of token ids as int64 on the CPU; UserError unless it is [nsamples, seqlen] integers."""
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.is_complex() or 0 in tokens.shape:
        raise UserError(
            "calibration tokens must be integers of shape [nsamples, seqlen], "
            f"got {str(tokens.dtype).removeprefix('torch.')} of shape {list(tokens.shape)}"
        )
    return tokens.long().cpu()


def calibration_hash(tokens: Tensor) -> str:
    """sha256 of the ids as little-endian int64, for the manifest."""
    return hashlib.sha256(tokens.long().cpu().contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def tokenize(text: str, tokenizer: Any) -> Tensor:
    """ids [n] of a text, without special tokens."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.long)


def read_text(source: str, split: str, text_column: str, *, enough: int | None = None) -> str:
    """The text of a source, documents joined by a blank line; those without text are left out.

    split: `train` or `test`, of a hub name; a file is read whole.
    enough: stop a streamed hub dataset behind that many tokens' worth of text (8 characters a token).
    Raises UserError, in one line, for a source that is missing, empty or unreadable.
    """
    path = Path(source)
    if source in SPLITS[split] and not path.exists():
        documents = _hub_documents(source, split, text_column)
    elif not path.is_file():
        raise UserError(
            f"{OPTION[split]} takes {', '.join(SPLITS[split])} or a {', '.join(SUFFIXES)} file; "
            f"got {source!r}, which is " + ("a folder" if path.is_dir() else "neither")
        )
    elif path.suffix not in SUFFIXES:
        raise UserError(
            f"{source}: unknown kind of file {path.suffix!r}; expected one of {', '.join(SUFFIXES)}"
        )
    elif path.suffix == ".txt":
        documents = iter([_content(path)])
    else:
        documents = _file_documents(path, text_column)
    parts, length = [], 0
    for document in documents:
        parts.append(document)
        length += len(document)
        if enough is not None and source == "c4" and length > 8 * enough:
            break
    text = SEPARATOR.join(parts)
    if not text.strip():
        raise UserError(f"{source} is empty: it holds no text")
    return text


def _hub_documents(source: str, split: str, text_column: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{source!r} comes from the hub and needs `datasets`: pip install datasets, "
            f"or use a local file: {OPTION[split]} PATH"
        ) from None
    try:
        rows = datasets.load_dataset(**HUB[source], split=split)
        yield from _texts(rows, text_column, source)
    except UserError:
        raise
    except Exception as error:  # datasets raises many kinds for "no network"
        raise UserError(
            f"cannot read {HUB[source]['path']} from the hub ({_reason(error)}); "
            f"without a network, use a local file: {OPTION[split]} PATH"
        ) from error


def _content(path: Path) -> str:
    """The text of a file; a byte order mark is no part of it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} must be UTF-8, got byte 0x{error.object[error.start]:02x} at {error.start}: "
            "convert it, for example with iconv -f latin1 -t utf-8"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _file_documents(path: Path, text_column: str) -> Iterator[str]:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet as parquet

        try:
            rows: Any = parquet.read_table(path).to_pylist()
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UserError(f"{path} is not a readable parquet file: {_reason(error)}") from None
    else:
        rows = _json_rows(path)
    yield from _texts(rows, text_column, str(path))


def _json_rows(path: Path) -> Iterator[Any]:
    """Rows of a JSON list, of one JSON object, or of JSON lines, whichever the file is."""
    content = _content(path)
    if path.suffix == ".json":
        try:
            data = json.loads(content or "[]")
            yield from data if isinstance(data, list) else [data]
            return
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # JSON lines under the name .json are common
                raise _not_json(path, error.lineno, error) from None
    # not splitlines(), which also parts a line at U+2028 and its like inside a string
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise _not_json(path, number, error) from None


def _not_json(path: Path, line: int, error: json.JSONDecodeError) -> UserError:
    return UserError(f"{path}, line {line}: not valid JSON ({error.msg}); was the file cut off?")


def _texts(rows: Iterable[Any], text_column: str, source: str) -> Iterator[str]:
    """The text of every row; a null, which datasets have for a document that was removed, is left out."""
    for row in rows:
        text = row.get(text_column) if isinstance(row, dict) else row
        if isinstance(text, str):
            yield text
        elif isinstance(row, dict) and text_column not in row:
            raise UserError(
                f"{source} has no text column {text_column!r}; there is: {', '.join(map(str, row))} "
                "(--text-column)"
            )
        elif text is not None:
            where = f"column {text_column!r}" if isinstance(row, dict) else "a row"
            raise UserError(
                f"{source}: {where} must hold text, got {type(text).__name__} (--text-column names another)"
            )


def _reason(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
