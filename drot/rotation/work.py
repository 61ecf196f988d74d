"""How work is divided among ranks of which each takes equally much."""

import itertools
from collections.abc import Mapping


def work_of_ranks(
    whole: Mapping[str | int, int], divisible: int, ranks: int
) -> tuple[dict[str | int, int], list[float]]:
    """Which rank takes each piece of work as a whole, and where the divisible work is cut, from 0 to 1.

    The largest piece goes first, to the rank that has the least. The divisible work fills the ranks up.
    """
    loads = [0] * ranks
    owners: dict[str | int, int] = {}
    for piece, size in sorted(whole.items(), key=lambda item: -item[1]):
        owners[piece] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[piece]] += size
    # the level to which the ranks below it are filled
    order, left = sorted(loads), divisible
    filled = 1
    while filled < ranks and (order[filled] - order[filled - 1]) * filled < left:
        left -= (order[filled] - order[filled - 1]) * filled
        filled += 1
    level = order[filled - 1] + left / filled
    rooms = [max(level - load, 0.0) for load in loads]
    stops = [min(stop / max(divisible, 1), 1.0) for stop in itertools.accumulate(rooms, initial=0.0)]
    return owners, [*stops[:-1], 1.0]
