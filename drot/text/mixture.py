"""Several texts as one calibration text: `a.txt,b.txt=2`, each with its share of the sequences."""

import os
import re

from drot.core.errors import UserError

#: the largest share; the sum of some larger ones is infinite
LARGEST_SHARE = 1e18
#: a text, and its share behind the last `=`
PART = re.compile(r"(?P<source>[^=].*?)(=(?P<share>[\d.]+))?")


def texts_of(source: str) -> list[tuple[str, float]]:
    """The texts of a calibration source with their shares, which need not add up to 1; 1 where none is named.

    A source without a comma, or with the name of a file, is one text.

    Raises UserError for a text without a name, a text that stands twice, a share that is not above 0 or is
    above LARGEST_SHARE, and the share of a text that stands alone.
    """
    if os.path.exists(source):
        return [(source, 1.0)]
    if "," not in source:
        alone = PART.fullmatch(source)
        if alone and alone["share"]:
            raise UserError(
                f"`source` must have several texts for a share, as in a.txt,b.txt=2; got {source!r}: "
                f"take {alone['source']!r}"
            )
        return [(source, 1.0)]
    found: dict[str, float] = {}
    for part in source.split(","):
        match = PART.fullmatch(part.strip())
        try:
            share = float(match["share"] or 1) if match else 0.0
        except ValueError:  # 1.2.3
            share = 0.0
        unread = match and not match["share"] and "=" in part and not os.path.exists(part.strip())
        if match is None or unread or not 0 < share <= LARGEST_SHARE or match["source"] in found:
            raise UserError(
                "`source` with several texts must name each once, with a share above 0 and at most "
                f"{LARGEST_SHARE:g} or without one, as in a.txt,b.txt=2; got {part!r} in {source!r}"
            )
        found[match["source"]] = share
    return list(found.items())


def sequences_of(source: str, nsamples: int, field: str = "nsamples") -> dict[str, int]:
    """Text → its sequences of the `nsamples` of a calibration source. Raises UserError as `counts_of`."""
    texts, shares = zip(*texts_of(source), strict=True)
    return dict(zip(texts, counts_of(list(shares), nsamples, field), strict=True))


def counts_of(shares: list[float], nsamples: int, field: str = "nsamples") -> list[int]:
    """The sequences of each text: `nsamples` by the shares, rounded to the largest remainders.

    Raises UserError if a text gets none.

    field: the setting that `nsamples` is the value of, for the message.
    """
    exact = [nsamples * share / sum(shares) for share in shares]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for index in by_remainder[: nsamples - sum(counts)]:
        counts[index] += 1
    if 0 in counts:
        raise UserError(
            f"`{field}` must give every text of `source` a sequence; {nsamples} gives them {counts}: raise "
            f"`{field}`, or leave a text out"
        )
    return counts
