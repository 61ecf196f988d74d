"""The inputs of a decoder layer's linears, which a forward pass shows."""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drot.model.family import InputGroup
from drot.model.layer import DecoderLayer, Output
from drot.model.linear import module_at, reset_norm, scale_of


class Captured(NamedTuple):
    """What a forward pass of a layer saw up to the input of a group.

    input: the input [sequences, seqlen, in] of the group, or [tokens, in] of an expert.
    residual: the residual stream [sequences, seqlen, d] in front of the attention.
    attended: the output [sequences, seqlen, d] of the attention; None if it was not computed.
    """

    input: Tensor
    residual: Tensor
    attended: Tensor | None


class _Stop(Exception):
    """Ends a forward pass."""


def capture(
    layer: DecoderLayer,
    hidden: Tensor,
    kwargs: dict[str, Any],
    group: InputGroup,
    *,
    attention: Output | None = None,
) -> Captured:
    """The input of `group`, from a forward pass that ends there. The arguments are those of a call."""
    seen: dict[str, Tensor] = {}

    def see_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen["input"] = args[0]
        raise _Stop

    if group.expert is not None:

        def see_routed(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen["input"] = _routed_input(layer, group, args)
            raise _Stop

        hook = module_at(layer.module, layer.family.experts or "").register_forward_pre_hook(see_routed)
    else:
        hook = layer.linears_of(group)[0].module.register_forward_pre_hook(see_input)
    (attention_end,) = layer.linears_of(layer.attention_end)
    # a norm reads the stream behind the rotation of a boundary; a layer without norms there has no such one
    norms = layer.norms
    with (
        (norms[0] if norms else layer.module).register_forward_pre_hook(
            lambda module, args: seen.update(residual=args[0])
        ),
        attention_end.module.register_forward_hook(lambda module, args, output: seen.update(attended=output)),
        hook,
        contextlib.suppress(_Stop),
    ):
        layer(hidden, kwargs, attention=attention)
    return Captured(seen["input"], seen["residual"], seen.get("attended"))


@contextlib.contextmanager
def reading(
    layer: DecoderLayer,
    groups: Collection[InputGroup],
    read: Callable[[InputGroup, Tensor], None],
    *,
    folded: bool = False,
    to_end: bool = False,
) -> Iterator[Callable[[Tensor, dict[str, Any]], Tensor | None]]:
    """A context with a forward pass that calls `read` with the input of each of `groups`.

    folded: whether the inputs are those without the weights of norms, which a rotation folds into the
        linears.
    to_end: whether the pass goes on to the output of the layer. Otherwise it ends at the last of
        `groups`, and returns None.
    """
    remaining: set[str] = set()

    def hook(group: InputGroup, norm: Any) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            read(group, args[0] if norm is None else norm(args[0]))
            remaining.discard(group.name)
            if not remaining and not to_end:
                raise _Stop

        return see

    def see_routed(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        for group in groups:
            if group.expert is not None:
                x = _routed_input(layer, group, args)
                read(group, _unfolded(layer, group, x) if folded else x)
                remaining.discard(group.name)
        if not remaining and not to_end:
            raise _Stop

    def forward(hidden: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        remaining.update(group.name for group in groups)
        with contextlib.suppress(_Stop):
            return layer(hidden, kwargs)
        return None

    with contextlib.ExitStack() as hooks:
        if any(group.expert is not None for group in groups):
            experts = module_at(layer.module, layer.family.experts or "")
            hooks.enter_context(experts.register_forward_pre_hook(see_routed))
        for group in groups:
            if group.expert is not None:
                continue
            module, norm = layer.linears_of(group)[0].module, None
            if folded and group.norm is not None and layer.family.rotates_stream:
                module = module_at(layer.module, group.norm)
                norm = copy.deepcopy(module)
                reset_norm(norm, layer.family)
            hooks.enter_context(module.register_forward_pre_hook(hook(group, norm)))
        yield forward


def _routed_input(layer: DecoderLayer, group: InputGroup, args: tuple[Tensor, ...]) -> Tensor:
    """The input [tokens, in] of a group of an expert, from the arguments of the module of all experts.

    args: the inputs [all tokens, d], and the experts [all tokens, chosen] of each token.
    """
    hidden, chosen, *_ = args
    x = hidden if layer.route_all else hidden[chosen.eq(group.expert or 0).any(-1)]
    if group.norm is not None:
        return x
    experts = module_at(layer.module, layer.family.experts or "")
    gate, up = (
        nn.functional.linear(x, linear.weight, linear.bias)
        for linear in layer.linears.values()
        if linear.spec.expert == group.expert and not linear.spec.writes_residual
    )
    if layer.family.gated is not None:
        gated: Tensor = getattr(experts, layer.family.gated)(torch.stack([gate, up], -1).flatten(-2))
        return gated
    result: Tensor = getattr(experts, layer.family.activation)(gate) * up
    return result


def _unfolded(layer: DecoderLayer, group: InputGroup, x: Tensor) -> Tensor:
    """The input x of a group without the weight of its norm; 0 where that is 0."""
    if group.norm is None:
        return x
    scale = scale_of(module_at(layer.module, group.norm), layer.family)
    scale = scale.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(scale == 0, 0, x / scale)
