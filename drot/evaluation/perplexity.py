"""Perplexity as the literature on pruning measures it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.calibration.data import read_text, tokenize
from drot.errors import UserError
from drot.progress import Progress, ProgressEvent, silent

#: logits that exist at once, at most: 64 Mi values are 256 MB in fp32
LOGITS_AT_ONCE = 1 << 26


def load_eval_tokens(source: str, tokenizer: Any, text_column: str = "text") -> Tensor:
    """ids [n] of `wikitext2` (its *test* split, joined by blank lines, as the paper's code does) or
    of a local file. Raises UserError as `read_text` does."""
    return tokenize(read_text(source, "test", text_column), tokenizer)


def check_windows(tokens: Tensor, config: Any, seqlen: int) -> None:
    """Raises UserError unless tokens [n] make a window of seqlen tokens that a model of `config` reads."""
    if seqlen < 2:
        raise UserError(f"`seqlen` must be at least 2, a token and the one that it foretells; got {seqlen}")
    longest = getattr(config, "max_position_embeddings", None)
    if longest and seqlen > longest:
        raise UserError(f"`seqlen` must be at most {longest}, the positions of this model; got {seqlen}")
    if len(tokens) < seqlen:
        raise UserError(f"the text has {len(tokens)} tokens, one window needs {seqlen}: lower `seqlen`")
    if int(tokens.max()) >= config.vocab_size:
        raise UserError(
            f"token ids must be below {config.vocab_size}, the model's vocabulary; got {int(tokens.max())}: "
            "the tokenizer beside the model is another model's"
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
    """exp(mean over the whole windows of seqlen tokens of their mean token loss); the rest is left out.

    tokens [n]; batch_size None chooses one that bounds the memory of the logits. Losses are fp32.
    Infinite where the mean loss is beyond exp's range, NaN where it is NaN.
    Raises UserError as `check_windows` does.
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
    mean = total / count
    return mean if math.isnan(mean) else math.exp(mean) if mean < 700 else math.inf
