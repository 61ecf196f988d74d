"""Token ids from the Hugging Face hub, a local file or a tensor of token ids."""

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.config import CalibrationConfig
from drot.core.checks import path_exists, shortened
from drot.core.errors import UserError, quoted
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.hub import hub_access
from drot.text.rows import texts

#: Source on the hub with a short name → arguments of datasets.load_dataset. A streamed dataset is read row by
#: row, and only as far as it is needed.
HUB: dict[str, dict[str, Any]] = {
    "c4": {"path": "allenai/c4", "data_files": "en/c4-train.00000-of-01024.json.gz", "streaming": True},
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "streaming": False},
}
#: any dataset on the hub: org/name, org/name:split or org/name:config:split
DATASET = re.compile(r"(?P<path>\w[\w.-]*/[\w.-]+)((:(?P<name>[\w.-]+))?:(?P<split>[\w.-]+))?")
#: Split → the sources on the hub that have it. `train` is for calibration, `test` for evaluation.
SPLITS = {"train": ("c4", "wikitext2"), "test": ("wikitext2",)}
#: Split → the argument by which a caller names its source, for error messages.
ARGUMENT = {"train": "source", "test": "ppl"}
SUFFIXES = (".txt", ".json", ".jsonl", ".parquet")
SEPARATOR = "\n\n"
#: characters between two events `read`
READ_EVERY = 1 << 20


def load_calibration(settings: CalibrationConfig, tokenizer: Any, progress: Progress = silent) -> Tensor:
    """Token ids [nsamples, seqlen], int64, on the CPU, of the text of `settings`, whose seqlen is known.

    Documents are joined by a blank line and tokenised without special tokens. Each sequence starts at a
    position drawn from torch.Generator().manual_seed(seed).

    Raises UserError for a source that is missing, empty, unreadable or too short.

    progress: receives the events of `read_text` and `tokenize`.
    """
    source, nsamples, seqlen = settings.source, settings.nsamples, settings.seqlen
    assert seqlen is not None
    text = read_text(
        source, "train", settings.text_column, tokenizer, max_tokens=nsamples * seqlen, progress=progress
    )
    ids = tokenize(text, tokenizer, progress)
    starts = len(ids) - seqlen
    if starts <= 0:
        raise UserError(
            f"the calibration text must have more tokens than `seqlen`, {seqlen}; {source!r} has {len(ids)}: "
            "lower `seqlen` or give a longer text"
        )
    if nsamples > starts:
        raise UserError(
            f"`nsamples` must be at most {starts}, the number of places in {source!r} where a sequence of "
            f"{seqlen} tokens can start; got {nsamples}: lower `nsamples` or give a longer text"
        )
    return draw_sequences(ids, nsamples=nsamples, seqlen=seqlen, seed=settings.seed)


def draw_sequences(ids: Tensor, *, nsamples: int, seqlen: int, seed: int) -> Tensor:
    """Sequences [nsamples, seqlen] of the token ids [n], n > seqlen, which start at random positions."""
    generator = torch.Generator().manual_seed(seed)
    starts = [int(torch.randint(0, len(ids) - seqlen, (1,), generator=generator)) for _ in range(nsamples)]
    return torch.stack([ids[start : start + seqlen] for start in starts])


def as_token_ids(tokens: Tensor) -> Tensor:
    """`tokens` as int64 on the CPU. Raises UserError unless they are integers [nsamples, seqlen]."""
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.is_complex() or 0 in tokens.shape:
        raise UserError(
            "calibration tokens must be integers of shape [nsamples, seqlen], "
            f"got {str(tokens.dtype).removeprefix('torch.')} of shape {list(tokens.shape)}"
        )
    return tokens.long().cpu()


def calibration_hash(tokens: Tensor) -> str:
    """The SHA-256 of token ids, written as little-endian int64; identifies the calibration data."""
    return hashlib.sha256(tokens.long().cpu().contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def tokenize(text: str, tokenizer: Any, progress: Progress = silent) -> Tensor:
    """The token ids [n] of a text, without special tokens.

    The text goes to the tokenizer in one piece: at the borders of pieces, merges would be lost. So there is
    one event, `tokenize`, before the work, with the number of characters.
    """
    progress(ProgressEvent(phase="tokenize", steps=len(text)))
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.long)


def read_text(
    source: str,
    split: str,
    text_column: str,
    tokenizer: Any = None,
    *,
    max_tokens: int | None = None,
    progress: Progress = silent,
) -> str:
    """The text of a source: its documents, joined by a blank line. Documents without text are left out.

    A row of a chat dataset is one document, formatted by the chat template of the tokenizer.

    Raises UserError for a source that is missing, empty or unreadable.

    Args:
        source: a local .txt, .json, .jsonl or .parquet file, which is read whole; a name in HUB; or a dataset
            on the hub: `org/name`, `org/name:split` or `org/name:config:split`.
        split: `train` or `test`, the split of a dataset on the hub whose name does not say one.
        text_column: the column that holds text, or chats as lists of {"role": ..., "content": ...}. If there
            is no column `text`, the default, it is `messages`.
        tokenizer: the tokenizer, needed for chats only.
        max_tokens: stops reading a streamed dataset when the text is long enough for this many tokens, at 8
            characters a token.
        progress: receives the event `read`, with the number of characters, at the beginning and after every
            READ_EVERY characters.
    """
    hub = _hub_arguments(source, split)
    if hub is None:
        rows, enough = _file_rows(_file(source, split)), 0
    else:
        rows = _hub_rows(source, hub, ARGUMENT[split])
        enough = 8 * max_tokens if max_tokens is not None and hub["streaming"] else 0
    progress(ProgressEvent(phase="read", steps=enough))
    parts, length, reported = [], 0, 0
    for document in texts(rows, text_column, source, tokenizer):
        parts.append(document)
        length += len(document)
        if length - reported >= READ_EVERY:
            progress(ProgressEvent(phase="read", step=length, steps=enough))
            reported = length
        if enough and length > enough:
            break
    text = SEPARATOR.join(parts)
    if not text.strip():
        raise UserError(f"{source} is empty: give a source with text")
    return text


# ---- from the hub ------------------------------------------------------------------------------------


def _hub_arguments(source: str, split: str) -> dict[str, Any] | None:
    """The arguments of datasets.load_dataset for `source`; None if `source` is no dataset on the hub."""
    if source in SPLITS[split]:  # ./c4 names a file or a folder c4
        return HUB[source] | {"split": split}
    found = DATASET.fullmatch(source)
    if found is None or path_exists(Path(source)) or Path(source).suffix in SUFFIXES:
        return None
    return {"path": found["path"], "name": found["name"], "split": found["split"] or split, "streaming": True}


def _hub_rows(source: str, hub: dict[str, Any], argument: str) -> Iterator[Any]:
    """The rows of the dataset that datasets.load_dataset gives for `hub`. Messages name it `argument`."""
    import datasets

    path = hub["path"]
    if path_exists(Path(path)):
        raise UserError(
            f"the current folder holds {path}, which the package datasets would read in place of the dataset "
            f"{source}: start drot in another folder"
        )
    with hub_access(
        f"cannot read {path} from the hub", f"without a network, name a local file as `{argument}`"
    ):
        try:
            yield from datasets.load_dataset(**hub)
        except ValueError as error:  # the dataset has no such configuration or split
            raise UserError(
                f"cannot read {source} from the hub ({quoted(error)}): name it as org/name:split or "
                f"org/name:config:split in `{argument}`"
            ) from error


# ---- from a file -------------------------------------------------------------------------------------


def _file(source: str, split: str) -> Path:
    path = Path(source)
    if not path_exists(path) or not path.is_file():
        raise UserError(
            f"`{ARGUMENT[split]}` must be {', '.join(SPLITS[split])}, a dataset on the hub such as "
            f"org/name:split, or a {', '.join(SUFFIXES)} file; got {shortened(source)}, which "
            + ("is a folder" if path_exists(path) else "is no such name and no file")
        )
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{source}: the file's suffix must be one of {', '.join(SUFFIXES)}; got {path.suffix!r}"
        )
    return path


def _file_rows(path: Path) -> Iterator[Any]:
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
    # splitlines() would also split a string that contains U+2028 or U+0085
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (RecursionError, ValueError) as error:
                raise _not_json(path, number, error) from None


def _not_json(path: Path, line: int, error: Exception) -> UserError:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else quoted(error)
    return UserError(f"{path}, line {line}: not valid JSON ({reason}); was the file cut off?")


def _parquet_rows(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a readable parquet file: {quoted(error)}") from None


def _read_utf8(path: Path) -> str:
    """The text of a file, without a byte order mark."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        raise UserError(
            f"{path} must be UTF-8, got byte 0x{error.object[error.start]:02x} at offset {error.start}: "
            f"convert it, for example with iconv -f {'utf-16' if utf16 else 'latin1'} -t utf-8"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if "\0" in text:  # UTF-16 of English text without a byte order mark is valid UTF-8
        raise UserError(
            f"{path} must be a text in UTF-8, got a zero byte: it is UTF-16 or no text; convert UTF-16 with "
            "iconv -f utf-16le -t utf-8"
        )
    return text
