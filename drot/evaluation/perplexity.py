"""Perplexity on windows of a text, as the literature on pruning measures it."""

import itertools
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.core.errors import BrokenModelError
from drot.core.events import Progress, ProgressEvent, silent
from drot.evaluation.predictions import LOGITS_AT_ONCE, Predictions, predict
from drot.text.source import read_text, tokenize

logger = logging.getLogger("drot")

#: exp of a larger loss overflows in fp64
LARGEST_LOSS = 709.0
#: nats by which the loss at the end of a window is larger than at its best part, if that is unusual
RISEN = 0.3
#: losses whose mean is not yet told from chance by RISEN
FEW = 500
ADVICE = 'its weights are damaged or overflow; measure it with `dtype="float32"`, or prune or copy it again'


def load_eval_tokens(
    source: str, tokenizer: Any, text_column: str = "text", progress: Progress = silent
) -> Tensor:
    """Token ids [n] of `source`, a text as in `read_text`. Raises UserError as `read_text` does.

    `wikitext2` is the test split of wikitext-2, joined by blank lines as in the paper's code.
    """
    text = read_text(source, "test", text_column, tokenizer, progress=progress)
    return tokenize(text, tokenizer, progress)


def perplexity(model: PreTrainedModel, tokens: Tensor, *, seqlen: int, progress: Progress = silent) -> float:
    """The perplexity of a model that lies on one device, on the windows of a text `tokens` [n].

    A window of `seqlen` tokens has seqlen - 1 losses. Raises UserError as `check_windows` does, and
    BrokenModelError as `perplexity_of` does.
    """
    return perplexity_of(predict(model, tokens, seqlen), progress=progress)


def perplexity_of(predictions: Predictions, *, progress: Progress = silent) -> float:
    """exp(mean of the token losses) over all windows.

    A loss that rises in the windows is warned of (`rises_after`). Raises BrokenModelError if the mean of the
    losses or its exp is not finite.
    """
    losses = mean_losses(predictions, progress=progress)
    rises_after(losses, len(predictions.windows))
    return exp_of_loss(float(losses.mean()))


def mean_losses(predictions: Predictions, *, progress: Progress = silent) -> Tensor:
    """The mean loss at each position of the windows, fp64 [seqlen - 1]. A loss is computed in fp32."""
    count, seqlen = predictions.windows.shape
    total = torch.zeros(seqlen - 1, dtype=torch.float64)
    for batch in predictions.batches():
        logits = predictions.logits(batch)
        losses = _losses(logits, predictions.windows[batch].to(logits.device))
        total += losses.double().sum(0).cpu()
        progress(ProgressEvent(phase="evaluate", step=batch.stop, steps=count))
    return total / count


def rises_after(losses: Tensor, windows: int) -> int | None:
    """The position from which the loss of a model rises, if it seems to be trained on shorter sequences.

    With more text before it, a token is easier to predict. Where the positions of a model were not trained,
    its loss rises: then a warning is logged too.

    losses: the mean loss [seqlen - 1] at each position of the windows.
    windows: their number. Nothing is said of fewer than FEW losses.
    """
    edges = [0, *(2**power for power in range(7, 31) if 2**power < len(losses)), len(losses)]
    means = [float(losses[start:end].mean()) for start, end in itertools.pairwise(edges)]
    best = min(range(len(means)), key=means.__getitem__)
    last, enough = len(means) - 1, windows * (edges[best + 1] - edges[best]) >= FEW
    if last > best and enough and means[last] > means[best] + RISEN:
        logger.warning(
            "the loss rises in the windows, from %.2f before position %d to %.2f at their end, as in a model "
            "that was trained on shorter sequences: measure it with `seqlen=%d`",
            means[best], edges[best + 1], means[last], edges[best + 1],
        )  # fmt: skip
        return edges[best + 1]
    return None


def exp_of_loss(loss: float, model: str = "the model") -> float:
    """exp(loss). Raises BrokenModelError, which names `model`, unless it is finite."""
    if not loss < LARGEST_LOSS:
        raise BrokenModelError(f"{model}'s loss on the text is {loss:g}, expected a finite number: {ADVICE}")
    return math.exp(loss)


@torch.no_grad()
def check_logits(model: PreTrainedModel) -> None:
    """Raises BrokenModelError if a logit of `model` for a short sequence is NaN or infinite.

    lm_eval computes an accuracy from such logits too.
    """
    tokens = torch.arange(min(8, model.config.vocab_size), device=next(model.parameters()).device)
    if not bool(model(tokens[None], use_cache=False).logits.isfinite().all()):
        raise BrokenModelError(f"the model computes logits that are NaN or infinite: {ADVICE}")


@torch.no_grad()
def _losses(logits: Tensor, windows: Tensor) -> Tensor:
    """The losses [b, seqlen - 1], fp32, of logits [b, seqlen, vocab] for the windows [b, seqlen]."""
    rows, targets = logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten()
    step = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    parts = [
        nn.functional.cross_entropy(some.float(), ids, reduction="none")
        for some, ids in zip(rows.split(step), targets.split(step), strict=True)
    ]
    return torch.cat(parts).reshape(len(windows), -1)
