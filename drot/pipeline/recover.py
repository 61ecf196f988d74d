"""Block recovery: training of a pruned layer's kept weights so that its output becomes the dense layer's.

The loss of a token is ‖y - t‖² / ‖t‖², where y is the output of the pruned layer on the inputs that the
pruned layers before it computed, and t is the hidden state of the dense model at the same depth. So a layer
also corrects what the layers before it lost. The division keeps the few tokens with very large hidden states
from being all of the loss.

The learning rate of a weight matrix is in units of the root mean square of its kept weights, as in Adafactor
(Shazeer & Stern 2018), so that a rate fits matrices and models of every scale.

The mask holds by construction: the gradient of a removed weight is set to 0 before the optimizer sees it, so
its moments stay 0, and so does the weight.
"""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from drot.calibration.stream import CalibrationStream
from drot.config import RecoveryConfig
from drot.core.errors import UserError
from drot.machine.devices import is_gpu
from drot.machine.ranks import ALONE, Ranks
from drot.model.layer import DecoderLayer

#: share of the calibration sequences that the training does not see, at least one sequence
HELD_OUT_SHARE = 1 / 8
#: the training stops after this many epochs in a row without a new smallest error on held-out sequences
PATIENCE = 2
#: betas of Adam
BETAS = (0.9, 0.95)
#: share of the steps in which the learning rate rises to its full value; it then falls as a half cosine
WARM_UP = 0.05
#: smallest ‖t‖² / d of a token in the loss, which keeps a token of zeros from a division by 0
SMALLEST_SQUARE = 1e-6

#: Progress callback: (step, steps, loss on the held-out sequences).
OnEpoch = Callable[[int, int, float], None]


@dataclass(frozen=True)
class RecoveryRecord:
    """The record of one layer's recovery. An error is a mean of ‖y - t‖² / ‖t‖² over tokens.

    error_before, error_after: the error on the held-out sequences, before and after.
    best_epoch: the number of epochs after which the weights were kept; 0 keeps the weights as pruned.
    train_curve: the mean error on the trained sequences in each epoch.
    held_out_curve: the error on the held-out sequences after each epoch.
    """

    error_before: float
    error_after: float
    best_epoch: int
    seconds: float
    train_curve: list[float] = field(repr=False)
    held_out_curve: list[float] = field(repr=False)


def check_sequences(nsamples: int, ranks: Ranks = ALONE) -> None:
    """Raises UserError if the calibration has too few sequences to hold some out and train each rank."""
    needed = next(n for n in itertools.count(2) if n - held_out_sequences(n) >= ranks.size)
    if nsamples < needed:
        raise UserError(
            f'`recover="block"` needs at least {needed} calibration sequences, because it holds some out; '
            f"got {nsamples}: use more `nsamples`"
        )


def held_out_sequences(nsamples: int) -> int:
    return max(1, int(nsamples * HELD_OUT_SHARE))


@torch.enable_grad()  # the caller may have turned gradients off
def recover_layer(
    layer: DecoderLayer,
    stream: CalibrationStream,
    targets: CalibrationStream,
    config: RecoveryConfig,
    on_epoch: OnEpoch = lambda step, steps, loss: None,
) -> RecoveryRecord:
    """Trains the kept weights and the norms of a pruned layer in place, with Adam.

    Each rank takes a part of a batch from its own sequences, and the gradients of all ranks are added.

    The rotation, the biases and the removed weights do not change. The weights are those of the epoch with
    the smallest error on the held-out sequences; if no epoch lowers the error, the layer does not change.
    Each weight is updated in fp32 as soon as its gradient is known, so a bf16 layer needs 17 bytes a weight:
    2 for the weight, 4 for its fp32 value, 8 for the moments, 1 for the mask, 2 for the best epoch; and one
    gradient.

    Raises UserError if the loss is not finite, or if the memory of the device does not suffice.

    stream: inputs of the layer, computed by the pruned layers before it.
    targets: the outputs that the layer should have, in the basis of its outputs.
    on_epoch: called before the first and after each epoch.
    """
    started, index, ranks = time.perf_counter(), layer.index, stream.ranks
    training = _Training(layer, ranks)
    batches = _Batches(len(stream.hidden_states), config.recover_batch, ranks, seed=index)
    steps = config.recover_epochs * batches.steps

    def error(sequences: Tensor) -> Tensor:
        output = layer(stream.batch(sequences), stream.layer_kwargs[index])
        return _relative_error(output, targets.batch(sequences))

    @torch.no_grad()
    def held_out_error() -> float:
        lost = float(sum(error(part) * len(part) for part in batches.held_out()))
        return ranks.total(lost) / batches.held_out_count

    step, best_epoch, best = 0, 0, training.state()
    train_curve: list[float] = []
    held_out_curve: list[float] = []
    try:
        held_out_curve.append(held_out_error())
        on_epoch(0, config.recover_epochs, held_out_curve[0])
        with training.running():
            for epoch in range(1, config.recover_epochs + 1):
                total = torch.zeros((), device=stream.device)
                for batch, own, size in batches.epoch():
                    training.rate = config.recover_lr * _schedule(step, steps)
                    loss = error(batch)
                    (loss * (own / size)).backward()
                    total += loss.detach() * own
                    step += 1
                train_curve.append(ranks.total(float(total)) / batches.trained_count)
                held_out_curve.append(held_out_error())
                if not (math.isfinite(train_curve[-1]) and math.isfinite(held_out_curve[-1])):
                    raise UserError(
                        f"layer {index}: the error of the recovery must be finite, got "
                        f"{held_out_curve[-1]} after epoch {epoch}: lower `recover_lr`"
                    )
                on_epoch(epoch, config.recover_epochs, held_out_curve[-1])
                if held_out_curve[-1] < held_out_curve[best_epoch]:
                    training.keep(best)
                    best_epoch = epoch
                elif epoch - best_epoch >= PATIENCE:
                    break
    except torch.OutOfMemoryError as fault:
        raise UserError(
            f"layer {index}: the recovery does not fit in the memory of {stream.device}: use a smaller "
            f"`recover_batch` than {config.recover_batch}, or a smaller `seqlen`"
        ) from fault
    training.load(best)
    return RecoveryRecord(
        error_before=held_out_curve[0],
        error_after=held_out_curve[best_epoch],
        best_epoch=best_epoch,
        seconds=time.perf_counter() - started,
        train_curve=train_curve,
        held_out_curve=held_out_curve[1:],
    )


def _relative_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean of ‖y - t‖² / ‖t‖² over the tokens, in fp32 at least."""
    dtype = torch.promote_types(output.dtype, torch.float32)
    output, target = output.to(dtype), target.to(dtype)
    square = target.square().mean(-1).clamp_min(SMALLEST_SQUARE)
    # sequence by sequence: the order of a mean over all tokens would depend on the number of threads
    return ((output - target).square().mean(-1) / square).mean(-1).mean()


def _schedule(step: int, steps: int) -> float:
    """The factor of the learning rate in `step`: a linear rise, then a half cosine down to 0."""
    rise = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))


class _Batches:
    """The sequences of this rank in the batches of all ranks.

    The last sequences of all ranks are held out. In a batch each rank takes equally many of its own, while it
    has them.

    count: the sequences of this rank. batch: the sequences of a batch, of all ranks.
    """

    def __init__(self, count: int, batch: int, ranks: Ranks, seed: int) -> None:
        self._count, self._batch, self._part = count, batch, max(1, batch // ranks.size)
        total = int(ranks.total(count))
        self.held_out_count = held_out_sequences(total)
        self.trained_count = total - self.held_out_count
        self._trained = len(ranks.sequences(self.trained_count))
        #: how many each rank trains on
        self._of_ranks = [len(range(rank, self.trained_count, ranks.size)) for rank in range(ranks.size)]
        self.steps = math.ceil(max(self._of_ranks) / self._part)
        self._generator = torch.Generator().manual_seed(seed)

    def held_out(self) -> list[Tensor]:
        parts = torch.arange(self._trained, self._count).split(self._batch)
        return [part for part in parts if len(part)]  # the last rank may hold none out

    def epoch(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yields for each batch this rank's part, how many sequences of it count, and those of all ranks.

        A rank that has no sequence left takes one that does not count, so that it adds gradients of 0.
        """
        order = torch.randperm(self._trained, generator=self._generator)
        for start in range(0, self.steps * self._part, self._part):
            part = order[start : start + self._part]
            size = sum(min(self._part, max(count - start, 0)) for count in self._of_ranks)
            yield (part if len(part) else order[:1]), len(part), size


class _Training:
    """The trained parameters of a layer, with a context in which each backward pass updates them.

    Every parameter has fp32 values and an Adam of its own. So only one gradient is in memory at a time.
    """

    def __init__(self, layer: DecoderLayer, ranks: Ranks = ALONE) -> None:
        self.rate, self._ranks = 0.0, ranks
        weights = list(dict.fromkeys(linear.parameter for linear in layer.linears.values()))
        self._parameters = [*weights, *(norm.weight for norm in [*layer.norms, *layer.post_norms])]
        self._kept: dict[Tensor, Tensor] = {weight: weight != 0 for weight in weights}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which `backward` takes a step of Adam, at `rate` times each root mean square."""
        try:
            with contextlib.ExitStack() as hooks:
                for parameter in self._parameters:
                    dtype = torch.promote_types(parameter.dtype, torch.float32)
                    master = parameter.detach().to(dtype, copy=True)
                    # one kernel on a GPU; on a CPU its bytes would be others
                    adam = torch.optim.Adam([master], betas=BETAS, fused=is_gpu(master.device) or None)
                    parameter.requires_grad_(True)
                    hook = functools.partial(self._update, master, adam, self._scale(parameter))
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))
                yield
        finally:
            for parameter in self._parameters:
                parameter.requires_grad_(False)
                parameter.grad = None

    @torch.no_grad()
    def _update(self, master: Tensor, adam: torch.optim.Adam, scale: float, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(master.dtype)
        parameter.grad = None
        self._ranks.add_(gradient)
        if (kept := self._kept.get(parameter)) is not None:
            gradient.mul_(kept)
        master.grad = gradient
        adam.param_groups[0]["lr"] = self.rate * scale
        adam.step()
        master.grad = None
        parameter.copy_(master)

    def _scale(self, parameter: nn.Parameter) -> float:
        kept = self._kept.get(parameter)
        count = parameter.numel() if kept is None else int(kept.sum())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        norm = float(torch.linalg.vector_norm(parameter.detach(), dtype=dtype))
        return norm / math.sqrt(max(count, 1))

    def state(self) -> list[Tensor]:
        """A copy of the parameters, where they lie: copies to main memory would take as long as steps."""
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def keep(self, state: list[Tensor]) -> None:
        """Copies the parameters to `state`."""
        for parameter, value in zip(self._parameters, state, strict=True):
            value.copy_(parameter)

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, state, strict=True):
            parameter.copy_(value)
