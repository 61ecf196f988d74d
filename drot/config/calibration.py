"""The text from which Hessians are computed and with which weights are trained."""

from dataclasses import dataclass

from drot.config.checks import is_a, whole_number
from drot.errors import UserError

#: Largest number of tokens, nsamples · seqlen. Their hidden states take terabytes in a model of 7B.
LARGEST_TOKENS = 2**32


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """The text from which the Hessians are computed.

    Args:
        source: `c4` or `wikitext2`, which the package `datasets` downloads, or a .txt, .json, .jsonl or
            .parquet file.
        nsamples: number of sequences.
        seqlen: tokens in a sequence.
        seed: seed of the positions at which sequences are cut from the text.
        text_column: the column of the text in .json, .jsonl and .parquet files.
    """

    source: str = "c4"
    nsamples: int = 128
    seqlen: int = 2048
    seed: int = 0
    text_column: str = "text"

    def __post_init__(self) -> None:
        is_a("source", self.source, str)
        is_a("text_column", self.text_column, str)
        whole_number("nsamples", self.nsamples, 1)
        whole_number("seqlen", self.seqlen, 2)
        whole_number("seed", self.seed, 0, 2**64 - 1)  # the range of torch.Generator
        if self.nsamples * self.seqlen > LARGEST_TOKENS:
            raise UserError(
                f"`nsamples` times `seqlen` must be at most {LARGEST_TOKENS} tokens; got {self.nsamples} "
                f"times {self.seqlen}: lower one of them"
            )
