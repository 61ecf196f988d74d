"""The text from which Hessians are computed and with which weights are trained."""

import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from drot.config.settings import settings
from drot.core.errors import UserError

#: Largest number of tokens, nsamples · seqlen. Their hidden states take terabytes in a model of 7B.
LARGEST_TOKENS = 2**32

#: tokens in a sequence, by default, for a model that reads that many
SEQLEN = 2048


def _named(source: Any) -> Any:
    """The name of a file that a Python program gives as a Path, of which none is a text on the hub."""
    if not isinstance(source, Path):
        return source
    return str(source) if source.is_absolute() else os.path.join(os.curdir, source)


@settings
class CalibrationConfig:
    """The text from which the Hessians are computed.

    In `drot.prune` a source may also be `own`: a text that the model writes at the beginning of the run.
    """

    source: Annotated[str, BeforeValidator(_named)] = "c4"
    """c4 or wikitext2; any dataset on the hub as org/name, org/name:split or org/name:config:split, which is
    read only as far as needed; or a .txt, .json, .jsonl or .parquet file. Several, with their shares
    of the sequences: a.txt,b.txt=2.
    """
    nsamples: int = Field(default=128, ge=1)
    """Number of sequences to cut from the text."""
    seqlen: int | None = Field(default=None, ge=2)
    """Tokens in a sequence. Default: 2048, or what the model reads if that is less."""
    seed: int = Field(default=0, ge=0, le=2**64 - 1)
    """Random seed of the positions at which sequences are cut. A text that a model wrote is cut from its
    beginning on.
    """
    text_column: str = "text"
    """The column that holds the text, or chats as lists of role and content, in .json, .jsonl and .parquet
    files and in datasets on the hub. Without a column text, it is messages.
    """

    @model_validator(mode="after")
    def _few_enough_tokens(self) -> Self:
        seqlen = self.seqlen or SEQLEN
        if self.nsamples * seqlen > LARGEST_TOKENS:
            raise UserError(
                f"`nsamples` times `seqlen` must be at most {LARGEST_TOKENS} tokens; got {self.nsamples} "
                f"times {seqlen}: lower one of them"
            )
        return self


def default_seqlen(positions: int | None) -> int:
    """SEQLEN, capped at the model's maximum position; `positions` is None for a model without a limit."""
    return SEQLEN if positions is None else min(SEQLEN, positions)
