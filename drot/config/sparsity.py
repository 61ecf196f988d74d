"""The share of the weights that is removed, for all linears or for those that match a pattern."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from drot.core.checks import shortened
from drot.core.errors import UserError


@dataclass(frozen=True)
class Sparsity:
    """The share of the weights that pruning removes.

    ratio: the share, in [0, 1).
    n, m: n:m keeps n of every m neighbouring weights along the input dimension, so ratio is 1 - n/m. Both
        are 0 for a plain ratio, which prescribes no pattern.
    """

    ratio: float
    n: int = 0
    m: int = 0

    @property
    def structured(self) -> bool:
        """True for n:m, False for a plain ratio."""
        return self.m > 0

    @classmethod
    def parse(cls, text: "str | float | Sparsity", *, what: str = "`sparsity`") -> "Sparsity":
        """Reads `0.5`, `"0.5"`, `"50%"` or `"2:4"`. Otherwise raises UserError, which names `what`."""
        if isinstance(text, Sparsity):
            return text
        try:
            if isinstance(text, str) and ":" in text:
                n, m = (int(part) for part in text.split(":"))
                if not 0 < n < m <= 32:
                    raise ValueError
                return cls(ratio=1 - n / m, n=n, m=m)
            if isinstance(text, str) and text.strip().endswith("%"):
                ratio = float(text.strip()[:-1]) / 100
            else:
                ratio = float(text)
            if not 0 <= ratio < 1:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            expected = "a ratio below 1 such as 0.5 or 50%, or n:m with 0 < n < m <= 32 such as 2:4"
            raise UserError(f"{what} must be {expected}; got {shortened(text)}") from None
        return cls(ratio=ratio)

    def __str__(self) -> str:
        """The text from which `parse` reads the same sparsity."""
        if self.structured:
            return f"{self.n}:{self.m}"
        short = f"{self.ratio:g}"
        return short if float(short) == self.ratio else repr(self.ratio)


def matches(pattern: str, name: str) -> bool:
    """Whether a glob matches the name of a linear, or the last part of the name. Case matters."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def parse_sparsity_of(value: Any) -> tuple[tuple[str, Sparsity], ...]:
    """`value`, in one of the forms that PruningConfig accepts, as pairs of a pattern and a Sparsity."""
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.items()
    else:
        items = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    pairs = []
    for item in items:
        pair = tuple(item.rpartition("=")[::2]) if isinstance(item, str) else item
        pair = tuple(pair) if isinstance(pair, tuple | list) else ()
        if len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
            raise UserError(
                f"`sparsity_of` must be PATTERN=SPARSITY such as down_proj=4:8; got {shortened(item)}"
            )
        pairs.append((pair[0], Sparsity.parse(pair[1], what=f"the sparsity of {pair[0]} in `sparsity_of`")))
    return tuple(pairs)
