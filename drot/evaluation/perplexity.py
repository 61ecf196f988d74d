"""Perplexity on windows of a text, as the literature on pruning measures it."""

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.core.errors import BrokenModelError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.reading import LARGEST_FLOAT
from drot.evaluation.predictions import Predictions, logits_at_once, predict
from drot.text.names import hub_arguments
from drot.text.source import read_text, tokenize

logger = logging.getLogger("drot")

#: the most tokens of a dataset that is streamed from the hub
MOST_STREAMED = 1 << 20
#: exp of a larger loss is larger than the largest figure of drot.json
LARGEST_LOSS = math.log(LARGEST_FLOAT)
ADVICE = 'its weights are damaged or overflow; measure it with `dtype="float32"`, or prune or copy it again'


def load_eval_tokens(
    source: str, tokenizer: Any, text_column: str = "text", progress: Progress = silent
) -> Tensor:
    """Token ids [n] of `source`, a text as in `read_text`. Raises UserError as `read_text` does.

    `wikitext2` is the test split of wikitext-2, joined by blank lines as in the paper's code. Of a dataset on
    the hub that is streamed, at most MOST_STREAMED tokens are read, and a warning says so.
    """
    hub = hub_arguments(source, "test")
    most = MOST_STREAMED if hub is not None and hub["streaming"] else None
    text = read_text(source, "test", text_column, tokenizer, max_tokens=most, progress=progress)
    tokens = tokenize(text, tokenizer, progress)[:most]
    if most and len(tokens) == most:
        logger.warning("the first %d tokens of %s are measured", most, source)
    return tokens


def perplexity(model: PreTrainedModel, tokens: Tensor, *, seqlen: int, progress: Progress = silent) -> float:
    """The perplexity of a model that lies on one device, on the windows of a text `tokens` [n].

    A window of `seqlen` tokens has seqlen - 1 losses. Raises UserError as `check_windows` does, and
    BrokenModelError as `perplexity_of` does.
    """
    return perplexity_of(predict(model, tokens, seqlen), progress=progress)


def perplexity_of(predictions: Predictions, *, progress: Progress = silent) -> float:
    """exp(mean of the token losses) over all windows. A loss is computed in fp32, their sum in fp64.

    Raises BrokenModelError if the mean of the losses is not finite or above LARGEST_LOSS.
    """
    count, seqlen = predictions.windows.shape
    total = torch.zeros(seqlen - 1, dtype=torch.float64)
    for batch in predictions.batches():
        logits = predictions.logits(batch)
        losses = _losses(logits, predictions.windows[batch].to(logits.device))
        total += losses.double().sum(0).cpu()
        progress(ProgressEvent(phase="evaluate", step=batch.stop, steps=count))
    return exp_of_loss(float((total / count).mean()))


def exp_of_loss(loss: float, model: str = "the model") -> float:
    """exp(loss). Raises BrokenModelError, which names `model`, for a larger loss than LARGEST_LOSS or NaN."""
    if not loss < LARGEST_LOSS:
        raise BrokenModelError(
            f"{model}'s loss on the text is {loss:g}, expected a number below {LARGEST_LOSS:.0f}: {ADVICE}"
        )
    return math.exp(loss)


@torch.no_grad()
def check_logits(model: PreTrainedModel) -> None:
    """Raises BrokenModelError if a logit of `model` for a short sequence is NaN or infinite.

    lm_eval computes an accuracy from such logits too.
    """
    tokens = torch.arange(
        min(8, model.config.get_text_config().vocab_size), device=next(model.parameters()).device
    )
    if not bool(model(tokens[None], use_cache=False).logits.isfinite().all()):
        raise BrokenModelError(f"the model computes logits that are NaN or infinite: {ADVICE}")


@torch.no_grad()
def _losses(logits: Tensor, windows: Tensor) -> Tensor:
    """The losses [b, seqlen - 1], fp32, of logits [b, seqlen, vocab] for the windows [b, seqlen]."""
    rows, targets = logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten()
    step = max(1, logits_at_once(logits.device) // logits.shape[-1])
    parts = [
        nn.functional.cross_entropy(some.float(), ids, reduction="none")
        for some, ids in zip(rows.split(step), targets.split(step), strict=True)
    ]
    return torch.cat(parts).reshape(len(windows), -1)
