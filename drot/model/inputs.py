"""The inputs of a decoder layer's linears, which a forward pass shows."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drot.model.block_rotation import DOWN_ROTATION
from drot.model.experts import gated
from drot.model.family import InputGroup, alike
from drot.model.layer import DecoderLayer, Output
from drot.model.linear import module_at, reset_norm, scale_of

#: most bytes of the inputs of experts that are computed at once, in the wider of their linears' sides
ROUTED_BYTES = 1 << 29


class Captured(NamedTuple):
    """What a forward pass of a layer saw up to the input of a group.

    input: the input [sequences, seqlen, in] of the group. Of the group of an expert the arguments of the
        module of all experts, for `routed_inputs`.
    residual: the residual stream [sequences, seqlen, d] in front of the attention.
    attended: the output [sequences, seqlen, d] of the attention; None if it was not computed.
    """

    input: Any
    residual: Tensor
    attended: Tensor | None


class RoutedInputs(NamedTuple):
    """The inputs of the groups of some experts.

    places: int64 [n], which of the groups.
    tokens: int64 [n], the number of tokens of each.
    input: [n, most tokens, in], with rows of zeros below the tokens of each.
    routed: int64 [n, most tokens], the number of each row's token; any below the tokens of each.
    """

    places: Tensor
    tokens: Tensor
    input: Tensor
    routed: Tensor


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
    seen: dict[str, Any] = {}

    def see_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen["input"] = args[0] if group.expert is None else args
        raise _Stop

    def see_attended(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen["attended"] = output

    if group.expert is None:
        reader = layer.linears_of(group)[0].module
    else:
        reader = module_at(layer.module, layer.family.experts or "")
    # a norm reads the stream behind the rotation of a boundary; a layer without norms there has no such one
    stream = layer.norms[0] if layer.family.norms else layer.module
    with contextlib.suppress(_Stop), contextlib.ExitStack() as hooks:
        hooks.enter_context(
            stream.register_forward_pre_hook(lambda module, args: seen.update(residual=args[0]))
        )
        hooks.enter_context(reader.register_forward_pre_hook(see_input))
        if layer.attention_end is not None:
            (linear,) = layer.linears_of(layer.attention_end)
            hooks.enter_context(linear.module.register_forward_hook(see_attended))
        layer(hidden, kwargs, attention=attention)
    return Captured(seen["input"], seen["residual"], seen.get("attended"))


@contextlib.contextmanager
def reading(
    layer: DecoderLayer,
    groups: Collection[InputGroup],
    read: Callable[[InputGroup, Tensor], None],
    read_routed: Callable[[list[InputGroup], Iterator[RoutedInputs]], None],
    *,
    folded: bool = False,
    to_end: bool = False,
) -> Iterator[Callable[[Tensor, dict[str, Any]], Tensor | None]]:
    """A context with a forward pass that calls `read` with the input of each of `groups`.

    For those of experts it calls `read_routed`, with all that are alike at once.

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
        for of_experts in alike(group for group in groups if group.expert is not None):
            read_routed(of_experts, routed_inputs(layer, of_experts, args, folded=folded))
            remaining.difference_update(group.name for group in of_experts)
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
        seen = []
        for group in groups:
            if group.expert is not None:
                continue
            module, norm = layer.linears_of(group)[0].module, None
            if folded and group.norm is not None and layer.family.rotates_stream:
                module = module_at(layer.module, group.norm)
                norm = copy.deepcopy(module)
                reset_norm(norm, layer.family)
            seen.append((module, hook(group, norm)))
        for module, see in seen:  # after the copies, which would copy the hook of another group with one norm
            hooks.enter_context(module.register_forward_pre_hook(see))
        yield forward


def routed_inputs(
    layer: DecoderLayer, groups: Sequence[InputGroup], args: tuple[Tensor, ...], *, folded: bool = False
) -> Iterator[RoutedInputs]:
    """The inputs of groups of experts that are alike.

    The experts with nearly the same number of tokens come together, so that at most half of the rows are
    zeros, and with at most ROUTED_BYTES. Experts without tokens do not come.

    args: the inputs [all tokens, d], and the experts [all tokens, chosen] of each token.
    folded: as in `reading`.
    """
    hidden, chosen, *_ = args
    group, experts = groups[0], torch.tensor([group.expert for group in groups], device=hidden.device)
    if layer.route_all:
        reached = torch.ones(len(groups), len(hidden), dtype=torch.bool, device=hidden.device)
    else:
        reached = (chosen[None] == experts[:, None, None]).any(-1)
    tokens = reached.sum(1)
    numbers = tokens.tolist()
    own = [linear.spec for linear in layer.linears.values() if linear.spec.expert == group.expert]
    widest = max(size for spec in own for size in layer.shape_of(spec))
    width = layer.shape_of(group.linears[0])[1]
    by_size = sorted((place for place, number in enumerate(numbers) if number), key=lambda p: numbers[p])
    for size, of_size in itertools.groupby(by_size, lambda place: (numbers[place] - 1).bit_length()):
        # what is made of them is an input or a matrix [in, in] in fp32
        bytes_of = max(2**size * widest * hidden.element_size(), 4 * width**2)
        same, step = list(of_size), max(1, ROUTED_BYTES // bytes_of)
        for start in range(0, len(same), step):
            found = same[start : start + step]
            places = torch.tensor(found, device=hidden.device)
            mask, count = reached[places], tokens[places]
            rows, columns = mask.nonzero(as_tuple=True)
            x = hidden.new_zeros(len(found), numbers[found[-1]], hidden.shape[-1])
            at = (mask.cumsum(1) - 1)[rows, columns]
            x[rows, at] = hidden[columns]
            routed = columns.new_zeros(x.shape[:2])
            routed[rows, at] = columns
            if group.linears[0] != own[0]:
                x = _intermediate(layer, group, experts[places], x)
                x *= (torch.arange(x.shape[1], device=x.device) < count[:, None])[..., None]
            yield RoutedInputs(places, count, _unfolded(layer, group, x) if folded else x, routed)


def _intermediate(layer: DecoderLayer, group: InputGroup, experts: Tensor, x: Tensor) -> Tensor:
    """The inputs of down_proj of `experts` [n], from those of the experts x [n, tokens, d].

    group: that of the down_proj of any expert.
    """
    module = module_at(layer.module, layer.family.experts or "")
    outputs = []
    for linear in layer.linears.values():
        if linear.spec.expert == group.expert and linear.spec not in group.linears:
            outputs.append(x @ linear.weights_of(experts).mT)
            if (biases := linear.biases_of(experts)) is not None:
                outputs[-1] += biases[:, None]
    found = gated(module, layer.family, *outputs)
    if (rotation := getattr(module, DOWN_ROTATION, None)) is None:
        return found
    pairs = zip(found, experts.tolist(), strict=True)
    return torch.stack([rotation.of_expert(rows, expert) for rows, expert in pairs])


def _unfolded(layer: DecoderLayer, group: InputGroup, x: Tensor) -> Tensor:
    """The input x of a group without the weight of its norm; 0 where that is 0."""
    if group.norm is None:
        return x
    scale = scale_of(module_at(layer.module, group.norm), layer.family)
    scale = scale.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(scale == 0, 0, x / scale)
