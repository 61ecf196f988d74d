"""Block recovery: training of a pruned layer's kept weights so that its output becomes the dense layer's.

The loss of a token is ‖y - t‖² / ‖t‖², where y is the output of the pruned layer on the inputs that the
pruned layers before it computed, and t is the hidden state of the dense model at the same depth. So a layer
also corrects what the layers before it lost. The division keeps the few tokens with very large hidden states
from being all of the loss.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from drot.calibration.stream import CalibrationStream
from drot.checkpoint.records import RecoveryRecord
from drot.config import RecoveryConfig
from drot.core.errors import UserError
from drot.model.layer import DecoderLayer
from drot.pipeline.batches import Batches, schedule
from drot.pipeline.kept_weights import KeptWeights

#: the training stops after this many epochs in a row without a new smallest error on held-out sequences
PATIENCE = 2
#: smallest ‖t‖² / d of a token in the loss, which keeps a token of zeros from a division by 0
SMALLEST_SQUARE = 1e-6

#: Progress callback: (step, steps, loss on the held-out sequences).
OnEpoch = Callable[[int, int, float], None]


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
    A bf16 layer with half of its weights needs 10 bytes for each of all weights: 2 for the weight, 2 for that
    of the best epoch, and 12 for each kept weight (KeptWeights); and one gradient.

    Raises UserError if the loss is not finite, or if the memory of the device does not suffice.

    stream: inputs of the layer, computed by the pruned layers before it.
    targets: the outputs that the layer should have, in the basis of its outputs.
    on_epoch: called before the first and after each epoch.
    """
    index, ranks = layer.index, stream.ranks
    training = KeptWeights([layer], ranks)
    batches = Batches(len(stream.hidden_states), config.recover_batch, ranks, seed=index)
    steps = config.recover_epochs * batches.steps
    # of the mean, fp16 could not hold the gradients; of the sum, not those of the weights
    seqlen, width = stream.hidden_states.shape[1:]
    scale = width * math.sqrt(seqlen * config.recover_batch)

    def error(sequences: Tensor) -> Tensor:
        output = layer(stream.batch(sequences), stream.arguments(layer, sequences))
        return _relative_error(output, targets.batch(sequences))

    @torch.no_grad()
    def held_out_error() -> float:
        lost = float(sum(error(part) * len(part) for part in batches.held_out()))
        return ranks.total(lost) / batches.held_out_count

    step, best_epoch, best = 0, 0, training.state()
    try:
        before = least = held_out_error()
        on_epoch(0, config.recover_epochs, before)
        with training.running():
            for epoch in range(1, config.recover_epochs + 1):
                total = torch.zeros((), dtype=torch.float32, device=stream.device)
                for batch, own, size in batches.epoch():
                    training.rate = config.recover_lr * schedule(step, steps)
                    loss = error(batch)
                    (loss * (scale * own / size)).backward()
                    total += loss.detach() * own
                    step += 1
                trained, held_out = ranks.total(float(total)), held_out_error()
                if not (math.isfinite(trained) and math.isfinite(held_out)):
                    raise UserError(
                        f"layer {index}: the error of the recovery must be finite, got {held_out} after "
                        f"epoch {epoch}: lower `recover_lr`"
                    )
                on_epoch(epoch, config.recover_epochs, held_out)
                if held_out < least:
                    training.keep(best)
                    best_epoch, least = epoch, held_out
                elif epoch - best_epoch >= PATIENCE:
                    break
    except torch.OutOfMemoryError as fault:
        raise UserError(
            f"layer {index}: the recovery does not fit in the memory of {stream.device}: use a smaller "
            f"`recover_batch` than {config.recover_batch}, or a smaller `seqlen`"
        ) from fault
    training.load(best)
    return RecoveryRecord(error_before=before, error_after=least, best_epoch=best_epoch)


def _relative_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean of ‖y - t‖² / ‖t‖² over the tokens, in fp32 at least."""
    dtype = torch.promote_types(output.dtype, torch.float32)
    output, target = output.to(dtype), target.to(dtype)
    square = target.square().mean(-1).clamp_min(SMALLEST_SQUARE)
    # sequence by sequence: the order of a mean over all tokens would depend on the number of threads
    return ((output - target).square().mean(-1) / square).mean(-1).mean()
