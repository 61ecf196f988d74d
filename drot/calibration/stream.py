"""The hidden states of the calibration tokens, which are passed through one layer after the other."""

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drot.calibration.hessian import HessianAccumulator
from drot.calibration.lent import Lent
from drot.calibration.token_weights import TokenWeights
from drot.machine.products import rounded_once
from drot.machine.ranks import ALONE, Ranks
from drot.machine.transfer import CopiesHome, Empty, ahead, empty_on, empty_on_host, gathered
from drot.model.decoder import BY_SEQUENCE, DecoderModel
from drot.model.family import LENT, InputGroup, alike
from drot.model.inputs import RoutedInputs, reading
from drot.model.layer import DecoderLayer

#: Device type → tokens in one forward pass of a layer. A CPU computes small batches faster, because their
#: tensors stay in its caches.
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 8192}


class CalibrationStream:
    """The input `hidden_states` [nsamples, seqlen, d] of a decoder layer, and the keyword arguments of all.

    The hidden states may lie in main memory: a batch of them is copied to `device`, where the layers compute.

    ranks: those that hold the other sequences. Sums over the sequences are sums over the ranks.
    weights: of the tokens (token_weights.py); None if all count alike.
    lent: the keys and values of earlier layers, in a model whose layers read them.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        layer_kwargs: list[dict[str, Any]],
        device: torch.device | None = None,
        empty: Empty | None = None,
        ranks: Ranks = ALONE,
        weights: TokenWeights | None = None,
        lent: Lent | None = None,
    ) -> None:
        self.hidden_states, self.lent = hidden_states, lent
        self.layer_kwargs = layer_kwargs
        self.device = device or hidden_states.device
        self.ranks, self.weights = ranks, weights
        #: makes tensors in the place of the hidden states, where that is not simply their device
        self.empty = empty
        #: width and dtype → the buffer in main memory
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    @classmethod
    def embed(
        cls,
        model: DecoderModel,
        tokens: Tensor,
        device: torch.device,
        *,
        empty: Empty | None = None,
        ranks: Ranks = ALONE,
        weights: TokenWeights | None = None,
    ) -> "CalibrationStream":
        """The first layer's input for `tokens` [nsamples, seqlen], of which a rank holds every n-th sequence.

        Without sequences, the stream is empty, and so are the keyword arguments of the layers. The model is
        not moved.

        empty: makes the tensor of the hidden states, in main memory or in a file, and others beside it.
        """
        tokens = tokens[ranks.rank :: ranks.size]
        if not len(tokens):
            none = torch.empty(*tokens.shape, model.hidden_size, dtype=model.dtype, device=device)
            return cls(none, [{} for _ in model.layers], ranks=ranks, weights=weights)
        hidden_states, kwargs = model.record(tokens, empty or partial(empty_on, device))
        moved: dict[int, Tensor] = {}
        of_layers = [
            {key: one if key in BY_SEQUENCE else _to_device(one, device, moved) for key, one in each.items()}
            for each in kwargs
        ]
        lent = Lent(len(tokens), device, empty) if model.lends_keys else None
        return cls(hidden_states, of_layers, device, empty, ranks, weights, lent)

    def first_samples(self, nsamples: int) -> "CalibrationStream":
        """A stream with a view of the first `nsamples` sequences of all ranks."""
        own = len(self.ranks.sequences(nsamples))
        return self._with(self.hidden_states[:own], self.empty)

    def copy(self, empty: Empty | None = None) -> "CalibrationStream":
        """A stream with a copy of the hidden states, in the same place or in that of `empty`."""
        states, empty = self.hidden_states, empty or self.empty
        return self._with(
            states.clone() if empty is None else empty(states.shape, states.dtype).copy_(states), empty
        )

    def offloaded_copy(self) -> "CalibrationStream":
        """A stream with a copy of the hidden states in main memory."""
        return self.copy(partial(empty_on_host, device=self.device))

    def _with(self, hidden_states: Tensor, empty: Empty | None) -> "CalibrationStream":
        lent = None if self.lent is None else self.lent.child(len(hidden_states), empty)
        return CalibrationStream(
            hidden_states, self.layer_kwargs, self.device, empty, self.ranks, self.weights, lent
        )

    def arguments(
        self, layer: DecoderLayer, sequences: slice | Tensor, lent: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The keyword arguments of `layer` for some sequences.

        lent: the keys and values that layers lend each other in a pass through several; None takes those of
            the stream, which each layer that lends some replaces.
        """
        found = dict(self.layer_kwargs[layer.index])
        for name in found.keys() & BY_SEQUENCE:
            found[name] = gathered(found[name], sequences, self.device)
        if self.lent is not None:
            found[LENT] = self.lent.of(sequences) if lent is None else lent
        return found

    def roots(self, layer: DecoderLayer, group: InputGroup) -> Iterator[Tensor | None]:
        """For each of the `batches` √w [tokens, 1] of the weights w of its tokens, fp32.

        None for each if all tokens count alike.
        """
        if self.weights is None:
            return (None for _ in self.batches())
        own = self.weights.of(layer, group)[self.ranks.rank :: self.ranks.size]
        roots = own[: len(self.hidden_states)].to(self.device, torch.float32).sqrt()
        return (roots[batch].reshape(-1, 1) for batch in self.batches())

    def batch(self, sequences: slice | Tensor) -> Tensor:
        """The hidden states of some sequences, on `device`."""
        return gathered(self.hidden_states, sequences, self.device)

    @property
    def on_device(self) -> bool:
        """Whether the hidden states lie in the memory of the device where the layers compute."""
        return self.hidden_states.device == self.device and self.empty is None

    def buffer(self, width: int, dtype: torch.dtype) -> Tensor:
        """A tensor [nsamples, seqlen, width] where the hidden states lie, with any content.

        In main memory it is the same tensor at each call, because pinning takes long.
        """
        shape = (*self.hidden_states.shape[:2], width)
        if self.on_device:
            return torch.empty(shape, dtype=dtype, device=self.device)
        key = (width, dtype)
        if key not in self._buffers:
            self._buffers[key] = (self.empty or partial(empty_on_host, device=self.device))(shape, dtype)
        return self._buffers[key]

    def loaded_batches(self) -> Iterator[tuple[slice, Tensor]]:
        """Each of the `batches` with its hidden states on `device`, which are copied ahead from main memory.

        A batch that was yielded may be replaced in `hidden_states` by CopiesHome.
        """
        return zip(self.batches(), self.loaded(self.hidden_states), strict=True)

    def loaded(self, states: Tensor) -> Iterator[Tensor]:
        """Each of the `batches` of `states` [nsamples, seqlen, any width] on `device`, copied ahead."""
        parts = (states[batch] for batch in self.batches())
        return parts if states.device == self.device else ahead(parts, self.device)

    def batches(self) -> Iterable[slice]:
        """Slices of the sequences, with at most TOKENS_PER_BATCH tokens or one sequence each."""
        count, length = self.hidden_states.shape[:2]
        step = max(1, TOKENS_PER_BATCH.get(self.device.type, TOKENS_PER_BATCH["cpu"]) // length)
        return (slice(start, start + step) for start in range(0, count, step))

    @torch.no_grad()
    def advance(self, layer: DecoderLayer) -> None:
        """Replaces the hidden states by the output [nsamples, seqlen, d] of `layer`, in place."""
        with CopiesHome(self.device) as home:
            for batch, inputs in self.loaded_batches():
                home.write(self.hidden_states[batch], layer(inputs, self.arguments(layer, batch)))

    @torch.no_grad()
    def rotate(self, matrix: Tensor) -> None:
        """h ← h · matrix, for matrix [d, d], computed in fp32 at least and rounded once, in place."""
        matrix = matrix.to(self.device)
        with CopiesHome(self.device) as home:
            for batch, inputs in self.loaded_batches():
                home.write(
                    self.hidden_states[batch], rounded_once(inputs.flatten(0, 1), matrix).view_as(inputs)
                )

    @torch.no_grad()
    def hessians(
        self,
        layer: DecoderLayer,
        groups: Collection[InputGroup],
        *,
        folded: bool = False,
        advance: bool = False,
    ) -> dict[str, Tensor]:
        """Name of a group → H [in, in], fp32, of its inputs, from one pass.

        folded: as in `DecoderLayer.reading`.
        advance: whether the hidden states are replaced by the output of the layer, in place. Without it the
            pass ends at the last of the groups.
        """
        accumulators: dict[str, HessianAccumulator] = {}
        for group, *others in (parts := alike(groups)):
            size = layer.shape_of(group.linears[0])[1]
            count = None if group.expert is None else 1 + len(others)
            accumulators[group.name] = HessianAccumulator(size, self.device, self.ranks, count)

        roots = {part[0].name: self.roots(layer, part[0]) for part in parts}

        def read(group: InputGroup, x: Tensor) -> None:
            accumulators[group.name].add(x, next(roots[group.name]))

        def read_routed(of_experts: list[InputGroup], inputs: Iterator[RoutedInputs]) -> None:
            first = of_experts[0].name
            accumulators[first].add_experts(inputs, next(roots[first]))

        with (
            reading(layer, groups, read, read_routed, folded=folded, to_end=advance) as forward,
            CopiesHome(self.device) as home,
        ):
            for batch, inputs in self.loaded_batches():
                output = forward(inputs, self.arguments(layer, batch))
                if output is not None:
                    home.write(self.hidden_states[batch], output)
        found: dict[str, Tensor] = {}
        for part in parts:
            hessian = accumulators[part[0].name].hessian(len(self.hidden_states))
            of_groups = [hessian] if part[0].expert is None else hessian.unbind()
            found |= {group.name: matrix for group, matrix in zip(part, of_groups, strict=True)}
        return found


def _to_device(value: Any, device: torch.device, moved: dict[int, Tensor]) -> Any:
    """A value with its tensors on `device`. moved: id of a tensor → its copy: layers share their masks."""
    if isinstance(value, Tensor):
        if id(value) not in moved:
            moved[id(value)] = value.to(device)
        return moved[id(value)]
    if isinstance(value, tuple):
        return tuple(_to_device(item, device, moved) for item in value)
    if isinstance(value, dict):
        return {key: _to_device(item, device, moved) for key, item in value.items()}
    return value
