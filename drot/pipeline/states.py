"""Where the hidden states of the calibration lie: on the device, in main memory, or in a file."""

from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from drot.calibration.stream import CalibrationStream
from drot.checkpoint.records import PlaceOfStates
from drot.checkpoint.resume import RunState
from drot.config import ResolvedRecipe
from drot.machine.devices import free_memory, is_gpu
from drot.machine.memory import available_memory
from drot.machine.ranks import ALONE, Ranks
from drot.machine.spool import Spool
from drot.machine.transfer import empty_on_host, return_pinned_memory
from drot.pipeline.memory import device_memory, further_bytes, main_memory, pass_bytes, state_bytes
from drot.pipeline.sizes import Sizes

if TYPE_CHECKING:
    from drot.pipeline.context import RunContext

#: from the fastest place to the slowest
PLACES: tuple[PlaceOfStates, ...] = get_args(PlaceOfStates)


def place_of_states(
    sizes: Sizes,
    recipe: ResolvedRecipe,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rotations_given: bool = False,
    from_gguf: bool = False,
    ranks: Ranks = ALONE,
) -> PlaceOfStates:
    """Where a run has room for its hidden states, and for what it keeps of a layer.

    sizes: with the sequences of one rank. ranks: those of a machine share its main memory.
    from_gguf: whether the model is a GGUF file that is not loaded yet.
    """
    on_gpu, of_pruning = is_gpu(device), device_memory(sizes, recipe, dtype)
    own = sizes.tokens * sizes.state * dtype.itemsize  # those of the dense model may lie elsewhere
    held = own + pass_bytes(sizes, dtype) + further_bytes(sizes, recipe, dtype)
    if on_gpu and of_pruning + held <= free_memory(device):
        return "device"
    given: dict[str, Any] = {"rotations_given": rotations_given, "from_gguf": from_gguf, "ranks": ranks}
    needed = main_memory(sizes, recipe, dtype, pinned=on_gpu, **given)
    states = state_bytes(sizes, recipe, dtype, pinned=on_gpu)
    needed += ranks.local_size * (states if on_gpu else states + of_pruning)
    return "main memory" if needed <= available_memory() else "file"


def further_states(run: "RunContext", beside: CalibrationStream) -> CalibrationStream:
    """The input of the first layer for the tokens of a training of all layers, where `beside` lies too."""
    assert run.distill_tokens is not None
    return CalibrationStream.embed(
        run.model, run.distill_tokens, run.device, empty=beside.empty, ranks=run.ranks
    )


def embed(run: "RunContext", tokens: Tensor, state: RunState | None) -> CalibrationStream:
    """The input of the first layer for this rank's part of `tokens` [nsamples, seqlen], where it has room.

    The context then knows the place, which is the same on all ranks: each of a machine would count as free
    what another is about to take. A run that saves nothing has its whole model in memory, and no file.

    state: names the disk of a file.
    """
    if is_gpu(run.device):
        return_pinned_memory()
    own = place_of_states(run.sizes, run.recipe, run.dtype, run.device, ranks=run.ranks)
    place: PlaceOfStates = max(run.ranks.each(own), key=PLACES.index)
    if place == "file" and state is None:
        place = "main memory"
    run.place_of_states = place
    empty = None
    if place == "file" and state is not None:
        empty = Spool(state.disk).empty
    elif place == "main memory" and is_gpu(run.device):
        empty = partial(empty_on_host, device=run.device)
    weights = run.token_weights
    return CalibrationStream.embed(
        run.model, tokens, run.device, empty=empty, ranks=run.ranks, weights=weights
    )
