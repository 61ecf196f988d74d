"""The loss of a training against a dense model: KL(dense ‖ model) of the next token."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drot.checkpoint.load import load_model
from drot.core.errors import UserError
from drot.sparse.linear import is_packed


def load_dense(source: str, pruned: Any) -> Any:
    """The dense model of `source`, on the CPU. Raises UserError if its vocabulary is not that of `pruned`."""
    dense = load_model(source)
    if dense.config.vocab_size != pruned.config.vocab_size:
        raise UserError(
            f"`against` must be a model with the vocabulary of the pruned model, {pruned.config.vocab_size} "
            f"tokens; {source} has {dense.config.vocab_size}"
        )
    if is_packed(dense):
        dense.dequantize()
    return dense.eval().requires_grad_(False)


class DivergenceLoss:
    """The `compute_loss_func` of transformers' Trainer, whose labels are the tokens of the inputs."""

    def __init__(self, dense: Any) -> None:
        self.dense = dense

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
        """Σ KL(dense ‖ model) over the tokens that predict another, divided by `num_items_in_batch`.

        outputs: those of the model, with logits [b, seqlen, vocab]. labels: tokens [b, seqlen].
        """
        with torch.no_grad():
            wanted = self.dense(input_ids=labels, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        found = outputs.logits[:, :-1].float().log_softmax(-1)
        return F.kl_div(found, wanted, reduction="sum", log_target=True) / num_items_in_batch
