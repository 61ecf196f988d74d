"""How much each calibration token counts in the Hessians and the targets of a layer's linears, and how much
each output of a linear counts in the training of the rotations.

A change δy of a linear's output at a token changes the loss of the dense model by about gᵀδy, with g the
gradient of the loss in that output. A sum of ‖δy‖² over the tokens, which a Hessian H = (2/n) Σ x xᵀ stands
for, counts all tokens alike. With w ‖δy‖² it counts them by w, the root of the mean of g² over the outputs.
GuidedQuant (arXiv 2505.07004) weights groups of outputs by means of g² itself, for quantisation. Here one
weight of a token serves all outputs, so that the linears that read one input still share one Hessian.

The means of g² over the tokens say how much each output counts: a removed weight of its row changes the loss
by about that, times the removed importance. Only the objective of a rotation compares rows: a row is pruned
and solved for by itself.

The tokens at which a model has massive activations, mostly the first of a sequence, have small gradients.
Without weights, 8 of 4,096 tokens hold up to 90 % of the trace of a Hessian in SmolLM2-135M.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drot.calibration.lent import LentOfSequences
from drot.model.decoder import DecoderModel
from drot.model.family import LENT, InputGroup
from drot.model.layer import DecoderLayer
from drot.model.linear import Linear

#: the name of the groups of all experts of a layer, which have the weights of the outputs of their mixture
EXPERTS = "experts"
#: tokens whose logits are computed at once
LOGIT_TOKENS = 512


@dataclass(frozen=True)
class TokenWeights:
    """The weights of the calibration tokens of all ranks, with a mean of 1 for each input group.

    tensors: `<layer>.<input group>` → fp16 [nsamples, seqlen].
    outputs: `<layer>.<linear>` → how much each of its outputs counts, fp32 [out], for linears of no expert.
        Their mean over all outputs of the model is 1.
    """

    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor] = field(default_factory=dict)

    def of(self, layer: DecoderLayer, group: InputGroup) -> Tensor:
        """Those of an input group [nsamples, seqlen]; all groups of experts have the same."""
        return self.tensors[key_of(layer, group)]

    def of_outputs(self, layer: DecoderLayer) -> dict[str, Tensor]:
        """Name → weights [out] of the outputs of the linears of a layer that have some."""
        keys = {name: output_key(layer, name) for name in layer.linears}
        return {name: self.outputs[key] for name, key in keys.items() if key in self.outputs}


def key_of(layer: DecoderLayer, group: InputGroup) -> str:
    return f"{layer.index}.{group.name if group.expert is None else EXPERTS}"


def output_key(layer: DecoderLayer, linear: str) -> str:
    return f"{layer.index}.{linear}"


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
    layer: DecoderLayer,
    hidden: Tensor,
    kwargs: dict[str, Any],
    gradient: Tensor,
    of_lent: LentOfSequences | None = None,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The gradient of the loss in the inputs of a layer, from that in its outputs [sequences, seqlen, d].

    Also returns `key_of` each input group → the mean of its square over the outputs of the group's linears,
    fp32 [sequences, seqlen]; and `output_key` of each linear of no expert → its sum of squares over the
    tokens, fp32 [out].

    of_lent: the gradient in the keys and values that layers lend. That in those which this layer lends
        counts, and that in those which it borrows is added.
    """
    shape = hidden.shape[:2]
    own = hidden.detach().requires_grad_()
    lent = None if of_lent is None else _Traced(kwargs[LENT], of_lent)
    if lent is not None:
        kwargs = kwargs | {LENT: lent}
    with _squares(layer) as (squares, of_outputs):
        with torch.enable_grad():
            outputs = layer(own.view_as(own), kwargs)
        ends, given, starts = [outputs], [gradient], [own]
        if lent is not None:
            for kind in filter(lent.gradient.__contains__, lent.written):  # the others no layer has borrowed
                ends += lent.written[kind]
                given += lent.gradient[kind]
            starts += itertools.chain(*lent.read.values())
        found, *others = torch.autograd.grad(ends, starts, given)
    if lent is not None:
        for kind, pair in lent.read.items():
            lent.gradient.add(kind, others[: len(pair)])
            others = others[len(pair) :]
    means = {key: total.view(shape) for key, total in squares.items()}
    for group in layer.groups:  # of the linears of a group that no output depends on, and of experts
        key = key_of(layer, group)
        if group.expert is not None and key not in means:
            means[key] = _squared_norms(gradient) / gradient.shape[-1]
        elif key not in means:
            means[key] = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
    return found, means, of_outputs


class _Traced:
    """The keys and values that layers lend, with those that a layer reads and writes in a forward pass.

    Those that it reads are leaves of the graph. Those that it writes are not kept.

    gradient: that of the loss in all of them.
    """

    def __init__(self, lent: LentOfSequences, gradient: LentOfSequences) -> None:
        self._lent, self.gradient = lent, gradient
        self.read: dict[str, list[Tensor]] = {}
        self.written: dict[str, Sequence[Tensor]] = {}

    def __getitem__(self, kind: str) -> Sequence[Tensor]:
        return self.read.setdefault(kind, [one.requires_grad_() for one in self._lent[kind]])

    def __setitem__(self, kind: str, values: Sequence[Tensor]) -> None:
        self.written[kind] = values


def _squared_norms(gradient: Tensor, dim: int = -1) -> Tensor:
    """The sums of squares over a dimension, in fp32, from one reading of the gradient in its dtype."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dim=dim, dtype=dtype).square().float()


@contextlib.contextmanager
def _squares(layer: DecoderLayer) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """A context in which a backward pass adds up g² of the outputs of the linears, but for those of experts.

    The results are `key_of` each input group → the means over its outputs, fp32 [tokens]; and `output_key` of
    each linear → the sums over the tokens, fp32 [out].
    """
    found: dict[str, Tensor] = {}
    of_outputs: dict[str, Tensor] = {}

    def hook(key: str, share: float, linears: Sequence[Linear]) -> Any:
        keys = [output_key(layer, linear.name) for linear in linears]
        sizes = [layer.shape_of(linear.spec)[0] for linear in linears]

        def see_gradient(gradient: Tensor) -> None:
            gradient = gradient.reshape(-1, gradient.shape[-1])
            squares = _squared_norms(gradient) * share
            found[key] = found[key] + squares if key in found else squares
            of_outputs.update(zip(keys, _squared_norms(gradient, 0).split(sizes), strict=True))

        def see_output(module: Any, args: Any, output: Tensor) -> None:
            output.register_hook(see_gradient)

        return see_output

    with contextlib.ExitStack() as hooks:
        for group in layer.groups:
            if group.expert is not None:
                continue
            share = 1 / sum(layer.shape_of(spec)[0] for spec in group.linears)
            for linears in layer.modules_of(group):
                see = hook(key_of(layer, group), share, linears)
                hooks.enter_context(linears[0].module.register_forward_hook(see))
        yield found, of_outputs
