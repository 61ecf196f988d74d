"""The beginning of a run: resolves the recipe, and loads the calibration tokens and the model."""

import logging
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
from drot.checkpoint.records import DistillationRecord
from drot.checkpoint.resume import OWN_TEXT, check_begun, partial_folder
from drot.checkpoint.source import gguf_file, model_folder, recorded_name
from drot.config import Recipe, ResolvedRecipe, resolve
from drot.config.rotation import point_of
from drot.core.checks import is_a, is_callable
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent
from drot.machine.devices import DTYPES_BY_NAME, computing_dtype, dtype_name, is_gpu, parse_dtype, pick_device
from drot.machine.ranks import ALONE, Ranks
from drot.model.families import family_of
from drot.model.sizes import positions_of
from drot.pipeline.context import RunContext, check_unchanged
from drot.pipeline.identity import known_before_the_text
from drot.pipeline.tokens import TextReader, given_tokens
from drot.pipeline.validation import check_prunable, check_recipe, down_width

logger = logging.getLogger("drot")

Model = str | Path | PreTrainedModel


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
) -> tuple[Any, torch.device, ResolvedRecipe]:
    """The config of the model, the device of this rank, and the resolved recipe.

    No text is read, and no weights are loaded. Raises UserError for what does not fit.
    """
    found = _own_device(device, ranks)
    if isinstance(model, PreTrainedModel):
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise UserError(
                "the weights of `model` must know gradients, and were made within torch.inference_mode(): "
                "load the model outside of it"
            )
        if model.dtype not in DTYPES_BY_NAME.values():
            raise UserError(
                f"the weights of `model` must be of dtype {', '.join(DTYPES_BY_NAME)}: load it in one of "
                f"these; got {dtype_name(model.dtype)}"
            )
        check_unchanged(model)
        config = model.config
    else:
        config = load_config(model)
        _refuse_pruned(model)
    check_prunable(config)
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
    family = family_of(config)
    if ranks.first and (lacking := family.lacks(resolved.rotation.mode)):
        names = " and ".join(map(str.upper, lacking))
        logger.warning("%s left out: a model of type %s has no place for it", names, config.model_type)
    unties = family.rotates_stream and config.tie_word_embeddings
    for_all_engines = format == "dense" and point_of(resolved.rotation) == "stock"
    if ranks.first and for_all_engines and unties and family.tied_elsewhere:
        logger.warning(
            "vLLM, SGLang and llama.cpp take the embedding of a model of type %s for its lm_head, which R1 "
            "makes another matrix: there its outputs will be wrong. transformers reads both. `mode=none` "
            "leaves them alike", config.model_type,
        )  # fmt: skip
    return config, found, resolved


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
    out: Path | None = None,
    finished: bool = False,
    measures: bool = False,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> RunContext:
    """Loads the model and the calibration tokens. Raises UserError for what does not fit.

    The arguments are those of `drot.prune`. With `out`, and for a measurement, the layers of a model that is
    named by `model` are read from its files when their turn comes, and dropped after it. Otherwise all of
    them are loaded.

    rotations_given: whether the rotations are loaded from a file instead of trained.
    finished: whether `out` holds the result already.
    measures: whether the run measures output errors, so that it reads calibration text in any case.
    ranks: those that share the work. Rank 0 reads the text and shows the progress.
    """
    is_a("model", model, str, Path, PreTrainedModel)
    if not hasattr(tokenizer, "save_pretrained"):  # token ids need no more of a tokenizer
        is_callable("tokenizer", tokenizer, or_none=True)
    is_callable("progress", progress)
    # a mistake in a dtype is found before the text is read
    dtype, save_dtype = parsed_dtype("dtype", dtype), parsed_dtype("save_dtype", save_dtype)
    tokens, further = given_tokens(calibration, distillation)
    config, target, planned = ranks.one_after_the_other(
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
    if isinstance(model, PreTrainedModel):
        source = recorded_name(getattr(config, "_name_or_path", ""))
    else:
        source, tokenizer = recorded_name(model), tokenizer or load_tokenizer(model)
    own_text = None
    if out is not None:
        own_text = (out if finished else partial_folder(out)) / OWN_TEXT
        if not finished:
            ranks.on_first(lambda: check_begun(out, known_before_the_text(planned)))
    reader = TextReader(
        model=model, tokenizer=tokenizer, config=config, device=target, dtype=dtype,
        progress=progress, ranks=ranks, own_text=own_text,
    )  # fmt: skip
    resolved, tokens, further = reader.read(planned, tokens, further, measures=measures)
    weights = None
    if not isinstance(model, PreTrainedModel):  # after the text, in which a mistake is found sooner
        progress(ProgressEvent(phase="load"))
        chosen = computing_dtype(dtype, target)
        folder = model
        if (measures or out is not None) and gguf_file(folder) is None:
            model, weights, own = ranks.one_after_the_other(lambda: open_skeleton(folder, chosen))
        else:
            model, own = ranks.one_after_the_other(lambda: _load(folder, chosen, config))
    else:
        own = model.dtype
    model.eval()  # dropout would change the Hessians
    save_dtype = own if isinstance(save_dtype, str) else save_dtype
    context = RunContext(
        model, resolved, tokens, target, progress, save_dtype, weights, ranks, further, source, tokenizer
    )
    if planned.recovery.distill_epochs and not resolved.recovery.distill_epochs:
        reason = "the text has too few sequences beside those of the calibration"
        context.left_out = DistillationRecord(left_out=reason)
    context.model.check()
    return context


def _own_device(name: str | torch.device, ranks: Ranks) -> torch.device:
    """The device of this rank: of several ranks on GPUs, each has the GPU with its number on its machine."""
    device = pick_device(name, kernels=True)
    if ranks.size == 1 or not is_gpu(device):
        return device
    if str(name) not in ("auto", device.type):
        raise UserError(f"`device` must be {device.type} where several ranks have a GPU each; got {name}")
    ranks.device = device = pick_device(f"{device.type}:{ranks.local_rank}", kernels=True)
    torch.get_device_module(device).set_device(device)
    return device


def parsed_dtype(argument: str, dtype: str | torch.dtype) -> str | torch.dtype:
    """The dtype with a name; `auto` as it is. Raises UserError for what is none of DTYPES_BY_NAME."""
    is_a(argument, dtype, str, torch.dtype)
    if dtype == torch.float64:
        raise UserError(f"`{argument}` must be auto or one of {', '.join(DTYPES_BY_NAME)}; got float64")
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


def _refuse_pruned(model: str | Path) -> None:
    folder = model_folder(model)
    if gguf_file(model) is None and (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if any(sparsity.ratio > 0 for sparsity in manifest.recipe.pruning.sparsities):
            raise UserError(f"{model} was pruned already: prune its dense original, {manifest.base_model}")
