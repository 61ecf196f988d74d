"""The zeros of a pruned model: training that leaves them zero, and rounding that adds none."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drot.model.decoder import DecoderModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pruned_linears(model: "PreTrainedModel") -> Iterator[tuple[str, nn.Linear]]:
    """The name and the module of each of the seven linears of every decoder layer."""
    for layer in DecoderModel(model).layers:
        for linear in layer.linears.values():
            yield f"layer {layer.index}, {linear.name}", linear.plain


def removed_weights(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Name of a linear → bool [out, in], True where the weight is zero."""
    return {name: linear.weight.detach() == 0 for name, linear in pruned_linears(model)}


def choose_full(model: "PreTrainedModel") -> None:
    """Makes the seven linears of every decoder layer and all norms trainable, and nothing else."""
    model.requires_grad_(False)
    for _, linear in pruned_linears(model):
        linear.requires_grad_(True)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.requires_grad_(True)


@contextlib.contextmanager
def frozen_zeros(model: "PreTrainedModel", removed: dict[str, Tensor]) -> Iterator[None]:
    """Sets the gradient of every removed weight to 0 before it is added up or an optimiser reads it.

    Adam then keeps both moments of a removed weight at 0. Its step is 0, and weight decay of 0 is 0.
    """
    handles: list[RemovableHandle] = []
    for name, linear in pruned_linears(model):
        mask = removed[name]
        handles.append(linear.weight.register_hook(lambda grad, mask=mask: grad.masked_fill(mask, 0)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def round_weights(model: "PreTrainedModel", removed: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Rounds every parameter to a value of `dtype` and keeps the parameter's own dtype.

    The removed weights must be the only zeros before pruning and after: a kept weight that is rounded to 0
    becomes the smallest normal number of `dtype`. Raises RuntimeError if a removed weight is not 0.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    for name, linear in pruned_linears(model):
        weight = linear.weight.data
        mask = removed[name].to(weight.device)
        if bool(weight[mask].any()):
            raise RuntimeError(f"{name}: a removed weight is no longer 0")
        weight.masked_fill_((weight == 0) & ~mask, torch.finfo(dtype).tiny)
