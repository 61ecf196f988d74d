"""What a run of `drot.prune` would do and need, from the model's config alone, and what it can do without."""

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal as size_text
from transformers import AutoModelForImageTextToText

from drot.checkpoint.load import load_tokenizer
from drot.checkpoint.multimodal import kept_bytes
from drot.checkpoint.opening import NO_MODEL, load_outer_config, silent_transformers
from drot.checkpoint.records import PlaceOfStates
from drot.checkpoint.source import gguf_file
from drot.config import Recipe, ResolvedRecipe
from drot.core import torchrun
from drot.core.errors import UserError
from drot.machine.devices import DTYPES_BY_NAME, computing_dtype, dtype_name, is_gpu, pick_device
from drot.machine.environment import machine_name
from drot.machine.ranks import Ranks
from drot.model.decoder import DecoderModel
from drot.model.multimodal import MULTIMODAL, language_config, stored_names
from drot.model.sizes import check_seqlen
from drot.pipeline.disk import disk_needs, rotations_file_bytes
from drot.pipeline.memory import device_memory, distillation_memory, main_memory, state_bytes, training_memory
from drot.pipeline.prepare import parsed_dtype, plan
from drot.pipeline.rotation_files import with_given_r3
from drot.pipeline.sizes import sizes_of, without_weights
from drot.pipeline.states import place_of_states
from drot.pipeline.work import run_work
from drot.text.names import OWN_SOURCE, are_files, check_sources
from drot.text.source import load_calibration, tokens_of

#: share of the memory that a run may take by its estimate: CUDA itself takes some, and the estimate is rough
USED_SHARE = 0.9
#: `layers_per_step` of a shared rotation whose layers do not lie on the device together
LAYERS_PER_STEP = 4


@dataclass(frozen=True)
class RunNeeds:
    """What a run needs. Bytes of memory are estimates; those of the disk are exact but for small files.

    dtype, save_dtype: dtypes of the computation and of the saved weights.
    tokens: calibration tokens that are read. training_tokens: those that train the rotations.
    tokens_known: whether the text has as many tokens; otherwise it may have fewer.
    checkpoint, partial: bytes on the disk of the result, and of what lies beside it until the run ends.
    rotations_file: bytes of a file of `save_rotations_to`.
    gpus: ranks that share the run, all on this machine.
    main_memory: bytes of all ranks. device_memory: bytes of each rank; on a CPU they lie in main memory too.
    distillation: the same while all layers are trained together; 0 without that.
    states: bytes of the hidden states of the calibration, of all ranks. place_of_states: where they would lie
        now. In a file or on a GPU they are not counted as `main_memory`.
    work: phase → dtype → operations of all ranks, a lower bound.
    """

    recipe: ResolvedRecipe
    model: str
    device: str
    dtype: str
    save_dtype: str
    tokens: int
    tokens_known: bool
    training_tokens: int
    checkpoint: int
    partial: int
    rotations_file: int
    gpus: int
    main_memory: int
    device_memory: int
    distillation: int
    states: int
    place_of_states: PlaceOfStates
    work: dict[str, dict[str, float]]


def run_needs(
    model: str | Path,
    recipe: Recipe,
    *,
    device: str = "auto",
    dtype: str = "auto",
    save_dtype: str = "auto",
    rotations: Path | None = None,
    format: str = "dense",
    gpus: int = 1,
    nsamples: int | None = None,
) -> RunNeeds:
    """What `drot.prune` with the same arguments would do and need. Loads no weights.

    It reads the calibration text, to count its tokens, if all of it lies in local files and one rank does
    the run: the ranks of a run ask each for itself, and some may lack the text. Of the file `rotations` it
    reads the shapes alone.

    gpus: how many ranks share the run.
    nsamples: the sequences of the calibration, where they are known. The text is then not read.

    Raises UserError for what does not fit, as `drot.prune` does before it reads the text.
    """
    chosen, saved = parsed_dtype("dtype", dtype), parsed_dtype("save_dtype", save_dtype)
    rotations_given = rotations is not None
    recipe = with_given_r3(recipe, rotations)
    config, first, resolved = plan(
        model, recipe, device=device, rotations_given=rotations_given, format=format
    )
    text = resolved.calibration
    if torchrun.world_size() > 1 and is_gpu(first):
        first = torch.device(first.type, torchrun.local_rank())
    own = config.dtype or torch.float32
    chosen, saved = _dtype(computing_dtype(chosen, first), own), _dtype(saved, own)
    known = not resolved.reads_calibration or nsamples is not None
    if not resolved.reads_calibration:
        nsamples = 0
    elif nsamples is None:
        check_seqlen(text.seqlen, config)
        if not torchrun.rank():  # the other ranks need not have the text
            check_sources(text.source)
        known = gpus == 1 and not torchrun.rank() and are_files(text.source)
        nsamples = len(load_calibration(text, load_tokenizer(model))) if known else text.nsamples
    sizes = sizes_of(DecoderModel(without_weights(config)), nsamples, text.seqlen)
    trains = resolved.rotation.mode != "none" and not rotations_given
    training = resolved.training_nsamples(sizes.nsamples, text.seqlen, sizes.hidden) * text.seqlen
    from_gguf = gguf_file(model) is not None
    kept = None
    if not from_gguf:
        kept = _image_bytes(model, saved if resolved.rotation.mode != "none" else None)
    checkpoint, partial = disk_needs(sizes, resolved, saved, kept)
    of_rank = dataclasses.replace(sizes, nsamples=math.ceil(nsamples / gpus))
    on_device = device_memory(of_rank, resolved, chosen)
    if trains:
        on_device = max(on_device, training_memory(of_rank, resolved, gpus))
    if tokens_of(OWN_SOURCE, text, nsamples):
        on_device = max(on_device, sizes.weights * chosen.itemsize)
    given: dict[str, Any] = {"rotations_given": rotations_given, "from_gguf": from_gguf}
    given["ranks"] = Ranks(size=gpus)
    place = place_of_states(of_rank, resolved, chosen, first, **given)
    pinned = is_gpu(first) and place == "main memory"
    states = gpus * state_bytes(of_rank, resolved, chosen, pinned=pinned)
    in_memory = main_memory(of_rank, resolved, chosen, pinned=pinned, **given)
    distills = resolved.recovery.distill_epochs > 0
    return RunNeeds(
        recipe=resolved,
        model=str(model),
        device=machine_name(first),
        dtype=dtype_name(chosen),
        save_dtype=dtype_name(saved),
        tokens=sizes.tokens,
        tokens_known=known,
        training_tokens=training if trains else 0,
        checkpoint=checkpoint,
        partial=partial,
        rotations_file=rotations_file_bytes(sizes, resolved.rotation),
        gpus=gpus,
        main_memory=in_memory - (0 if place == "main memory" else states),
        device_memory=on_device,
        distillation=distillation_memory(of_rank, resolved, chosen) if distills else 0,
        states=states,
        place_of_states=place,
        work=run_work(sizes, resolved, chosen, trains=trains),
    )


def _image_bytes(model: str | Path, rotated: torch.dtype | None) -> int | None:
    """`kept_bytes` of a model by its config; None if it reads text alone."""
    config = load_outer_config(model)
    if config.model_type not in MULTIMODAL:
        return None
    with silent_transformers(NO_MODEL.format(str(model)), config.to_dict()), torch.device("meta"):
        multimodal = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    tensors = multimodal.state_dict()
    return kept_bytes(tensors, stored_names(tensors, language_config(config).model_type), rotated)


def _dtype(dtype: str | torch.dtype, own: torch.dtype) -> torch.dtype:
    """A dtype by its name; `auto` is the checkpoint's own."""
    return DTYPES_BY_NAME.get(dtype, own) if isinstance(dtype, str) else dtype


# ---- the settings with which a run fits into the memory of a device --------------------------------------


@dataclass(frozen=True)
class Fitted:
    """The settings that were chosen.

    recipe: the recipe with them. changes: field → value, of the fields that had to change.
    asked, needed: bytes on the device by the estimate, with the recipe that was asked for and with this one.
    """

    recipe: Recipe
    changes: dict[str, Any]
    asked: int
    needed: int


def fitted(
    model: str | Path,
    recipe: Recipe,
    memory: int,
    *,
    fixed: Collection[str] = (),
    device: str = "auto",
    **options: Any,
) -> Fitted:
    """The recipe with as few changes as its run needs to fit into `memory` bytes of the device.

    What costs the most quality changes last: first a shared rotation trains a few layers in a step, then the
    layers are not trained together, then not alone, then no solver computes their weights. On a CPU the
    device's memory is the main memory, which all ranks share, and in which the layers of a shared rotation
    lie in any case.

    fixed: fields that stay as they are.
    options: further arguments of `run_needs`.

    Raises UserError if no such recipe fits, and as `drot.prune` does.
    """
    on_cpu = not is_gpu(pick_device(device))

    def needs_of(changes: dict[str, Any], nsamples: int | None = None) -> tuple[RunNeeds, int]:
        needs = run_needs(model, recipe.replace(**changes), device=device, nsamples=nsamples, **options)
        of_device = max(needs.device_memory, needs.distillation)
        return needs, needs.gpus * of_device + needs.main_memory if on_cpu else of_device

    needs, asked = needs_of({})
    nsamples = needs.tokens // needs.recipe.calibration.seqlen
    tried = {}
    weighted = recipe.rotation.output_weights == "gradient" and recipe.pruning.token_weights == "auto"
    keeps = {"token_weights": "gradient"} if weighted else {}  # by default they follow from a solver
    for changes in _lower(needs.recipe, fixed, keeps, offloads=not on_cpu):
        needed = needs_of(changes, nsamples)[1] if changes else asked
        if needed <= USED_SHARE * memory:
            return Fitted(recipe.replace(**changes), changes, asked, needed)
        tried[needed] = changes
    least = min(tried)
    lowered = "".join(f', `{field}="{value}"`' for field, value in tried[least].items())
    raise UserError(
        f"`fit` is {size_text(memory)}, of which a run may take {USED_SHARE:.0%}, but this run needs about "
        f"{size_text(least)}{lowered and f' even with{lowered[1:]}'}: name more memory or a smaller model"
    )


def _lower(
    recipe: ResolvedRecipe, fixed: Collection[str], keeps: dict[str, Any], *, offloads: bool
) -> Iterator[dict[str, Any]]:
    """The changes of `recipe` that need less memory, from none to all; no field of `fixed` changes.

    keeps: the fields that change together with the solver, so that the recipe stays valid without it.
    offloads: whether `layers_per_step` takes layers from the device.
    """
    now: dict[str, Any] = {**vars(recipe.recovery), **vars(recipe.pruning), **vars(recipe.rotation)}

    def changed(**values: Any) -> dict[str, Any]:
        return {} if values.keys() & set(fixed) or all(now[key] == values[key] for key in values) else values

    shared = offloads and recipe.rotation.mode == "shared" and not recipe.rotation.layers_per_step
    steps = changed(layers_per_step=LAYERS_PER_STEP) if shared else {}
    less = changed(distill_epochs=0), changed(recover="none"), changed(solve="none", target="self", **keeps)
    quality: dict[str, Any] = {}
    for more in ({}, *filter(None, less)):
        quality |= more
        yield dict(quality)
        if steps:
            yield quality | steps
