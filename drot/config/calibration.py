"""The text from which Hessians are computed and with which weights are trained."""

from dataclasses import dataclass

from drot.config.checks import whole_number

#: tokens in a sequence, by default, for a model that reads that many
SEQLEN = 2048


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
    seqlen: int = SEQLEN
    seed: int = 0
    text_column: str = "text"

    def __post_init__(self) -> None:
        whole_number("nsamples", self.nsamples, 1)
        whole_number("seqlen", self.seqlen, 2)
        whole_number("seed", self.seed, 0, 2**64 - 1)  # the range of torch.Generator
