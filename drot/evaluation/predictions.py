"""The logits of a model for the windows of a text: of a whole model, or one layer at a time on a device."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.calibration.stream import CalibrationStream
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.machine.devices import is_gpu
from drot.machine.transfer import empty_on_host, on_device
from drot.model.decoder import DecoderModel
from drot.model.layer import Weights
from drot.model.sizes import check_seqlen, vocabulary_of
from drot.sparse.fused import fused_layer
from drot.sparse.linear import is_packed

#: largest number of logits in fp32 at the same time, but for those of one window: a CPU is quicker with few,
#: and a GPU with many
LOGITS_AT_ONCE = {"cpu": 1 << 22, "others": 1 << 26}


def logits_at_once(device: torch.device) -> int:
    """The largest number of logits that are computed at the same time on `device`."""
    return LOGITS_AT_ONCE["cpu" if device.type == "cpu" else "others"]


@dataclass(frozen=True)
class Predictions:
    """A model's predictions for the windows of a text, which are computed when they are asked for.

    windows: token ids [count, seqlen] on the CPU.
    vocab: number of logits for a token.
    logits: function from a slice of b windows to their logits [b, seqlen, vocab], in the model's dtype and on
        `device`. The logits at a position predict the token behind it.
    """

    windows: Tensor
    vocab: int
    logits: Callable[[slice], Tensor]
    device: torch.device

    def batches(self, models: int = 1) -> Iterator[slice]:
        """Slices of as many windows as `logits_at_once` allows for the logits of `models`, at least 1."""
        count, seqlen = self.windows.shape
        step = max(1, logits_at_once(self.device) // (models * self.vocab * seqlen))
        return (slice(start, min(start + step, count)) for start in range(0, count, step))


def check_windows(tokens: Tensor, config: Any, seqlen: int) -> None:
    """Raises UserError unless `tokens` [n] hold a window of `seqlen` tokens for a model of `config`."""
    if seqlen < 2:
        raise UserError(
            f"`seqlen` must be at least 2, since the first token of a window is not predicted; got {seqlen}"
        )
    check_seqlen(seqlen, config)
    if len(tokens) < seqlen:
        raise UserError(f"the text has {len(tokens)} tokens, but one window needs {seqlen}: lower `seqlen`")
    if int(tokens.max()) >= (vocabulary := vocabulary_of(config)):
        raise UserError(
            f"token ids must be below {vocabulary}, the model's vocabulary; got {int(tokens.max())}: "
            "the folder holds the tokenizer of another model; copy the right one"
        )


def predict(
    model: PreTrainedModel,
    tokens: Tensor,
    seqlen: int,
    stream_to: torch.device | None = None,
    progress: Progress = silent,
    weights: Weights | None = None,
) -> Predictions:
    """The predictions of a model for the windows of a text `tokens` [n].

    The windows follow each other without overlap, as in the code of GPTQ and SparseGPT. Tokens behind the
    last whole window are left out.

    Without `stream_to`, the model lies on one device. Otherwise one decoder layer at a time is moved to the
    device `stream_to`: all windows pass through one layer before the next layer comes. Their hidden states,
    windows · seqlen · d numbers, lie in main memory, twice while a layer computes. The last norm and the head
    are copied to the device, where they stay while the Predictions exist.

    Raises UserError as `check_windows` does, and when a model is streamed whose family
    drot/model/families.py does not list.

    progress: receives an event after each streamed layer.
    weights: where the weights of a skeleton are read from, which can only be streamed.
    """
    config = model.config.get_text_config()
    check_windows(tokens, config, seqlen)
    windows = tokens[: len(tokens) // seqlen * seqlen].reshape(-1, seqlen)
    home = next(model.parameters()).device
    if stream_to is not None:
        decoder = DecoderModel(model, weights=weights)
        logits_of = _streamed(decoder, windows, stream_to, progress)
        return Predictions(windows, vocabulary_of(config), logits_of, stream_to)

    @torch.no_grad()
    def logits(batch: slice) -> Tensor:
        out: Tensor = model(windows[batch].to(home), use_cache=False).logits
        return out

    return Predictions(windows, vocabulary_of(config), logits, home)


@torch.no_grad()
def _streamed(
    decoder: DecoderModel, windows: Tensor, device: torch.device, progress: Progress
) -> Callable[[slice], Tensor]:
    """The function `logits` of the Predictions of a streamed model."""
    empty = partial(empty_on_host, device=device) if is_gpu(device) else None
    stream = CalibrationStream.embed(decoder, windows, device, empty=empty)
    fuses = decoder.is_skeleton and is_packed(decoder.model)  # as a whole model that is loaded
    for layer in on_device(decoder.layers, device, decoder.device):
        with fused_layer(layer) if fuses else contextlib.nullcontext():
            stream.advance(layer)
        progress(ProgressEvent(phase="stream", layer=layer.index, layers=len(decoder.layers)))
    norm, head = decoder.norm_and_head(device)

    @torch.no_grad()
    def logits(batch: slice) -> Tensor:
        out: Tensor = head(norm(stream.batch(batch)))
        return decoder.logits_of(out)

    return logits
