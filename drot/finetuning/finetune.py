"""`drot.finetune`, which trains a pruned checkpoint and writes a checkpoint with the same zeros."""

import contextlib
import importlib.util
import logging
import tempfile
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.checkpoint.disk_space import check_space
from drot.checkpoint.hf_model import as_drot_model
from drot.checkpoint.importance import load_importance_maps, save_importance_maps
from drot.checkpoint.load import has_tokenizer, load_model, load_tokenizer, warn_of_rounding
from drot.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    CheckpointManifest,
    find_manifest,
)
from drot.checkpoint.opening import load_config, refuse_multimodal
from drot.checkpoint.quantization_config import (
    drot_config_of,
    format_of,
    quantization_config_of,
    refuse_quantised,
)
from drot.checkpoint.records import FinetuneRecord
from drot.checkpoint.save import check_output, check_saves, copy_files, files_beside, save_checkpoint
from drot.checkpoint.shards import save_layers
from drot.checkpoint.source import model_folder, recorded_name
from drot.config import FinetuneConfig
from drot.core import torchrun
from drot.core.checks import is_a, is_callable
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.lock import locked
from drot.evaluation.predictions import check_windows
from drot.finetuning.distillation import load_dense
from drot.finetuning.text import split_text
from drot.machine.devices import is_gpu, pick_device
from drot.machine.products import without_autocast
from drot.model.decoder import DecoderModel
from drot.model.families import family_of
from drot.model.sizes import positions_of
from drot.pipeline.validation import check_tokens
from drot.sparse.linear import is_packed
from drot.sparse.packed import pack_model

logger = logging.getLogger("drot")

#: package → the versions with which drot is tested
PACKAGES = {"peft": "peft>=0.18,<1", "accelerate": "accelerate>=1.4,<2"}
#: bytes for tokenizer, manifest, card and maps
OTHER_FILES = 2**25
#: least share of zeros with which a model without a manifest counts as pruned
LEAST_ZEROS = 0.05


@dataclass(frozen=True)
class FinetuneResult:
    """The result of `drot.finetune`. Its repr is one line, without the model and the manifest.

    model: the fine-tuned model. With `keep_adapter`, a PeftModel around the pruned model.
    manifest: the content of drot.json. The last entry of its list `finetune` is this run.
    out: the folder of the checkpoint; None if no checkpoint was written.
    """

    model: Any = field(repr=False)
    manifest: CheckpointManifest = field(repr=False)
    out: Path | None


@without_autocast()
@torch.inference_mode(False)  # in which gradients are unknown
def finetune(
    model: str | Path,
    config: FinetuneConfig | None = None,
    *,
    out: str | Path | None = None,
    tokenizer: Any = None,
    tokens: Tensor | None = None,
    device: str | torch.device = "auto",
    progress: Progress = silent,
) -> FinetuneResult:
    """Trains a pruned model by LoRA or, with `full=True`, all its kept weights. Its zeros stay zeros.

    The result has the format and the dtype of `model`: packed or dense, with or without rotations, which are
    not trained. Under `accelerate launch`, every process trains on its share of the sequences, and the main
    process writes.

    Raises UserError for a mistake in the input, a model without pruned weights, and a training that
    diverges. Nothing is then written to `out`. While the training lasts, `out` is locked: another run that
    names it is refused.

    Args:
        model: a folder that `drot prune` wrote, or any model of a supported family with at least 5 % zeros in
            the linears of its decoder layers.
        config: the settings; None is `FinetuneConfig()`.
        out: the folder of the checkpoint, which must be new or empty. None writes no checkpoint.
        tokenizer: the tokenizer for the text; None is the tokenizer of `model`.
        tokens: token ids [n, seqlen], which replace the text; the last `held_out` rows are held out.
        device: `auto`, `cpu` or `cuda`.
        progress: the callback for ProgressEvents.
    """
    is_a("model", model, str, Path)
    is_a("config", config, FinetuneConfig, or_none=True)
    is_a("out", out, str, Path, or_none=True)
    is_a("tokens", tokens, Tensor, or_none=True)
    if not hasattr(tokenizer, "save_pretrained"):  # `tokens` need no more of a tokenizer
        is_callable("tokenizer", tokenizer, or_none=True)
    is_callable("progress", progress)
    config = config or FinetuneConfig()
    out = None if out is None else Path(out)
    if out is not None:
        check_output(out)
    _check_packages(config)
    target = _pick_device(device)
    with contextlib.nullcontext() if out is None or torchrun.rank() else locked(out):
        return _finetune(model, config, out, tokenizer, tokens, target, progress)


def _finetune(
    model: str | Path,
    config: FinetuneConfig,
    out: Path | None,
    tokenizer: Any,
    tokens: Tensor | None,
    target: torch.device,
    progress: Progress,
) -> FinetuneResult:
    """`finetune` after its arguments were checked and `out` was locked."""
    model_config = load_config(model)
    refuse_multimodal(model, "fine-tune a model that reads text alone, or prune with more recovery")
    _check_config(model_config, config)
    files = model_folder(model)
    before, maps = find_manifest(files), load_importance_maps(files)
    if tokenizer is None and (tokens is None or has_tokenizer(files)):
        tokenizer = load_tokenizer(model)
    sequences, held_out = split_text(config, tokenizer, tokens, positions_of(model_config), progress)
    progress(ProgressEvent(phase="load"))
    loaded = load_model(model)
    check_tokens(sequences, loaded.config)
    check_windows(held_out.flatten(), loaded.config, held_out.shape[1])
    dense = None if config.against is None else load_dense(config.against, loaded, tokenizer, sequences[0])
    packed = is_packed(loaded)
    beside = {} if config.keep_adapter else files_beside(before)
    if out is not None and torchrun.rank() == 0:
        check_space(out, _size_of_result(loaded, config) + sum(record.bytes for record in beside.values()))
        check_saves(loaded, tokenizer)
    if packed:
        loaded.dequantize()
    share = DecoderModel(loaded).zero_share()
    if before is None and share < LEAST_ZEROS:
        raise UserError(
            f"{model} holds no {MANIFEST}, and {share:.1%} of the linear weights of its decoder layers are "
            f"zero: name a folder that drot prune wrote, or a model with at least {LEAST_ZEROS:.0%} zeros"
        )
    warn_of_rounding(files, loaded)
    trained, record = _train(loaded, config, (sequences, held_out), dense, target, progress)
    record["versions"] |= {name: metadata.version(name) for name in _packages(config)}
    finetuning = FinetuneRecord.model_validate({"from": recorded_name(model), **record})
    if packed:
        held = drot_config_of(model_config)
        pack_model(trained, held.dense_linears if held is not None else [])
    if not config.keep_adapter:
        as_drot_model(trained)
    manifest = _manifest_after(before, trained, finetuning, config, share)
    if out is not None and torchrun.rank() == 0:
        progress(ProgressEvent(phase="save"))

        def write_more(part: Path) -> None:
            save_importance_maps(part, maps)
            copy_files(files, part, beside)

        manifest = save_checkpoint(
            trained,
            tokenizer,
            manifest,
            out,
            write_layers=None if config.keep_adapter else partial(save_layers, DecoderModel(trained).layers),
            write_more=write_more,
        )
    if not config.keep_adapter:
        trained.drot_files = manifest, ""
    return FinetuneResult(trained, manifest, out)


def _train(
    model: Any,
    config: FinetuneConfig,
    sequences: tuple[Tensor, Tensor],
    dense: Any,
    target: torch.device,
    progress: Progress,
) -> tuple[Any, dict[str, Any]]:
    """The trained model and the record of the training (`run_finetuning`). The caller's generators stay."""
    # it imports accelerate, which takes seconds
    from drot.finetuning.run import run_finetuning

    cpu, gpus = target.type == "cpu", [torchrun.local_rank()] if is_gpu(target) else []
    own_generators = torch.random.fork_rng(gpus, device_type=target.type)
    try:
        with tempfile.TemporaryDirectory(prefix="drot-finetune-") as folder, own_generators:
            return run_finetuning(
                model, config, sequences, Path(folder), dense=dense, cpu=cpu, progress=progress
            )
    except torch.OutOfMemoryError:
        raise UserError(
            f"the GPU has too little memory for `batch_size`, {config.batch_size}, and sequences of "
            f"`seqlen`, {sequences[0].shape[1]}: lower them or use `gradient_checkpointing=True`"
        ) from None


def _manifest_after(
    manifest: CheckpointManifest | None,
    trained: Any,
    record: FinetuneRecord,
    config: FinetuneConfig,
    share: float,
) -> CheckpointManifest:
    """The manifest of the trained model. share: of zeros, of a model that another program pruned."""
    manifest = manifest or CheckpointManifest(
        format_version=FORMAT_VERSION,
        base_model=record.start,
        sparsity=share,
        dtype=record.dtype,
        format="dense",
        stock_architecture=True,
    )
    if not config.keep_adapter:
        manifest.format, manifest.stock_architecture = format_of(trained)
        manifest.dtype = record.dtype
    manifest.finetune = [*manifest.finetune, record]
    manifest.evaluations = []  # figures of the weights before the training
    return manifest


def _size_of_result(model: Any, config: FinetuneConfig) -> int:
    """The bytes that the result takes on the disk, with OTHER_FILES for all but the weights."""
    if not config.keep_adapter:
        return OTHER_FILES + sum(parameter.nbytes for parameter in model.parameters())
    sides = 0
    for layer in DecoderModel(model).layers:
        for linears in layer.modules:
            shapes = [layer.shape_of(linear.spec) for linear in linears]
            sides += sum(out for out, _ in shapes) + shapes[0][1]
    return OTHER_FILES + 4 * config.rank * sides


def _packages(config: FinetuneConfig) -> list[str]:
    """The packages that the training imports, besides those of every run."""
    return ["accelerate"] if config.full else ["accelerate", "peft"]


def _check_packages(config: FinetuneConfig) -> None:
    if missing := [name for name in _packages(config) if importlib.util.find_spec(name) is None]:
        install = " ".join(f"'{PACKAGES[name]}'" for name in missing)
        packages = f"package{'s' * (len(missing) > 1)} {' and '.join(missing)}"
        raise UserError(f"fine-tuning needs the {packages}: pip install {install}")


def _pick_device(device: str | torch.device) -> torch.device:
    target = pick_device(device)
    of_rank = torchrun.world_size() > 1 and str(device) in ("auto", target.type)
    if is_gpu(target) and target.index and not of_rank:
        raise UserError(
            f"`device` must be auto, cpu or cuda for fine-tuning; got {target}: choose GPUs with the "
            "environment variable CUDA_VISIBLE_DEVICES"
        )
    return target


def _check_config(model_config: Any, config: FinetuneConfig) -> None:
    """Raises UserError for a model that cannot be fine-tuned, before its weights are loaded."""
    if family_of(model_config).experts is not None:
        raise UserError(
            'drot does not fine-tune a mixture of experts: use `recover="block"` of drot prune, which trains '
            "its kept weights layer by layer"
        )
    quantised = quantization_config_of(model_config)
    refuse_quantised(model_config)
    if not config.full and config.rank > model_config.hidden_size:
        raise UserError(
            f"`rank` must be at most {model_config.hidden_size}, the hidden size of this model; "
            f"got {config.rank}"
        )
    if quantised.get("packed") and config.keep_adapter:
        raise UserError(
            "peft cannot open an adapter on packed weights: leave out `keep_adapter`, or make the model "
            "dense with drot convert"
        )
