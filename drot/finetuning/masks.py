"""The zeros of a pruned model: training that leaves them zero, and rounding that adds none."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from drot.core.errors import UserError
from drot.model.block_rotation import DOWN_ROTATION
from drot.model.boundary import ROTATION_MODULE
from drot.model.decoder import DecoderModel
from drot.model.dtypes import stored_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pruned_linears(model: "PreTrainedModel") -> Iterator[tuple[str, nn.Linear]]:
    """The name and the module of each linear, or fused linears, of every decoder layer."""
    for layer in DecoderModel(model).layers:
        for first, *_ in layer.modules:
            yield f"layer {layer.index}, {first.module_name}", first.plain


def removed_weights(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Name of a module → bool [out, in], True where the weight is zero."""
    return {name: linear.weight.detach() == 0 for name, linear in pruned_linears(model)}


def choose_full(model: "PreTrainedModel") -> None:
    """Makes the linears of every decoder layer and all norms trainable, and nothing else."""
    model.requires_grad_(False)
    for _, linear in pruned_linears(model):
        linear.requires_grad_(True)
    for layer in DecoderModel(model).layers:
        for norm in (*layer.norms, *layer.post_norms):
            norm.weight.requires_grad_(True)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # also those of a head, and the last
            parameter.requires_grad_(True)


class KeepMask(TrainerCallback):
    """A callback of transformers' Trainer, under which the zeros of a pruned model stay zeros.

    It sets the gradient of every removed weight to 0 before it is added up or an optimiser reads it. Adam
    then keeps both moments of a removed weight at 0. Its step is 0, and weight decay of 0 is 0.

    Raises UserError when the training begins, if it trains no linear of a decoder layer, as with LoRA, and
    after the first step with a rate above 0, if the optimiser moves weights whose gradient is 0.

    removed: the result of `removed_weights`; None finds the zeros when the training begins.
    """

    def __init__(self, removed: dict[str, Tensor] | None = None) -> None:
        self._handles: list[RemovableHandle] = []
        self._removed = removed
        self._checked = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not any(linear.weight.requires_grad for _, linear in pruned_linears(model)):
            raise UserError(
                "KeepMask keeps the zeros of linears that are trained, but this training moves none of them: "
                "leave it out, and for LoRA that keeps the zeros use drot.finetune"
            )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and any(of in name for of in (ROTATION_MODULE, DOWN_ROTATION)):
                raise UserError(
                    f"{name} must stay as it is, orthogonal, but this training moves it: call "
                    "requires_grad_(False) on it"
                )
        self._removed = self._removed or removed_weights(model)
        for name, linear in pruned_linears(model):
            if linear.weight.requires_grad:
                mask = self._removed[name]
                hook = linear.weight.register_hook(lambda grad, mask=mask: grad.masked_fill(mask, 0))
                self._handles.append(hook)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kw: Any
    ) -> None:
        if self._checked or self._removed is None:
            return
        groups = getattr(optimizer, "param_groups", [])
        # a warm-up begins with a rate of 0, with which nothing moves
        self._checked = not groups or any(group["lr"] for group in groups)
        for name, linear in pruned_linears(model):
            if bool(linear.weight.detach()[self._removed[name]].any()):
                raise UserError(f"{name}: the optimiser moves weights whose gradient is 0: use one as AdamW")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._removed, self._checked = [], None, False


@torch.no_grad()
def round_trained(model: "PreTrainedModel", removed: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Rounds every parameter to a value of its `stored_dtype` and keeps the parameter's own dtype.

    The removed weights must be the only zeros before pruning and after: a kept weight that is rounded to 0
    becomes the smallest normal number of `dtype`. Raises RuntimeError if a removed weight is not 0.
    """
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(stored_dtype(model, name, dtype)).to(parameter.dtype)
    for name, linear in pruned_linears(model):
        weight = linear.weight.data
        mask = removed[name].to(weight.device)
        if bool(weight[mask].any()):
            raise RuntimeError(f"{name}: a removed weight is no longer 0")
        weight.masked_fill_((weight == 0) & ~mask, torch.finfo(dtype).tiny)
