"""The cases of `drot bench`, and the calls that run them.

A case runs one decoder layer or the whole model, in one of two phases. A prefill of size n is one sequence of
n tokens. A decode of size n is one new token for each of n sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from drot.sparse.linear import packed_linears
from drot.sparse.packed import compress_model
from drot.speed.timing import replayed

#: tokens that a whole model generates for each sequence in a decode case
NEW_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """One measurement. size: the number of tokens of a prefill, or of sequences of a decode."""

    what: Literal["layer", "model"]
    phase: Literal["prefill", "decode"]
    size: int

    def __str__(self) -> str:
        return f"{self.what} {self.phase} {self.size}"


def set_compressed(model: nn.Module, phase: str) -> None:
    """Compresses the packed weights of `model` for a prefill, and drops their compressed forms for a decode.

    Only products of many tokens use the compressed forms, which take memory.
    """
    if phase == "prefill":
        compress_model(model)
    else:
        for _, linear in packed_linears(model):
            linear.drop_compressed()


def call_of(model: Any, case: Case, device: torch.device) -> Callable[[], object]:
    """A function that runs the case: one forward pass, or NEW_TOKENS of them in a decode of a whole model."""
    shape = (1, case.size) if case.phase == "prefill" else (case.size, 1)
    if case.what == "layer":
        hidden = torch.randn(*shape, model.config.hidden_size, dtype=model.dtype, device=device)
        call = lambda: model.base_model(inputs_embeds=hidden, use_cache=False)  # noqa: E731
        return replayed(call, device)
    ids = torch.randint(model.config.vocab_size, shape, device=device)
    if case.phase == "prefill":
        return lambda: model(ids, use_cache=False, logits_to_keep=1)
    options = dict(min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    if device.type == "cuda":  # with a static cache, transformers captures the step as a CUDA graph
        options["cache_implementation"] = "static"  # type: ignore[assignment]
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)
