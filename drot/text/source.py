"""Token ids from the Hugging Face hub, a local file or a tensor of token ids."""

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.config import CalibrationConfig
from drot.core.errors import UserError, quoted
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.hub import hub_access
from drot.text.files import LARGE, LargeText, author, file_rows
from drot.text.mixture import sequences_of
from drot.text.names import ARGUMENT, OWN_SOURCE, hub_arguments, local_file
from drot.text.rows import SEPARATOR, SURROGATE, texts

logger = logging.getLogger("drot")

#: A large file with this many times the tokens of its sequences, by an estimate, has enough for them.
ENOUGH = 1.5
#: characters between two events `read`
READ_EVERY = 1 << 20


def load_calibration(
    settings: CalibrationConfig,
    tokenizer: Any,
    progress: Progress = silent,
    *,
    own: Path | None = None,
    behind: int = 0,
) -> Tensor:
    """Token ids [nsamples, seqlen], int64, on the CPU, of the text of `settings`, whose seqlen is known.

    Documents are joined by a blank line and tokenised without special tokens. Each sequence starts at a
    position drawn from torch.Generator().manual_seed(seed); those of a text that a model wrote follow each
    other, since they are random as they are: of `own`, and of a file of `drot.sample`. A text with fewer
    tokens than its sequences is cut into consecutive sequences, of which there are fewer, and a warning says
    so. Of a large file no more is read than the sequences need (`LargeText`), and all of it only if it may
    have too few tokens. Several texts each have their share of the sequences (`drot.text.mixture`).

    Raises UserError for a source that is missing, empty, unreadable or too short.

    progress: receives the events of `read_text` and `tokenize`.
    own: the .jsonl file that is read for the source `own`.
    behind: how many sequences of each text were asked for before. As much more of the text is then read, and
        a text that is too short gives fewer sequences without a warning or an error.
    """
    parts = []
    for source, count in sequences_of(settings.source, settings.nsamples).items():
        of_text = dataclasses.replace(settings, source=source, nsamples=count)
        if (file := own if source == OWN_SOURCE else _sampled(source)) is not None:
            parts.append(_of_own_text(file, of_text, tokenizer, progress, behind))
        else:
            parts.append(_sequences(of_text, tokenizer, progress, behind))
    return spread(parts)


def tokens_of(source: str, settings: CalibrationConfig, nsamples: int) -> int:
    """The tokens that one of the texts of `settings` has in `nsamples` sequences; 0 of another text."""
    if not nsamples:
        return 0
    assert settings.seqlen is not None
    return sequences_of(settings.source, nsamples).get(source, 0) * settings.seqlen


def spread(parts: list[Tensor]) -> Tensor:
    """The sequences [n, seqlen] of all texts, each text spread evenly.

    So any run of sequences has about the shares of the whole: those that train the rotations are the first,
    and those that the recovery holds out are the last.

    parts: the sequences [nᵢ, seqlen] of each text.
    """
    places = torch.cat([(torch.arange(len(part)) + 0.5) / len(part) for part in parts])
    return torch.cat(parts)[places.argsort(stable=True)]


def _sequences(settings: CalibrationConfig, tokenizer: Any, progress: Progress, behind: int) -> Tensor:
    """The sequences of one text, as `load_calibration` returns them."""
    source, nsamples, seqlen = settings.source, settings.nsamples, settings.seqlen
    assert seqlen is not None
    needed: int | None = (nsamples + behind) * seqlen
    if (large := large_text(settings, tokenizer, progress)) is not None:
        drawn = large.sequences(nsamples, seqlen, settings.seed)
        if behind or large.tokens >= ENOUGH * nsamples * seqlen:
            return drawn
        needed = None  # the whole file says whether it has enough
    text = read_text(source, "train", settings.text_column, tokenizer, max_tokens=needed, progress=progress)
    ids = tokenize(text, tokenizer, progress)
    if large is not None and len(ids) >= nsamples * seqlen:
        return drawn
    starts = len(ids) - seqlen
    if starts <= 0:
        raise UserError(
            f"the calibration text must have more tokens than `seqlen`, {seqlen}; {source!r} has {len(ids)}: "
            "lower `seqlen` or give a longer text"
        )
    if behind:
        nsamples = min(nsamples, starts, len(ids) // seqlen)
    if nsamples > starts:
        raise UserError(
            f"`nsamples` must be at most {starts}, the number of places in {source!r} where a sequence of "
            f"{seqlen} tokens can start; got {nsamples}: lower `nsamples` or give a longer text"
        )
    if nsamples * seqlen > len(ids):  # sequences at random positions would hold much of the text repeatedly
        nsamples = len(ids) // seqlen
        logger.warning(
            "%s has %d tokens, fewer than %d sequences of %d: the whole text is drawn once, %d sequences, "
            "and the calibration is so much shorter",
            source, len(ids), settings.nsamples, seqlen, nsamples,
        )  # fmt: skip
        return ids[: nsamples * seqlen].reshape(nsamples, seqlen)
    return draw_sequences(ids, nsamples=nsamples, seqlen=seqlen, seed=settings.seed)


def _sampled(source: str) -> Path | None:
    """The file of a text, if a model wrote it."""
    path = local_file(source, "train")
    return path if path and path.suffix == ".jsonl" and author(path) is not None else None


def _of_own_text(
    file: Path, settings: CalibrationConfig, tokenizer: Any, progress: Progress, behind: int
) -> Tensor:
    """The sequences of a text that a model wrote, behind the first `behind`."""
    nsamples, seqlen = settings.nsamples, settings.seqlen
    assert seqlen is not None
    needed = (behind + nsamples) * seqlen
    column = CalibrationConfig.text_column
    text = read_text(str(file), "train", column, tokenizer, max_tokens=needed, progress=progress)
    ids = tokenize(text, tokenizer, progress)
    found = ids[: len(ids) // seqlen * seqlen].reshape(-1, seqlen)[behind : behind + nsamples]
    if not len(found) and not behind:
        raise UserError(
            f"{file} must have at least `seqlen`, {seqlen}, tokens; it has {len(ids)}: lower `seqlen`"
        )
    if len(found) < nsamples and not behind:
        logger.warning("%s gives %d of %d sequences of %d tokens", file, len(found), nsamples, seqlen)
    return found


def large_text(settings: CalibrationConfig, tokenizer: Any, progress: Progress) -> LargeText | None:
    """The source of `settings` if it is a large file; None if it is not. Progress reports it as one text."""
    path = local_file(settings.source, "train")
    if path is None or path.suffix not in (".txt", ".jsonl") or path.stat().st_size < LARGE:
        return None
    progress(ProgressEvent(phase="tokenize", steps=path.stat().st_size))
    return LargeText(path, settings.text_column, tokenizer, lambda text: tokenize(text, tokenizer))


def draw_sequences(ids: Tensor, *, nsamples: int, seqlen: int, seed: int) -> Tensor:
    """Sequences [nsamples, seqlen] of the token ids [n], n > seqlen, which start at random positions."""
    generator = torch.Generator().manual_seed(seed)
    starts = [int(torch.randint(0, len(ids) - seqlen, (1,), generator=generator)) for _ in range(nsamples)]
    return torch.stack([ids[start : start + seqlen] for start in starts])


def as_token_ids(tokens: Tensor) -> Tensor:
    """`tokens` as int64 on the CPU. Raises UserError unless they are integers [nsamples, seqlen]."""
    no_integers = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if tokens.dim() != 2 or no_integers or 0 in tokens.shape:
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
        source: a local .txt, .json, .jsonl or .parquet file; a name in HUB; or a dataset on the hub:
            `org/name`, `org/name:split` or `org/name:config:split`.
        split: `train` or `test`, the split of a dataset on the hub whose name does not say one.
        text_column: the column that holds text, or chats as lists of {"role": ..., "content": ...}. If there
            is no column `text`, the default, it is `messages`.
        tokenizer: the tokenizer, needed for chats only.
        max_tokens: stops reading when the text is long enough for this many tokens, at 8 characters a token.
            Of a file, LARGE characters are read in any case.
        progress: receives the event `read`, with the number of characters, at the beginning and after every
            READ_EVERY characters.
    """
    hub, path = hub_arguments(source, split), local_file(source, split)
    if path is not None:
        rows = file_rows(path)
        enough = 0 if max_tokens is None else max(LARGE, 8 * max_tokens)
    else:
        assert hub is not None
        rows = _hub_rows(source, hub, ARGUMENT[split])
        enough = 8 * max_tokens if max_tokens is not None and hub["streaming"] else 0
    progress(ProgressEvent(phase="read", steps=enough))
    parts, length, reported, replaced = [], 0, 0, 0
    for document in texts(rows, text_column, source, tokenizer):
        document, count = SURROGATE.subn("\ufffd", document)
        replaced += count
        parts.append(document)
        length += len(document)
        if length - reported >= READ_EVERY:
            progress(ProgressEvent(phase="read", step=length, steps=enough))
            reported = length
        if enough and length > enough:
            break
    if replaced:
        logger.warning("%s: %d lone surrogates, halves of characters, became U+FFFD", source, replaced)
    text = SEPARATOR.join(parts)
    if not text.strip():
        raise UserError(f"{source} is empty: give a source with text")
    return text


# ---- from the hub ------------------------------------------------------------------------------------


def _hub_rows(source: str, hub: dict[str, Any], argument: str) -> Iterator[Any]:
    """The rows of the dataset that datasets.load_dataset gives for `hub`. Messages name it `argument`."""
    import datasets

    path = hub["path"]
    if os.path.exists(path):
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
