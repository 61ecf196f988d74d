"""The residual stream of the calibration text, layer by layer, with one layer on the device at a time."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.architectures import Architecture, decoder_layers, module_at
from drot.calibration.hessian import HessianAccumulator

#: tokens that pass a layer at once
TOKENS_PER_BATCH = 8192


class _Recorder(nn.Module):
    """Stands in for a decoder layer: notes what it is called with and passes the stream on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, so that it is no submodule
        self.kwargs: dict[str, Any] = {}
        self.hidden_states: Tensor

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.hidden_states, self.kwargs = hidden_states, kwargs
        return hidden_states


class _Stop(Exception):
    """Ends a forward pass once the input that was wanted has been seen."""


class CalibrationStream:
    """Hidden states [nsamples, seqlen, d] in front of one layer, and what each layer is called with.

    Built from the model's own forward with every layer replaced by a recorder, so that masks, RoPE
    and sliding windows are what the model itself makes, whatever its family.
    """

    def __init__(self, hidden_states: Tensor, layer_kwargs: list[dict[str, Any]]) -> None:
        self.hidden_states = hidden_states
        self.layer_kwargs = layer_kwargs

    @classmethod
    @torch.no_grad()
    def embed(
        cls, model: PreTrainedModel, arch: Architecture, tokens: Tensor, device: torch.device
    ) -> "CalibrationStream":
        """Embeds `tokens` [nsamples, seqlen]; the model stays where it is, the stream is on `device`."""
        layers = decoder_layers(model, arch)
        recorders = [_Recorder(layer) for layer in layers]
        parent, _, name = arch.layers.rpartition(".")
        backbone = module_at(model, parent)
        home = module_at(model, arch.embedding).weight.device
        states = []
        setattr(backbone, name, nn.ModuleList(recorders))
        try:
            for row in tokens:
                backbone(row[None].to(home), use_cache=False)
                states.append(recorders[0].hidden_states.to(device))
        finally:
            setattr(backbone, name, layers)
        kwargs = [_to_device(recorder.kwargs, device) for recorder in recorders]
        return cls(torch.cat(states), kwargs)

    def narrow(self, nsamples: int) -> "CalibrationStream":
        """A copy of the first sequences."""
        return CalibrationStream(self.hidden_states[:nsamples].clone(), self.layer_kwargs)

    def batches(self) -> Iterable[slice]:
        """Slices over sequences of about TOKENS_PER_BATCH tokens."""
        count, length = self.hidden_states.shape[:2]
        step = max(1, TOKENS_PER_BATCH // length)
        return (slice(start, start + step) for start in range(0, count, step))

    @torch.no_grad()
    def outputs(self, layer: nn.Module, index: int) -> Tensor:
        """What `layer` makes of the stream, [nsamples, seqlen, d]; the stream stays as it is."""
        kwargs = self.layer_kwargs[index]
        out = torch.empty_like(self.hidden_states)
        for batch in self.batches():
            out[batch] = layer(self.hidden_states[batch], **kwargs)
        return out

    def advance(self, layer: nn.Module, index: int) -> None:
        """Moves the stream behind `layer`."""
        self.hidden_states = self.outputs(layer, index)

    @torch.no_grad()
    def rotate(self, matrix: Tensor) -> None:
        """h ← h · matrix [d, d], multiplied in fp32 at least and rounded once."""
        dtype = self.hidden_states.dtype
        work = torch.promote_types(dtype, torch.float32)
        matrix = matrix.to(self.hidden_states.device, work)
        for batch in self.batches():
            self.hidden_states[batch] = (self.hidden_states[batch].to(work) @ matrix).to(dtype)

    @torch.no_grad()
    def hessians(self, layer: nn.Module, index: int, linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
        """Name → H [in, in] fp32 of each given linear's input; one pass, ended behind the last of them."""
        device = self.hidden_states.device
        sums = {name: HessianAccumulator(lin.in_features, device) for name, lin in linears.items()}
        waiting: set[str] = set()

        def hook(name: str) -> Callable[..., None]:
            def collect(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                sums[name].add(args[0])
                waiting.discard(name)
                if not waiting:
                    raise _Stop

            return collect

        handles = [lin.register_forward_pre_hook(hook(name)) for name, lin in linears.items()]
        try:
            for batch in self.batches():
                waiting.update(linears)
                with contextlib.suppress(_Stop):
                    layer(self.hidden_states[batch], **self.layer_kwargs[index])
        finally:
            for handle in handles:
                handle.remove()
        return {name: total.hessian() for name, total in sums.items()}


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_to_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    return value
