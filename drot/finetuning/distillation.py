"""The loss of a training against a dense model: KL(dense ‖ model) of the next token."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drot.checkpoint.load import has_tokenizer, load_model, load_tokenizer
from drot.checkpoint.source import model_folder
from drot.core.errors import UserError
from drot.sparse.linear import is_packed
from drot.text.source import tokenize


def load_dense(source: str, pruned: Any, tokenizer: Any, sample: Tensor) -> Any:
    """The dense model of `source`, on the CPU. Raises UserError if its tokens are not those of `pruned`.

    tokenizer: of `pruned`; without a method `decode` the number of tokens alone is compared.
    sample: token ids [n] of a text.
    """
    if callable(tokenizer) and hasattr(tokenizer, "decode") and has_tokenizer(model_folder(source)):
        text = tokenizer.decode(sample, skip_special_tokens=True)
        own, other = (tokenize(text, each) for each in (tokenizer, load_tokenizer(source)))
        if not torch.equal(own, other):
            raise UserError(
                f"`against` must have the tokenizer of the pruned model; the token ids of {source} differ: "
                "name the model that was pruned"
            )
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
