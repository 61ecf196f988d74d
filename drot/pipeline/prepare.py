"""The beginning of a run: resolves the recipe, and loads the calibration tokens and the model."""

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.dtypes import cast_weights
from drot.checkpoint.load import load_model, load_tokenizer
from drot.checkpoint.manifest import MANIFEST, read_manifest
from drot.checkpoint.offload import open_skeleton
from drot.checkpoint.opening import load_config
from drot.checkpoint.resume import OWN_TEXT
from drot.checkpoint.source import gguf_file
from drot.config import Recipe, ResolvedRecipe, resolve
from drot.config.resolve import GIVEN_TOKENS
from drot.core.checks import is_a, is_callable
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent
from drot.machine.devices import computing_dtype, is_gpu, parse_dtype, pick_device
from drot.machine.ranks import ALONE, Ranks
from drot.model.families import family_of
from drot.model.sizes import positions_of
from drot.pipeline.batches import held_out_sequences
from drot.pipeline.context import RunContext
from drot.pipeline.own_text import write_own_text
from drot.pipeline.validation import check_config, check_recipe, check_seqlen, check_tokens, down_width
from drot.text.further import load_further
from drot.text.source import as_token_ids, check_sources, load_calibration

logger = logging.getLogger("drot")

Model = str | Path | PreTrainedModel


@dataclass(frozen=True)
class Plan:
    """What is known of a run before a text is read and weights are loaded."""

    config: Any
    device: torch.device
    recipe: ResolvedRecipe


@dataclass(frozen=True)
class Prepared:
    """What a run starts with. source: name or folder of the model."""

    context: RunContext
    source: str
    tokenizer: Any


def plan(
    model: Model,
    recipe: Recipe,
    *,
    calibration: Tensor | None = None,
    distillation: Tensor | None = None,
    device: str | torch.device = "auto",
    rotations_given: bool = False,
    format: str = "dense",
    ranks: Ranks = ALONE,
) -> Plan:
    """Resolves the recipe for a model and the device. Raises UserError for what does not fit."""
    found = _own_device(device, ranks)
    if isinstance(model, PreTrainedModel):
        config = model.config
    else:
        config = load_config(model)
        _refuse_pruned(Path(model))
    check_config(config)
    resolved = resolve(
        recipe,
        positions=positions_of(config),
        device=found.type,
        format=format,
        rotations_given=rotations_given,
        down_width=down_width(config, recipe.pruning),
        rotates_stream=family_of(config).rotates_stream,
        tokens=None if calibration is None else (calibration.shape[0], calibration.shape[1]),
        distillation=0 if distillation is None else len(distillation),
    )
    if ranks.first and recipe.recovery.distill_epochs and not resolved.recovery.distill_epochs:
        logger.warning(
            "the kept weights of all layers are not trained together: that needs other token ids than the "
            "calibration, as `distillation`"
        )
    check_recipe(config, resolved, rotations_given=rotations_given, ranks=ranks)
    if ranks.first and not any(sparsity.ratio for sparsity in resolved.pruning.sparsities):
        logger.warning("a sparsity of 0 removes nothing: the model is rotated, and keeps all of its weights")
    if ranks.first and (lacking := family_of(config).lacks(resolved.rotation.mode)):
        names = " and ".join(map(str.upper, lacking))
        logger.warning("%s left out: a model of type %s has no place for it", names, config.model_type)
    return Plan(config, found, resolved)


def prepare(
    model: Model,
    recipe: Recipe,
    *,
    tokenizer: Any,
    calibration: Tensor | None,
    distillation: Tensor | None = None,
    device: str | torch.device,
    dtype: str | torch.dtype,
    save_dtype: str | torch.dtype = "auto",
    rotations_given: bool,
    format: str = "dense",
    measures: bool = False,
    streams: bool = False,
    own_text: Path | None = None,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> Prepared:
    """Loads the model and the calibration tokens. Raises UserError for what does not fit.

    The arguments are those of `drot.prune`.

    rotations_given: whether the rotations are loaded from a file instead of trained.
    measures: whether the run measures output errors, so that it reads calibration text in any case.
    streams: whether the layers of a model that is named by `model` are read from its files when their turn
        comes, and dropped after it. Otherwise all of them are loaded.
    own_text: the file of the text that the model writes, which is read if it exists; None keeps no file.
    ranks: those that share the work. Rank 0 reads the text and shows the progress.
    """
    is_a("model", model, str, Path, PreTrainedModel)
    is_a("device", device, str, torch.device)
    if not hasattr(tokenizer, "save_pretrained"):  # token ids need no more of a tokenizer
        is_callable("tokenizer", tokenizer, or_none=True)
    is_callable("progress", progress)
    # a mistake in a dtype is found before the text is read
    dtype, save_dtype = parsed_dtype("dtype", dtype), parsed_dtype("save_dtype", save_dtype)
    tokens, further = _given_tokens(calibration, distillation)
    planned = ranks.one_after_the_other(
        lambda: plan(
            model,
            recipe,
            calibration=tokens,
            distillation=further,
            device=device,
            rotations_given=rotations_given,
            format=format,
            ranks=ranks,
        )
    )
    config, resolved = planned.config, planned.recipe
    if isinstance(model, PreTrainedModel):
        source = getattr(config, "_name_or_path", "")
    else:
        source, tokenizer = str(model), tokenizer or load_tokenizer(model)
    write_own = partial(
        write_own_text, recipe=resolved, model=model, tokenizer=tokenizer, config=config,
        device=planned.device, dtype=dtype, progress=progress,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() if own_text is None else contextlib.nullcontext("") as temporary:
        file = Path(temporary, OWN_TEXT) if own_text is None else own_text
        if tokens is None and (measures or resolved.reads_calibration):
            read = partial(_read_text, resolved, tokenizer, config, progress, file, write_own)
            tokens = ranks.on_first(read)
        elif tokens is None:
            tokens = torch.empty(0, 1, dtype=torch.long)  # no sequences
        check_tokens(tokens, config)
        if measures or not resolved.recovery.distill_epochs:
            further = None
        else:
            make = partial(_with_further, resolved, further, tokens, tokenizer, config, progress, file, ranks)
            resolved, further = ranks.on_first(make)
    weights = None
    if not isinstance(model, PreTrainedModel):  # after the text, in which a mistake is found sooner
        progress(ProgressEvent(phase="load"))
        chosen = computing_dtype(dtype, planned.device)
        folder = model
        if streams and gguf_file(folder) is None:
            model, weights, own = ranks.one_after_the_other(lambda: open_skeleton(folder, chosen))
        else:
            model, own = ranks.one_after_the_other(lambda: _load(folder, chosen, config))
    else:
        own = model.dtype
    model.eval()  # dropout would change the Hessians
    save_dtype = own if isinstance(save_dtype, str) else save_dtype
    context = RunContext(
        model, resolved, tokens, planned.device, progress, save_dtype, weights, ranks, further
    )
    context.model.check()
    return Prepared(context, source, tokenizer)


def _own_device(name: str | torch.device, ranks: Ranks) -> torch.device:
    """The device of this rank: of several ranks on GPUs, each has the GPU with its number on its machine."""
    device = pick_device(name)
    if ranks.size == 1 or not is_gpu(device):
        return device
    if str(name) not in ("auto", device.type):
        raise UserError(f"`device` must be {device.type} where several ranks have a GPU each; got {name}")
    ranks.device = device = pick_device(f"{device.type}:{ranks.local_rank}")
    torch.get_device_module(device).set_device(device)
    return device


def _given_tokens(calibration: Any, distillation: Any) -> tuple[Tensor | None, Tensor | None]:
    """The token ids that a caller gives in place of a text. Raises UserError for what are none."""
    is_a("calibration", calibration, Tensor, or_none=True)
    is_a("distillation", distillation, Tensor, or_none=True)
    if calibration is None and distillation is not None:
        raise UserError("`distillation` needs `calibration`: give both token ids, or let drot read both")
    tokens, further = (None if ids is None else as_token_ids(ids) for ids in (calibration, distillation))
    return tokens, further


def parsed_dtype(argument: str, dtype: str | torch.dtype) -> str | torch.dtype:
    """The dtype with a name; `auto` as it is. Raises UserError for what is no dtype."""
    is_a(argument, dtype, str, torch.dtype)
    return dtype if dtype == "auto" else parse_dtype(dtype, argument)


def _load(model: str | Path, dtype: str | torch.dtype, config: Any) -> tuple[PreTrainedModel, torch.dtype]:
    """The model in `dtype`, and the dtype of its checkpoint."""
    if config.dtype is not None:
        return load_model(model, dtype), config.dtype
    loaded = load_model(model, "auto")  # config.json of an old checkpoint names no dtype
    own = loaded.dtype
    if dtype != "auto":
        cast_weights(loaded, parse_dtype(dtype))
    return loaded, own


def _read_text(
    recipe: ResolvedRecipe,
    tokenizer: Any,
    config: Any,
    progress: Progress,
    own: Path,
    write_own: Callable[[Path], None],
) -> Tensor:
    """The tokens [nsamples, seqlen] of the recipe's calibration text, after `write_own` of the file `own`."""
    text = recipe.calibration
    if tokenizer is None:
        raise UserError("a loaded model needs `tokenizer`, or token ids as `calibration`; got neither")
    if text.source == GIVEN_TOKENS:
        raise UserError(
            "the run of this recipe was calibrated on token ids that a Python program gave: name a text as "
            "`source`, or give the token ids as `calibration`"
        )
    check_seqlen(text.seqlen, config)  # before the text is tokenised, which may take a minute
    check_sources(text.source)  # before the model writes one
    write_own(own)
    return load_calibration(text, tokenizer, progress, own=own)


def _check_further(further: Tensor, tokens: Tensor, config: Any) -> None:
    """Raises UserError for token ids of the training of all layers that do not fit the calibration."""
    check_tokens(further, config)
    if further.shape[1] != tokens.shape[1]:
        raise UserError(
            f"`distillation` must have sequences as long as `calibration` has, {tokens.shape[1]} tokens; "
            f"got {further.shape[1]}"
        )


def _with_further(
    recipe: ResolvedRecipe,
    given: Tensor | None,
    tokens: Tensor,
    tokenizer: Any,
    config: Any,
    progress: Progress,
    own: Path,
    ranks: Ranks,
) -> tuple[ResolvedRecipe, Tensor | None]:
    """The recipe with the number of sequences for the training of all layers, and their tokens [n, seqlen].

    Without the training, and without tokens, if the text has too few that the calibration does not hold.
    """
    if given is not None:
        _check_further(given, tokens, config)
        return recipe, given
    wanted = recipe.recovery.distill_nsamples
    found = load_further(recipe.calibration, wanted, tokens, tokenizer, progress, own)
    count = len(found) if len(found) - held_out_sequences(len(found)) >= ranks.size else 0
    if count < wanted:
        logger.warning(
            "beside the calibration the text has %d of %d sequences for the training of all layers%s",
            len(found), wanted, "" if count else ", which is left out",
        )  # fmt: skip
    epochs = recipe.recovery.distill_epochs if count else 0
    recovery = dataclasses.replace(recipe.recovery, distill_nsamples=count, distill_epochs=epochs)
    return dataclasses.replace(recipe, recovery=recovery), found if count else None


def _refuse_pruned(folder: Path) -> None:
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if any(sparsity.ratio > 0 for sparsity in manifest.recipe.pruning.sparsities):
            raise UserError(f"{folder} was pruned already: prune its dense original, {manifest.base_model}")
