"""The token ids of a run: those of the calibration, and those with which all layers are trained together."""

import dataclasses
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.resume import OWN_TEXT
from drot.config import ResolvedRecipe
from drot.config.resolve import GIVEN_TOKENS
from drot.core.checks import is_a
from drot.core.errors import UserError
from drot.core.events import Progress
from drot.machine.ranks import Ranks
from drot.model.sizes import check_seqlen
from drot.pipeline.batches import DISTILL_HELD_OUT_SHARE, held_out_sequences, repeats
from drot.pipeline.own_text import write_own_text
from drot.pipeline.validation import check_each_has_a_sequence, check_tokens
from drot.text.further import load_further
from drot.text.names import check_sources
from drot.text.source import as_token_ids, load_calibration

logger = logging.getLogger("drot")


def given_tokens(calibration: Any, distillation: Any) -> tuple[Tensor | None, Tensor | None]:
    """The token ids that a caller gives in place of a text. Raises UserError for what are none."""
    is_a("calibration", calibration, Tensor, or_none=True)
    is_a("distillation", distillation, Tensor, or_none=True)
    if calibration is None and distillation is not None:
        raise UserError("`distillation` needs `calibration`: give both token ids, or let drot read both")
    tokens, further = (None if ids is None else as_token_ids(ids) for ids in (calibration, distillation))
    return tokens, further


def trainable(count: int, wanted: int, ranks: int = 1) -> int:
    """With how many of `count` sequences all layers are trained together: with all of them, or with none.

    Each rank needs a sequence that is not held out. A warning tells of fewer sequences than `wanted`.
    """
    enough = count - held_out_sequences(count, DISTILL_HELD_OUT_SHARE) >= ranks
    if count < wanted:
        outcome = ", which is left out"
        if enough:
            times = repeats(wanted, count)
            outcome = f", so each pass reads them {times} times" if times > 1 else ""
        logger.warning(
            "beside the calibration the text has %d of %d sequences for the training of all layers%s",
            count, wanted, outcome,
        )  # fmt: skip
    return count if enough else 0


@dataclass(frozen=True, kw_only=True)
class TextReader:
    """Reads the text of a run on rank 0, and gives all ranks its token ids.

    own_text: the file of the text that the model writes, which is read if it exists; None keeps no file.
    device, dtype: of a model that is loaded to write.
    """

    model: str | Path | PreTrainedModel
    tokenizer: Any
    config: Any
    device: torch.device
    dtype: str | torch.dtype
    progress: Progress
    ranks: Ranks
    own_text: Path | None

    def read(
        self, recipe: ResolvedRecipe, tokens: Tensor | None, further: Tensor | None, *, measures: bool
    ) -> tuple[ResolvedRecipe, Tensor, Tensor | None]:
        """The token ids of the calibration [nsamples, seqlen] and of the training of all layers [n, seqlen].

        If the text has too few sequences for that training, the recipe has no such training.

        Raises UserError for a text or token ids that do not fit.

        tokens, further: token ids that the caller gives in place of the text.
        measures: whether the run measures output errors, so that it reads the text in any case.
        """
        with tempfile.TemporaryDirectory() as temporary:
            own = Path(temporary, OWN_TEXT) if self.own_text is None else self.own_text
            if tokens is None and (measures or recipe.reads_calibration):
                tokens = self.ranks.on_first(lambda: self._calibration(recipe, own))
            elif tokens is None:
                tokens = torch.empty(0, 1, dtype=torch.long)  # no sequences
            check_tokens(tokens, self.config)
            if measures or recipe.reads_calibration:
                check_each_has_a_sequence(self.ranks, len(tokens), "use fewer ranks or a longer text")
            if measures or not recipe.recovery.distill_epochs:
                return recipe, tokens, None
            if further is not None:
                check_tokens(further, self.config)
                if further.shape[1] != tokens.shape[1]:
                    raise UserError(
                        "`distillation` must have sequences as long as `calibration` has, "
                        f"{tokens.shape[1]} tokens; got {further.shape[1]}"
                    )
                return recipe, tokens, further
            read: Tensor = tokens
            recipe, further = self.ranks.on_first(lambda: self._further(recipe, read, own))
            return recipe, tokens, further

    def _calibration(self, recipe: ResolvedRecipe, own: Path) -> Tensor:
        text = recipe.calibration
        if self.tokenizer is None:
            raise UserError("a loaded model needs `tokenizer`, or token ids as `calibration`; got neither")
        if text.source == GIVEN_TOKENS:
            raise UserError(
                "the run of this recipe was calibrated on token ids that a Python program gave: name a text "
                "as `source`, or give the token ids as `calibration`"
            )
        check_seqlen(text.seqlen, self.config)  # before the text is tokenised, which may take a minute
        check_sources(text.source)  # before the model writes one
        write_own_text(own, recipe, self)
        return load_calibration(text, self.tokenizer, self.progress, own=own)

    def _further(
        self, recipe: ResolvedRecipe, tokens: Tensor, own: Path
    ) -> tuple[ResolvedRecipe, Tensor | None]:
        wanted = recipe.recovery.distill_nsamples
        found = load_further(recipe.calibration, wanted, tokens, self.tokenizer, self.progress, own)
        count = trainable(len(found), wanted, self.ranks.size)
        epochs = recipe.recovery.distill_epochs if count else 0
        # the number that was asked for, also if fewer were found: a repeated run draws as many
        asked = wanted if count else 0
        recovery = dataclasses.replace(recipe.recovery, distill_nsamples=asked, distill_epochs=epochs)
        return dataclasses.replace(recipe, recovery=recovery), found if count else None
