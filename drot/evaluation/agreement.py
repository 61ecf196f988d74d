"""How far a pruned model predicts what its dense original predicts, on any text and without labels."""

import itertools
from typing import Any

import numpy
import torch
from torch import Tensor

from drot.core.events import Progress, ProgressEvent, silent
from drot.evaluation.perplexity import exp_of_loss
from drot.evaluation.predictions import Predictions, logits_at_once

#: ranges of positions in a window for which the agreement is given
POSITION_RANGES = 8


def agreement(dense: Predictions, pruned: Predictions, *, progress: Progress = silent) -> dict[str, Any]:
    """The agreement of two models on the same windows, over all positions of the windows.

    equal_tokens: share of positions at which both models have the same most likely next token, in [0, 1].
    kl: mean and p99 (99th percentile) of KL(dense ‖ pruned) = Σ p_dense (log p_dense - log p_pruned)
        of the next token's distribution, in nats.
    positions: equal_tokens and the mean kl for POSITION_RANGES ranges `first` … `last` of the positions in a
        window, which begin with 0.
    perplexity, dense_perplexity, perplexity_difference: perplexities on the windows as in `perplexity_of`,
        and pruned minus dense.

    The log-softmax is computed in fp32, the sum over the vocabulary in fp64. The logits of both models are in
    memory for the windows of one batch. Raises BrokenModelError if the loss of a model is not finite.
    """
    assert torch.equal(dense.windows, pruned.windows) and dense.vocab == pruned.vocab
    count, seqlen = dense.windows.shape
    found = torch.empty(4, count, seqlen, dtype=torch.float64)
    for batch in dense.batches(models=2):
        found[:, batch] = _compare(dense.logits(batch), pruned.logits(batch), dense.windows[batch])
        progress(ProgressEvent(phase="evaluate", step=batch.stop, steps=count))
    equal, kl, dense_loss, pruned_loss = found
    values = kl.flatten().numpy()
    dense_perplexity = exp_of_loss(float(dense_loss[:, :-1].mean()), "the dense original")
    perplexity = exp_of_loss(float(pruned_loss[:, :-1].mean()), "the pruned model")
    edges = torch.linspace(0, seqlen, min(POSITION_RANGES, seqlen) + 1).round().int().tolist()
    return {
        "equal_tokens": float(equal.mean()),
        "kl": {"mean": float(values.mean()), "p99": float(numpy.quantile(values, 0.99))},
        "positions": [
            {
                "first": first,
                "last": end - 1,
                "equal_tokens": float(equal[:, first:end].mean()),
                "kl": float(kl[:, first:end].mean()),
            }
            for first, end in itertools.pairwise(edges)
        ],
        "perplexity": perplexity,
        "dense_perplexity": dense_perplexity,
        "perplexity_difference": perplexity - dense_perplexity,
    }


@torch.no_grad()
def _compare(dense: Tensor, pruned: Tensor, windows: Tensor) -> Tensor:
    """Equal next tokens, KL, and the losses of both models for each token: [4, b, seqlen], fp64 on the CPU.

    dense, pruned: logits [b, seqlen, vocab]. windows: token ids [b, seqlen]. The losses at the last position
    of a window mean nothing, because the token behind the window is not known.
    """
    targets = windows.roll(-1, dims=1).flatten().to(dense.device)
    # two log-softmaxes, their exp and a product
    step = max(1, logits_at_once(dense.device) // (4 * dense.shape[-1]))
    parts = []
    for first, second, ids in zip(
        dense.flatten(0, 1).split(step), pruned.flatten(0, 1).split(step), targets.split(step), strict=True
    ):
        p, q = first.float().log_softmax(-1), second.float().log_softmax(-1)
        equal = (first.argmax(-1) == second.argmax(-1)).double()
        kl = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
        losses = [-x.gather(-1, ids[:, None])[:, 0].double() for x in (p, q)]
        parts.append(torch.stack([equal, kl, *losses]))
    return torch.cat(parts, 1).cpu().reshape(4, *windows.shape)
