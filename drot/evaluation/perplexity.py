"""Perplexity on windows of a text, as the literature on pruning measures it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.calibration.data import read_text, tokenize
from drot.errors import BrokenModelError, UserError
from drot.progress import Progress, ProgressEvent, silent

#: largest number of logits in memory at the same time; 64 Mi logits take 256 MiB in fp32
LOGITS_AT_ONCE = 1 << 26
#: exp of a larger loss overflows in fp64
LARGEST_LOSS = 709.0


def load_eval_tokens(
    source: str, tokenizer: Any, text_column: str = "text", progress: Progress = silent
) -> Tensor:
    """Token ids [n] of `source`, a text as in `read_text`. Raises UserError as `read_text` does.

    `wikitext2` is the test split of wikitext-2, joined by blank lines as in the paper's code.
    """
    text = read_text(source, "test", text_column, tokenizer, progress=progress)
    return tokenize(text, tokenizer, progress)


def check_windows(tokens: Tensor, config: Any, seqlen: int) -> None:
    """Raises UserError unless `tokens` [n] hold a window of `seqlen` tokens for a model of `config`."""
    if seqlen < 2:
        raise UserError(
            f"`seqlen` must be at least 2, since the first token of a window is not predicted; got {seqlen}"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest and seqlen > longest:
        raise UserError(f"`seqlen` must be at most {longest}, the positions of this model; got {seqlen}")
    if len(tokens) < seqlen:
        raise UserError(f"the text has {len(tokens)} tokens, but one window needs {seqlen}: lower `seqlen`")
    if int(tokens.max()) >= config.vocab_size:
        raise UserError(
            f"token ids must be below {config.vocab_size}, the model's vocabulary; got {int(tokens.max())}: "
            "the folder holds the tokenizer of another model; copy the right one"
        )


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    seqlen: int,
    batch_size: int | None = None,
    progress: Progress = silent,
) -> float:
    """exp(mean of the token losses) over the windows of `seqlen` tokens in `tokens` [n].

    Tokens after the last complete window are not used. Losses are computed in fp32. Raises UserError as
    `check_windows` does, and BrokenModelError if the mean of the losses or its exp is not finite.

    Args:
        model: the model to measure.
        tokens: token ids [n] of the text.
        seqlen: tokens in a window; a window has seqlen - 1 losses.
        batch_size: windows in a forward pass. None is the most for which the logits stay within
            LOGITS_AT_ONCE, at least 1.
        progress: receives an event after each forward pass.
    """
    check_windows(tokens, model.config, seqlen)
    count = len(tokens) // seqlen
    windows = tokens[: count * seqlen].reshape(count, seqlen)
    vocab = model.config.vocab_size
    if batch_size is None:
        batch_size = max(1, LOGITS_AT_ONCE // (vocab * seqlen))
    device = next(model.parameters()).device
    total = 0.0
    for start in range(0, count, batch_size):
        batch = windows[start : start + batch_size].to(device)
        logits = model(batch, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none"
        )
        total += float(loss.reshape(len(batch), -1).mean(1).double().sum())
        progress(ProgressEvent(phase="evaluate", step=min(start + batch_size, count), steps=count))
    return exp_of_loss(total / count)


def exp_of_loss(loss: float) -> float:
    """exp(loss). Raises BrokenModelError unless it is finite."""
    if not loss < LARGEST_LOSS:
        raise BrokenModelError(
            f"the model's loss on the text is {loss:g}, expected a finite number: its weights are damaged or "
            'overflow; measure it with `dtype="float32"`, or prune or copy it again'
        )
    return math.exp(loss)


@torch.no_grad()
def check_logits(model: PreTrainedModel) -> None:
    """Raises BrokenModelError if a logit of `model` for a short sequence is NaN or infinite.

    lm_eval computes an accuracy from such logits too.
    """
    tokens = torch.arange(min(8, model.config.vocab_size), device=next(model.parameters()).device)
    if not bool(model(tokens[None], use_cache=False).logits.isfinite().all()):
        raise BrokenModelError(
            "the model computes logits that are NaN or infinite: its weights are damaged or overflow; "
            'measure it with `dtype="float32"`, or prune or copy it again'
        )
