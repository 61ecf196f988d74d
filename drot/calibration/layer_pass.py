"""The calibration tokens on their way through a layer, which is pruned one input group after the other."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drot.calibration.hessian import HessianAccumulator
from drot.calibration.stream import CalibrationStream, StopForward
from drot.machine.devices import total_memory
from drot.model.families import INPUT_GROUPS, Architecture, layer_linears, module_at

#: the largest share of a device's memory that the inputs of down_proj may take if they are kept
KEPT_SHARE = 1 / 8
#: the groups whose linears' outputs are added to the residual stream
ADDED_TO_RESIDUAL = ("o", "down")


class LayerPass:
    """The inputs of a layer's linears, group after group, in the order of INPUT_GROUPS.

    A group's linears may be pruned after their inputs were computed. The inputs of the next group are then
    computed without the parts of the layer in front of the pruned linears. For this, one tensor
    [nsamples, seqlen, width] is kept where the stream lies: the inputs of o_proj, and later its outputs. So
    the attention is computed once.

    The inputs of down_proj are several times larger than the stream. They are kept too if they take at most
    KEPT_SHARE of the device's memory and the stream lies there. Otherwise gate_proj and up_proj are computed
    twice, for the inputs of down_proj and for the output of the layer.

    layer: a decoder layer.
    stream: the inputs of the layer.
    index: number of the layer.
    arch: family of the model.
    """

    def __init__(self, layer: nn.Module, stream: CalibrationStream, index: int, arch: Architecture) -> None:
        self.layer, self.stream, self.index, self.arch = layer, stream, index, arch
        self.linears = layer_linears(layer, arch)
        self._kept: Tensor | None = None
        self._kept_input = False  # whether the inputs of o_proj are kept, and not its outputs
        self._down_inputs: dict[int, Tensor] = {}  # number of a batch → the inputs of down_proj

    @torch.no_grad()
    def hessian(self, group: str) -> Tensor:
        """H [in, in], fp32, of the inputs of a group."""
        accumulator = HessianAccumulator(self.linears[INPUT_GROUPS[group][0]].in_features, self.stream.device)
        for x, _ in self.inputs(group):
            accumulator.add(x)
        return accumulator.hessian()

    def inputs(self, group: str, *, residual: bool = False) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields for each batch the inputs x [sequences, seqlen, in] of a group, and a residual stream.

        The residual stream [sequences, seqlen, d] is that to which the linear's output is added, after the
        rotation of the residual that the layer may hold. It is None without `residual`, and for groups that
        are not in ADDED_TO_RESIDUAL.
        """
        buffer = None
        keeps_inputs = group == "down" and self._room_for_inputs_of_down()
        with self.stream.copies_home() as home:
            for index, (batch, hidden, kept) in enumerate(self._batches()):
                seen = self._seen(hidden, kept, group)
                if keeps_inputs:
                    self._down_inputs[index] = seen["input"]
                rest = None
                if residual and group in ADDED_TO_RESIDUAL:
                    rest = seen["residual"] if group == "o" else self._residual_of_mlp(hidden, kept, seen)
                new = (
                    seen["input"] if group == "o" else seen.get("attended") if group != "attention" else None
                )
                if new is not None:
                    if buffer is None:
                        buffer = self._buffer(new)
                    home.write(buffer[batch], new)
                yield seen["input"], rest
        if buffer is not None:
            self._kept, self._kept_input = buffer, group == "o"

    @torch.no_grad()
    def advance(self) -> None:
        """Replaces the hidden states of the stream by the output of the layer. The pass ends."""
        out = self._buffer(self.stream.hidden_states)
        mlp, down = module_at(self.layer, self.arch.mlp), self.linears["down_proj"]
        with self.stream.copies_home() as home:
            for index, (batch, hidden, kept) in enumerate(self._batches()):
                x = self._down_inputs.pop(index, None)
                known = contextlib.nullcontext() if x is None else _returning(mlp, functools.partial(down, x))
                with self._attention_known(kept), known:
                    output = self.layer(hidden, **self.stream.layer_kwargs[self.index])
                home.write(out[batch], output)
        self.stream.hidden_states, self._kept = out, None

    def _batches(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """The batches with their hidden states and, if there is a kept tensor, their part of it."""
        kept: Iterable[Tensor | None]
        kept = itertools.repeat(None) if self._kept is None else self.stream.loaded(self._kept)
        for (batch, hidden), of_batch in zip(self.stream.loaded_batches(), kept, strict=False):
            yield batch, hidden, of_batch

    def _room_for_inputs_of_down(self) -> bool:
        """Whether the inputs of down_proj may be kept."""
        hidden, device = self.stream.hidden_states, self.stream.device
        size = hidden[..., 0].numel() * self.linears["down_proj"].in_features * hidden.element_size()
        return hidden.device == device and size <= KEPT_SHARE * total_memory(device)

    def _buffer(self, like: Tensor) -> Tensor:
        """A tensor for all sequences, with the width and the dtype of `like`; the kept tensor if it fits.

        A batch of the kept tensor is read before the same batch is written.
        """
        kept, width = self._kept, like.shape[-1]
        if kept is not None and kept.shape[-1] == width and kept.dtype == like.dtype:
            return kept
        return self.stream.buffer(width, like.dtype)

    def _seen(self, hidden: Tensor, kept: Tensor | None, group: str) -> dict[str, Tensor]:
        """`input` of the group, the `residual` in front of the attention, and the output `attended` of o_proj
        if it was computed."""
        found: dict[str, Tensor] = {}

        def see_residual(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found["residual"] = args[0]

        def see_output(module: nn.Module, args: Any, output: Tensor) -> None:
            found["attended"] = output

        def see_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found["input"] = args[0]
            raise StopForward

        handles = [
            module_at(self.layer, self.arch.attention_norm).register_forward_pre_hook(see_residual),
            self.linears["o_proj"].register_forward_hook(see_output),
            self.linears[INPUT_GROUPS[group][0]].register_forward_pre_hook(see_input),
        ]
        try:
            with self._attention_known(kept), contextlib.suppress(StopForward):
                self.layer(hidden, **self.stream.layer_kwargs[self.index])
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _residual_of_mlp(self, hidden: Tensor, kept: Tensor | None, seen: dict[str, Tensor]) -> Tensor:
        """The output of the layer without the output of its MLP."""
        attended = seen.get("attended", kept)
        assert attended is not None
        mlp = module_at(self.layer, self.arch.mlp)
        with self._attention_returns(lambda: attended), _returning(mlp, lambda: attended.new_zeros(())):
            output: Tensor = self.layer(hidden, **self.stream.layer_kwargs[self.index])
        return output

    def _attention_known(self, kept: Tensor | None) -> contextlib.AbstractContextManager[None]:
        """A context in which the attention returns its output for a batch from the batch's part of the kept
        tensor, if there is a kept tensor."""
        if kept is None:
            return contextlib.nullcontext()
        if self._kept_input:
            return self._attention_returns(lambda: self.linears["o_proj"](kept))
        return self._attention_returns(lambda: kept)

    def _attention_returns(self, value: Callable[[], Tensor]) -> contextlib.AbstractContextManager[None]:
        return _returning(module_at(self.layer, self.arch.attention), lambda: (value(), None))


@contextlib.contextmanager
def _returning(module: nn.Module, value: Callable[[], Any]) -> Iterator[None]:
    """A context in which a call of `module` returns value()."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda *args, **kwargs: value()
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before
