"""Adam on the kept weights of pruned layers, which takes its steps within the backward pass.

Each parameter is updated as soon as its gradient is known, so one gradient is in memory at a time. Adam knows
the kept weights alone: a removed weight has no moments and gets no step, so it stays 0.

The learning rate of a weight matrix is in units of the root mean square of its kept weights, as in Adafactor
(Shazeer & Stern 2018), so that a rate fits matrices and models of every scale.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from drot.machine.devices import is_gpu
from drot.machine.ranks import ALONE, Ranks
from drot.model.layer import DecoderLayer

#: betas of Adam
BETAS = (0.9, 0.95)
#: bytes of a kept weight in a training: its value and Adam's two moments, in fp32
TRAINED_BYTES = 12


class KeptWeights:
    """The kept weights and the norms of pruned layers, which a backward pass trains in a context.

    Rotations and biases are not trained. Beside the layers, a kept weight needs TRAINED_BYTES.
    """

    def __init__(self, layers: Sequence[DecoderLayer], ranks: Ranks = ALONE) -> None:
        #: share of its root mean square by which a step moves a weight
        self.rate = 0.0
        self._ranks = ranks
        weights = [linear.parameter for layer in layers for linear in layer.linears.values()]
        #: weight of a norm → what the norm adds to it
        self._offsets = {
            norm.weight: layer.family.norm_offset
            for layer in layers
            for norm in [*layer.norms, *layer.post_norms]
        }
        self._weights = set(weights)
        self._parameters: list[nn.Parameter] = list(dict.fromkeys([*weights, *self._offsets]))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which `backward` takes a step of Adam, at `rate` times each root mean square."""
        try:
            with contextlib.ExitStack() as hooks:
                for parameter in self._parameters:
                    master = self._trained(parameter, parameter.detach())
                    # one kernel on a GPU; on a CPU its bytes would be others
                    adam = torch.optim.Adam([master], betas=BETAS, fused=is_gpu(master.device) or None)
                    parameter.requires_grad_(True)
                    scale = _root_mean_square(master + self._offsets.get(parameter, 0.0))
                    hook = functools.partial(self._update, master, adam, scale)
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))
                yield
        finally:
            for parameter in self._parameters:
                parameter.requires_grad_(False)
                parameter.grad = None

    @torch.no_grad()
    def _update(self, master: Tensor, adam: torch.optim.Adam, scale: float, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        master.grad = self._trained(parameter, parameter.grad)
        parameter.grad = None
        self._ranks.add_(master.grad)
        if parameter.dtype == torch.float16 and not bool(master.grad.isfinite().all()):
            master.grad = None  # fp16 could not hold it: the weight waits for the next step
            return
        adam.param_groups[0]["lr"] = self.rate * scale
        adam.step()
        master.grad = None
        if parameter not in self._weights:
            parameter.copy_(master)
            return
        values = master.to(parameter.dtype)
        values[values == 0] = torch.finfo(values.dtype).tiny  # a kept weight that became 0 would be lost
        put_kept(parameter, values)

    def _trained(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """The values at the kept weights of a parameter, or all those of a norm, in fp32 at least."""
        dtype = torch.promote_types(values.dtype, torch.float32)
        return (take_kept(parameter, values) if parameter in self._weights else values).to(dtype, copy=True)

    def state(self, device: torch.device | None = None) -> list[Tensor]:
        """A copy of the parameters, where they lie or on `device`."""
        return [parameter.detach().to(device, copy=True) for parameter in self._parameters]

    @torch.no_grad()
    def keep(self, state: list[Tensor]) -> None:
        """Copies the parameters to `state`."""
        for parameter, value in zip(self._parameters, state, strict=True):
            value.copy_(parameter)

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, state, strict=True):
            parameter.copy_(value)


def take_kept(parameter: Tensor, values: Tensor) -> Tensor:
    """Those of `values` at which `parameter` is not 0."""
    # of one dimension: the places of more take memory for each
    return values.flatten().masked_select(parameter.detach().flatten() != 0)


def put_kept(parameter: Tensor, values: Tensor) -> None:
    """Replaces what `take_kept` takes of `parameter`."""
    parameter.masked_scatter_(parameter != 0, values)


def _root_mean_square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) / math.sqrt(max(values.numel(), 1))
