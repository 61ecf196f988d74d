"""The calibration tokens on their way through a layer, which is pruned one input group after the other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from drot.calibration.hessian import HessianAccumulator, product_factor
from drot.calibration.stream import CalibrationStream
from drot.machine.devices import free_memory, total_memory
from drot.machine.products import add_product
from drot.machine.transfer import CopiesHome
from drot.model.family import InputGroup
from drot.model.inputs import capture, routed_inputs
from drot.model.layer import DecoderLayer, Output

#: the largest share of a device's memory that the inputs of the MLP's last linear may take if they are kept
KEPT_SHARE = 1 / 8


class LayerPass:
    """The inputs of a layer's linears, group after group, in the order of `layer.groups`.

    A group's linears may be pruned after their inputs were computed. So that the attention is computed once,
    one tensor [nsamples, seqlen, width] is kept where the stream lies: the inputs of the attention's last
    linear, and later its outputs.

    The inputs of the MLP's last linear are several times larger than the stream. They are kept too if they
    take at most KEPT_SHARE of the device's memory and leave `reserve` bytes of it free, and the stream lies
    there. Otherwise the linears in front of it are computed twice, for its inputs and for the output of the
    layer.

    fixed: whether the layer stays as it is during the pass. Then `outputs` are not computed again:
        those of the attention are kept, and with those of the last linear the stream advances at once.
    reserve: the bytes of the device's memory that the pruning of the layer takes beside the inputs.
    """

    def __init__(
        self, layer: DecoderLayer, stream: CalibrationStream, *, fixed: bool = False, reserve: int = 0
    ) -> None:
        self.layer, self.stream, self._fixed, self._reserve = layer, stream, fixed, reserve
        #: name of a group of an expert → the tokens of all ranks from which `hessian` computed
        self.tokens: dict[str, int] = {}
        self._kept: Tensor | None = None
        #: whether the inputs of the attention's last linear are kept, not its outputs
        self._kept_input = False
        #: number of a batch → the inputs of the MLP's last linear
        self._inputs_of_end: dict[int, Tensor] = {}
        #: whether the hidden states of the stream are the output of the layer
        self._advanced = False

    @torch.no_grad()
    def hessian(self, *groups: InputGroup) -> Tensor:
        """H [in, in] of a group, or [experts, in, in] of groups of experts that are alike."""
        group, stream = groups[0], self.stream
        size, count = self.layer.shape_of(group.linears[0])[1], None if group.expert is None else len(groups)
        accumulator = HessianAccumulator(size, stream.device, stream.ranks, count)
        for (x, _), root in zip(self.inputs(group), stream.roots(self.layer, group), strict=True):
            if count is None:
                accumulator.add(x, root)
            else:
                accumulator.add_experts(routed_inputs(self.layer, groups, x), root)
        if count is not None:
            stream.ranks.add_(accumulator.tokens)
            self.tokens |= dict(zip((one.name for one in groups), accumulator.tokens.tolist(), strict=True))
        return accumulator.hessian(len(stream.hidden_states))

    def inputs(self, group: InputGroup, *, outputs: bool = False) -> Iterator[tuple[Any, Tensor | None]]:
        """Yields for each batch the inputs x [sequences, seqlen, in] of a group, and what its linear writes.

        That is the residual stream [sequences, seqlen, d] with the output of the linear, as it is now, added.
        It is None without `outputs`, and for linears whose outputs the layer does not add. Of an expert x is
        what `routed_inputs` takes.
        """
        buffer, outputs = None, outputs and self.layer.adds(group)
        ends_attention, ends_layer = group is self.layer.attention_end, self.layer.ends_layer(group)
        last = outputs and ends_layer and self._fixed and group is self.layer.groups[-1]
        is_mlp_end = self.layer.is_mlp_end(group)
        keeps_inputs = is_mlp_end and not last and self._room_for(group)
        with CopiesHome(self.stream.device) as home:
            for index, (batch, hidden, kept) in enumerate(self._batches()):
                kwargs = self.stream.arguments(self.layer, batch)
                seen = capture(self.layer, hidden, kwargs, group, attention=self._attention(kept))
                if keeps_inputs:
                    self._inputs_of_end[index] = seen.input
                written = None
                new = seen.input if ends_attention else seen.attended
                if outputs:
                    linear = partial(self.layer.linears_of(group)[0].module, seen.input)
                    attended = kept if seen.attended is None else seen.attended
                    if ends_attention:
                        attended = linear()
                        written = seen.residual + self.layer.residual_multiplier * attended
                        new = attended if self._fixed else new
                    else:
                        mlp = linear if is_mlp_end else None
                        of_attention = None if attended is None else _value(attended)
                        written = self.layer(hidden, kwargs, attention=of_attention, mlp=mlp)
                if last and written is not None:
                    home.write(self.stream.hidden_states[batch], written)
                elif new is not None:
                    if buffer is None:
                        buffer = self._buffer(new)
                    home.write(buffer[batch], new)
                yield seen.input, written
        self._advanced = last
        if buffer is not None:
            self._kept, self._kept_input = buffer, ends_attention and not (outputs and self._fixed)

    @torch.no_grad()
    def advance(self) -> None:
        """Replaces the hidden states of the stream by the output of the layer, in place. The pass ends."""
        end = self.layer.groups[-1]
        if not self._advanced:
            with CopiesHome(self.stream.device) as home:
                for index, (batch, hidden, kept) in enumerate(self._batches()):
                    x = self._inputs_of_end.pop(index, None)
                    mlp = None if x is None else partial(self.layer.linears_of(end)[0].module, x)
                    kwargs = self.stream.arguments(self.layer, batch)
                    output = self.layer(hidden, kwargs, attention=self._attention(kept), mlp=mlp)
                    home.write(self.stream.hidden_states[batch], output)
        self._kept = None

    def _batches(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """The batches with their hidden states and, if there is a kept tensor, their part of it."""
        kept: Iterable[Tensor | None]
        kept = repeat(None) if self._kept is None else self.stream.loaded(self._kept)
        for (batch, hidden), of_batch in zip(self.stream.loaded_batches(), kept, strict=False):
            yield batch, hidden, of_batch

    def _room_for(self, group: InputGroup) -> bool:
        hidden, device = self.stream.hidden_states, self.stream.device
        width = self.layer.shape_of(group.linears[0])[1]
        size = hidden[..., 0].numel() * width * hidden.element_size()
        room = min(KEPT_SHARE * total_memory(device), free_memory(device) - self._reserve)
        return self.stream.on_device and size <= room

    def _buffer(self, like: Tensor) -> Tensor:
        """A tensor for all sequences, with the width and the dtype of `like`; the kept tensor if it fits.

        A batch of the kept tensor is read before the same batch is written.
        """
        kept, width = self._kept, like.shape[-1]
        if kept is not None and kept.shape[-1] == width and kept.dtype == like.dtype:
            return kept
        return self.stream.buffer(width, like.dtype)

    def _attention(self, kept: Tensor | None) -> Output | None:
        """The output of the attention for a batch, from its part of the kept tensor."""
        if kept is None:
            return None
        if self._kept_input:
            assert self.layer.attention_end is not None
            (linear,) = self.layer.linears_of(self.layer.attention_end)
            return partial(linear.module, kept)
        return _value(kept)


def _value(tensor: Tensor) -> Output:
    return lambda: tensor


@dataclass(frozen=True)
class TargetStatistics:
    """Sums over the calibration tokens, in the scale of a Hessian, (2/n) Σ.

    x is the input of a linear in the pruned model, x_dense in the dense model. A linear whose outputs are
    added to the residual stream leaves there y, as it is now, and y_dense in the dense model; where the layer
    multiplies the outputs before it adds them, y is divided by the number. One of C and E is None.

    hessian: H = (2/n) Σ x xᵀ [in, in].
    input_change: C = (2/n) Σ (x_dense - x) xᵀ [in, in], of the other linears, and of those whose outputs pass
        a norm before they are added.
    output_change: E = (2/n) Σ (y_dense - y) xᵀ [out, in], of a linear that does.
    """

    hessian: Tensor
    input_change: Tensor | None = None
    output_change: Tensor | None = None


@torch.no_grad()
def target_statistics(pruned: LayerPass, dense: LayerPass, group: InputGroup) -> TargetStatistics:
    """The statistics of an input group, whose linears are not pruned yet. Both passes go on to it.

    pruned: the pass through the layer that is being pruned.
    dense: that of the dense model through the layer as it was, in the same basis.
    """
    out, size = pruned.layer.shape_of(group.linears[0])
    device, ranks, sequences = pruned.stream.device, pruned.stream.ranks, len(pruned.stream.hidden_states)
    hessian = HessianAccumulator(size, device, ranks)
    adds = pruned.layer.adds(group)
    change = torch.zeros(out if adds else size, size, dtype=torch.float32, device=device)
    batches = (of_model.inputs(group, outputs=True) for of_model in (pruned, dense))
    roots = pruned.stream.roots(pruned.layer, group)
    for (x, y), (x_dense, y_dense), root in zip(*batches, roots, strict=True):
        hessian.add(x, root)
        if y is not None and y_dense is not None:
            difference = product_factor(y_dense).sub(product_factor(y))
        else:
            difference = product_factor(x_dense).sub(product_factor(x))
        add_product(change, product_factor(difference, root).T, product_factor(x, root))
    ranks.add_(change)
    change.mul_(2.0 / ranks.total(sequences))
    if adds:
        change.div_(pruned.layer.residual_multiplier)  # E is of the outputs of the linear
        return TargetStatistics(hessian.hessian(sequences), output_change=change)
    return TargetStatistics(hessian.hessian(sequences), input_change=change)
