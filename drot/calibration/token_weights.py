"""How much each calibration token counts in the Hessians and the targets of a layer's linears.

A change δy of a linear's output at a token changes the loss of the dense model by about gᵀδy, with g the
gradient of the loss in that output. A sum of ‖δy‖² over the tokens, which a Hessian H = (2/n) Σ x xᵀ stands
for, counts all tokens alike. With w ‖δy‖² it counts them by w, the root of the mean of g² over the outputs.
GuidedQuant (arXiv 2505.07004) weights groups of outputs by means of g² itself, for quantisation. Here one
weight of a token serves all outputs, so that the linears that read one input still share one Hessian.

The tokens at which a model has massive activations, mostly the first of a sequence, have small gradients.
Without weights, 8 of 4,096 tokens hold up to 90 % of the trace of a Hessian in SmolLM2-135M.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drot.model.decoder import DecoderModel
from drot.model.family import InputGroup
from drot.model.layer import DecoderLayer

#: the name of the groups of all experts of a layer, which have the weights of the outputs of their mixture
EXPERTS = "experts"
#: tokens whose logits are computed at once
LOGIT_TOKENS = 512


@dataclass(frozen=True)
class TokenWeights:
    """The weights of the calibration tokens of all ranks, with a mean of 1 for each input group.

    tensors: `<layer>.<input group>` → fp16 [nsamples, seqlen].
    """

    tensors: Mapping[str, Tensor]

    def of(self, layer: DecoderLayer, group: InputGroup) -> Tensor:
        """Those of an input group [nsamples, seqlen]; all groups of experts have the same."""
        return self.tensors[key_of(layer, group)]


def key_of(layer: DecoderLayer, group: InputGroup) -> str:
    return f"{layer.index}.{group.name if group.expert is None else EXPERTS}"


def loss_gradient(model: DecoderModel, hidden: Tensor, tokens: Tensor, norm: Any, head: Any) -> Tensor:
    """The gradient of the summed loss of the next tokens in the outputs of the last layer.

    Args:
        hidden: these outputs [sequences, seqlen, d].
        tokens: the token ids [sequences, seqlen]. The last of a sequence predicts nothing.
        norm, head: the last norm and the head of `model`, on the device of `hidden`.
    """
    labels = tokens.to(hidden.device).roll(-1, 1)
    labels[:, -1] = -100  # which cross_entropy leaves out
    found = torch.empty_like(hidden)
    for row, row_labels, result in zip(hidden, labels, found, strict=True):
        own = row.detach().requires_grad_()
        with torch.enable_grad():  # torch counts no operations behind a leaf that a module reads
            outputs = norm(own[None])
        gradients = []
        for part, of_part in zip(
            outputs.detach()[0].split(LOGIT_TOKENS), row_labels.split(LOGIT_TOKENS), strict=True
        ):
            part.requires_grad_()
            with torch.enable_grad():
                logits = model.logits_of(head(part[None])[0]).float()
                loss = torch.nn.functional.cross_entropy(logits, of_part, reduction="sum")
            gradients += torch.autograd.grad(loss, part)
        (gradient,) = torch.autograd.grad(outputs, own, torch.cat(gradients)[None])
        result.copy_(gradient)
    return found


def layer_gradients(
    layer: DecoderLayer, hidden: Tensor, kwargs: dict[str, Any], gradient: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of the loss in the inputs of a layer, from that in its outputs [sequences, seqlen, d].

    Also returns `key_of` each input group → the mean of its square over the outputs of the group's linears,
    fp32 [sequences, seqlen].
    """
    shape = hidden.shape[:2]
    own = hidden.detach().requires_grad_()
    with _squares(layer) as squares:
        with torch.enable_grad():
            outputs = layer(own.view_as(own), kwargs)
        (found,) = torch.autograd.grad(outputs, own, gradient)
    means = {key: total.view(shape) for key, total in squares.items()}
    for group in layer.groups:  # of the linears of a group that no output depends on, and of experts
        key = key_of(layer, group)
        if group.expert is not None and key not in means:
            means[key] = _squared_norms(gradient) / gradient.shape[-1]
        elif key not in means:
            means[key] = torch.zeros(shape, device=hidden.device)
    return found, means


def _squared_norms(gradient: Tensor) -> Tensor:
    """The sums of squares over the last dimension, in fp32, from one reading of the gradient in its dtype."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dim=-1, dtype=dtype).square().float()


@contextlib.contextmanager
def _squares(layer: DecoderLayer) -> Iterator[dict[str, Tensor]]:
    """A context in which a backward pass adds up, for each input group, g² over the outputs of its linears.

    The results are means over the outputs, fp32 [tokens].
    """
    found: dict[str, Tensor] = {}

    def hook(key: str, share: float) -> Any:
        def see_gradient(gradient: Tensor) -> None:
            squares = _squared_norms(gradient.reshape(-1, gradient.shape[-1])) * share
            found[key] = found[key] + squares if key in found else squares

        def see_output(module: Any, args: Any, output: Tensor) -> None:
            output.register_hook(see_gradient)

        return see_output

    with contextlib.ExitStack() as hooks:
        for group in layer.groups:
            if group.expert is not None:
                continue
            share = 1 / sum(layer.shape_of(spec)[0] for spec in group.linears)
            for linears in layer.modules_of(group):
                hooks.enter_context(
                    linears[0].module.register_forward_hook(hook(key_of(layer, group), share))
                )
        yield found
