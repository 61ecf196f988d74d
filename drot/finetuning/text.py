"""The sequences of a fine-tuning: those that it trains on, and those that are held out."""

import logging
from dataclasses import replace
from typing import Any

from torch import Tensor

from drot.config import CalibrationConfig, FinetuneConfig, default_seqlen
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.text.mixture import sequences_of
from drot.text.source import as_token_ids, draw_sequences, large_text, read_text, spread, tokenize

logger = logging.getLogger("drot")

#: how often a training may read each token of its text without a warning
OFTEN = 10


def split_text(
    config: FinetuneConfig,
    tokenizer: Any,
    tokens: Tensor | None = None,
    positions: int | None = None,
    progress: Progress = silent,
) -> tuple[Tensor, Tensor]:
    """Training sequences [nsamples, seqlen] and held-out sequences [held_out, seqlen] of token ids.

    The held-out sequences are the end of the text, one after the other. The `nsamples` training sequences
    start at random positions before them, as in `load_calibration`. Several texts each have their share of
    both (`drot.text.mixture`). With `tokens` [n, seqlen], the last rows are held out, and the others are the
    training sequences.

    Raises UserError for a text that is missing, unreadable or too short.

    positions: the most tokens that the model reads in one sequence; None if there is no limit.
    """
    held_out, text = config.held_out, config.text
    if tokens is not None:
        rows = as_token_ids(tokens)
        if len(rows) <= held_out:
            raise UserError(
                f"`tokens` must have more rows than `held_out`, {held_out}; got {len(rows)}: lower `held_out`"
            )
        return rows[:-held_out], rows[-held_out:]
    text = replace(text, seqlen=text.seqlen or default_seqlen(positions))
    reserved = sequences_of(text.source, held_out, "held_out")
    parts = [
        _split(replace(text, source=source, nsamples=count), reserved[source], tokenizer, progress)
        for source, count in sequences_of(text.source, text.nsamples).items()
    ]
    training, kept = zip(*parts, strict=True)
    return spread(list(training)), spread(list(kept))


def _split(
    text: CalibrationConfig, held_out: int, tokenizer: Any, progress: Progress
) -> tuple[Tensor, Tensor]:
    """The sequences of one text, as `split_text` returns them."""
    seqlen = text.seqlen
    assert seqlen is not None
    if (large := large_text(text, tokenizer, progress)) is not None:
        last, end = large.tail(held_out * seqlen)
        return large.sequences(text.nsamples, seqlen, text.seed, end), last.reshape(held_out, seqlen)
    needed = (text.nsamples + held_out) * seqlen
    whole = read_text(text.source, "train", text.text_column, tokenizer, max_tokens=needed, progress=progress)
    ids = tokenize(whole, tokenizer, progress)
    reserved = held_out * seqlen
    if len(ids) <= reserved + seqlen:
        raise UserError(
            f"the training text must have more than {reserved + seqlen} tokens, for {held_out} held-out "
            f"sequences and one to train on; {text.source!r} has {len(ids)}: lower `held_out` or `seqlen`"
        )
    available, wanted = len(ids) - reserved, text.nsamples * seqlen
    if wanted > OFTEN * available:
        logger.warning(
            "%s has %d tokens to train on: the training reads them about %d times", text.source, available,
            wanted // available,
        )  # fmt: skip
    training = draw_sequences(ids[:-reserved], nsamples=text.nsamples, seqlen=seqlen, seed=text.seed)
    return training, ids[-reserved:].reshape(held_out, seqlen)
