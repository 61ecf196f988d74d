"""Calibration tokens: from the hub, from a local file, or from a tensor of token ids."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.errors import UserError

#: hub name → (dataset, configuration or data file, whether it is streamed document by document)
HUB = {
    "c4": {"path": "allenai/c4", "data_files": "en/c4-train.00000-of-01024.json.gz", "streaming": True},
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "streaming": False},
}
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
    """The text of a source, documents joined by a blank line.

    enough: stop a streamed hub dataset behind that many tokens' worth of text (8 characters a token).
    """
    path = Path(source)
    if source in HUB and not path.exists():
        documents = _hub_documents(source, split, text_column)
    elif not path.exists():
        raise UserError(
            f"calibration or evaluation source {source!r} is neither a file nor one of {', '.join(HUB)}"
        )
    elif path.suffix not in SUFFIXES:
        raise UserError(
            f"{source}: unknown kind of file {path.suffix!r}; expected one of {', '.join(SUFFIXES)}"
        )
    elif path.suffix == ".txt":
        documents = iter([path.read_text(encoding="utf-8")])
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
            "or calibrate on a local file with --calibration PATH"
        ) from None
    try:
        rows = datasets.load_dataset(**HUB[source], split=split)
        yield from (_text_of(row, text_column, source) for row in rows)
    except UserError:
        raise
    except Exception as error:  # datasets raises many kinds for "no network"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot read {HUB[source]['path']} from the hub ({reason}); "
            "without a network, use a local file: --calibration PATH"
        ) from error


def _file_documents(path: Path, text_column: str) -> Iterator[str]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        try:
            rows: Any = parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a readable parquet file: {error}") from None
    else:
        rows = _json_rows(path)
    for row in rows:
        yield _text_of(row, text_column, str(path))


def _json_rows(path: Path) -> Iterator[Any]:
    """Rows of a JSON list, of one JSON object, or of JSON lines, whichever the file is."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            data = json.loads(content or "[]")
            yield from data if isinstance(data, list) else [data]
            return
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # JSON lines under the name .json are common
                raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not valid JSON ({error.msg})") from None


def _text_of(row: Any, text_column: str, source: str) -> str:
    if isinstance(row, str):
        return row
    if not isinstance(row, dict) or not isinstance(row.get(text_column), str):
        there = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"{source} has no text column {text_column!r}; there is: {there} (--text-column)")
    return row[text_column]
