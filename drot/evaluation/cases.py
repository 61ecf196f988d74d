"""The cases of `drot bench`, and which of its arguments name one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drot.core.checks import is_a
from drot.core.errors import UserError
from drot.model.families import family_of
from drot.model.sizes import positions_of

#: largest sizes of a prefill and a decode
LARGEST_TOKENS, LARGEST_BATCH = 1 << 17, 1 << 12
#: device type → default sizes of a prefill and of a decode; a CPU takes minutes for larger ones
SIZES = {"cpu": ((128,), (1, 8)), "cuda": ((128, 512, 2048, 8192), (1, 2, 4, 8, 16, 32))}


@dataclass(frozen=True)
class Case:
    """One measurement. size: the number of tokens of a prefill, or of sequences of a decode."""

    what: Literal["layer", "model"]
    phase: Literal["prefill", "decode"]
    size: int

    def __str__(self) -> str:
        return f"{self.what} {self.phase} {self.size}"


#: the case in which `drot chat` and a sequential `drot serve` compile the decode step
ONE_SEQUENCE = Case("model", "decode", 1)


def check_arguments(
    model: object,
    shape: str | None,
    tokens: Sequence[int] | None,
    batches: Sequence[int] | None,
    repeats: int,
) -> None:
    """Raises UserError for arguments of `measure_speed` that mean nothing."""
    if (model is None) == (shape is None):
        raise UserError(
            f"name either a checkpoint or a `shape`; got {'neither' if model is None else 'both'}"
        )
    check_sizes("tokens", tokens, LARGEST_TOKENS)
    check_sizes("batches", batches, LARGEST_BATCH)
    is_a("repeats", repeats, int)
    if repeats < 1:
        raise UserError(f"`repeats` must be at least 1; got {repeats}")


def check_sizes(name: str, sizes: Sequence[int] | None, largest: int) -> None:
    """Raises UserError if the argument `name` is neither None nor a list of numbers from 1 to `largest`."""
    is_a(name, sizes, list, tuple, or_none=True)
    for size in sizes or ():
        is_a(name, size, int)
    if sizes is not None and (not sizes or any(not 1 <= size <= largest for size in sizes)):
        got = ", ".join(map(str, sizes)) or "none"
        raise UserError(f"`{name}` must be whole numbers from 1 to {largest}; got {got}")


def within_positions(sizes: Sequence[int], config: Any) -> list[int]:
    """`sizes` of sequences, each at most the number of positions that a model of `config` has learned.

    A position that is computed, as a rotary one, has no such limit.
    """
    longest = positions_of(config) if family_of(config).positions else None
    return list(dict.fromkeys(size if longest is None else min(size, longest) for size in sizes))


def check_positions(tokens: Sequence[int], config: Any) -> None:
    """Raises UserError for more `tokens` of a sequence than a model of `config` has learned positions."""
    if tokens and (longest := max(within_positions(tokens, config))) < (got := max(tokens)):
        raise UserError(
            f"`tokens` must be at most {longest}, the positions that this model has learned; got {got}: "
            "name fewer tokens"
        )


def check_compile(shape: str | None, batches: Sequence[int]) -> None:
    """Raises UserError if no case of `measure_speed` has a step to compile."""
    if shape is not None:
        raise UserError(f"`compile` needs a whole model; got the `shape` {shape}, one layer: leave it out")
    if ONE_SEQUENCE.size not in batches:
        got = ", ".join(map(str, batches)) or "none"
        raise UserError(f"`compile` needs the size 1, one sequence, in `batches`; got {got}: add 1")
