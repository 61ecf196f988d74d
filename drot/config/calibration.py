"""The text from which Hessians are computed and with which weights are trained."""

from dataclasses import dataclass

from drot.core.checks import is_a, whole_number
from drot.core.errors import UserError

#: Largest number of tokens, nsamples · seqlen. Their hidden states take terabytes in a model of 7B.
LARGEST_TOKENS = 2**32

#: tokens in a sequence, by default, for a model that reads that many
SEQLEN = 2048


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """The text from which the Hessians are computed.

    Args:
        source: `c4` or `wikitext2`, which the package `datasets` downloads, or a .txt, .json, .jsonl or
            .parquet file.
        nsamples: number of sequences.
        seqlen: tokens in a sequence; None is SEQLEN, or the positions of the model if they are fewer.
        seed: seed of the positions at which sequences are cut from the text.
        text_column: the column of the text in .json, .jsonl and .parquet files.
    """

    source: str = "c4"
    nsamples: int = 128
    seqlen: int | None = None
    seed: int = 0
    text_column: str = "text"

    def __post_init__(self) -> None:
        is_a("source", self.source, str)
        is_a("text_column", self.text_column, str)
        whole_number("nsamples", self.nsamples, 1)
        if self.seqlen is not None:
            whole_number("seqlen", self.seqlen, 2)
        whole_number("seed", self.seed, 0, 2**64 - 1)  # the range of torch.Generator
        if self.nsamples * (self.seqlen or SEQLEN) > LARGEST_TOKENS:
            raise UserError(
                f"`nsamples` times `seqlen` must be at most {LARGEST_TOKENS} tokens; got {self.nsamples} "
                f"times {self.seqlen or SEQLEN}: lower one of them"
            )

    def resolved_seqlen(self, positions: int | None) -> int:
        """`seqlen`, or `default_seqlen`."""
        return default_seqlen(positions) if self.seqlen is None else self.seqlen


def default_seqlen(positions: int | None) -> int:
    """The default of `seqlen` for a model with this number of positions; None if there is no limit."""
    return SEQLEN if positions is None else min(SEQLEN, positions)
