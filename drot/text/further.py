"""Further sequences of a calibration text, which the calibration does not hold."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.config import CalibrationConfig
from drot.core.events import Progress, silent
from drot.text.mixture import sequences_of
from drot.text.source import load_calibration, spread

#: what is added to the seed of the calibration, modulo 2⁶⁴
SEED = 1_000_003
#: how many sequences are drawn for each that is wanted, as some hold text of others
DRAWN = 3
#: tokens of a piece by which text is found again, and the largest share of a sequence's pieces that may be
PIECE, FOUND_SHARE = 16, 0.1


def load_further(
    settings: CalibrationConfig,
    nsamples: int,
    calibration: Tensor,
    tokenizer: Any,
    progress: Progress = silent,
    own: Path | None = None,
) -> Tensor:
    """Token ids [n, seqlen], n ≤ nsamples, from places of the text that no other sequence holds.

    Several texts have the shares that they have in the calibration. A short text gives fewer sequences, or
    none. Of a stream, more is read than the calibration read.

    settings: of the calibration. calibration: its token ids [m, seqlen]. own: as in `load_calibration`.
    """
    known = {piece for row in _pieces(calibration, 1) for piece in row}
    # what the calibration asked for: a text that gave it fewer sequences was read to its end
    behind = sequences_of(settings.source, settings.nsamples)
    counts = sequences_of(settings.source, nsamples, "distill_nsamples")
    parts, seed = [], (settings.seed + SEED) % 2**64
    for source, count in counts.items():
        text = dataclasses.replace(settings, source=source, nsamples=DRAWN * count, seed=seed)
        drawn = load_calibration(text, tokenizer, progress, own=own, behind=behind[source])
        found: list[Tensor] = []
        for sequence, pieces, all_pieces in zip(drawn, _pieces(drawn, PIECE), _pieces(drawn, 1), strict=True):
            if len(found) < count and sum(piece in known for piece in pieces) <= FOUND_SHARE * len(pieces):
                found.append(sequence)
                known.update(all_pieces)
        parts.append(torch.stack(found) if found else drawn[:0])
    return spread(parts)


def _pieces(rows: Tensor, step: int) -> list[list[int]]:
    """For each sequence a number for each piece of its tokens, the pieces `step` tokens apart."""
    size = min(PIECE, rows.shape[1])
    factors = torch.randint(2**62, (size,), generator=torch.Generator().manual_seed(0)) | 1
    return [(row.unfold(0, size, step) * factors).sum(-1).tolist() for row in rows]  # of 64 bits, as a hash
