"""`compare`: a pruned model next to the dense one, and to the same pruning without rotation and solver."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.checkpoint.dtypes import cast_weights
from drot.checkpoint.load import load_tokenizer
from drot.checkpoint.manifest import Manifest, read_manifest
from drot.checkpoint.resume import OWN_TEXT
from drot.checkpoint.source import gguf_file
from drot.checkpoint.tables import gap_closed
from drot.config import ONE_SHOT, Recipe, RotationConfig
from drot.config.resolve import GIVEN_TOKENS
from drot.core.checks import is_a
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.evaluation.evaluate import Setup, evaluate, measure
from drot.evaluation.models import OpenModel
from drot.evaluation.perplexity import load_eval_tokens
from drot.evaluation.record import record as record_figures
from drot.machine.devices import parse_dtype, pick_device
from drot.machine.products import without_autocast
from drot.pipeline.prune import prune
from drot.reporting.cells import weights_in_files
from drot.text.further import load_further
from drot.text.source import calibration_hash, load_calibration

logger = logging.getLogger("drot")


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """One model of a comparison.

    name: `dense`, the pruning without a rotation, `+ solver` or the folder's name.
    perplexity: text → perplexity.
    gap_closed: text → the share of the gap between the plain pruning and the dense model that is closed; None
        for these two models, and if the plain pruning does no damage.
    sparsity: the share of zeros in the linears of the decoder layers.
    seconds: the time of the pruning; None for the dense model.
    """

    name: str
    perplexity: dict[str, float]
    gap_closed: dict[str, float | None]
    sparsity: float
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The models of a comparison, from the dense one to the folder's; and how the folder's was measured.

    figures: of the folder, as `evaluate` returns them. All models were measured as it was.
    """

    models: list[ComparedModel]
    figures: dict[str, Any]


@without_autocast()
def compare(
    folder: str | Path,
    *,
    ppl: list[str],
    model: str | None = None,
    seqlen: int | None = None,
    text_column: str = "text",
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    record: bool = True,
    progress: Progress = silent,
) -> Comparison:
    """The dense model, the model that is pruned without a rotation, with the solver as well, and `folder`.

    The model is pruned again with the method, the sparsities and the calibration text of `folder`: by the
    method alone, as published, and, if the run of `folder` used more than the method, with its solver, target
    and recovery. Nothing of that is kept but the perplexities.

    Raises UserError for a folder that drot did not write or whose run was given token ids, and as `evaluate`.

    Args:
        folder: a checkpoint that drot wrote.
        ppl: texts for the perplexity, as in `evaluate`.
        model: the dense model; None is the one that drot.json names.
        seqlen, text_column, device, dtype: as in `evaluate`. The models are pruned on the device too.
        record: whether to add the figures to the manifest of `folder`.
        progress: receives the events of the evaluations and of the runs.
    """
    is_a("model", model, str, Path, or_none=True)
    manifest = read_manifest(folder)
    name = manifest.dense_model(model)
    if manifest.recipe.reads_calibration and manifest.recipe.calibration.source == GIVEN_TOKENS:
        raise UserError(f"the run of {folder} was given token ids, so drot cannot prune with them again")
    target = pick_device(device, kernels=True)
    tokenizer = load_tokenizer(name)
    # before hours of measuring
    _check_dense(name, folder, manifest.identity)
    calibration, distillation = _tokens(Path(folder), manifest, tokenizer, progress)
    (figures,) = evaluate(
        [str(folder)], ppl=ppl, against=name, seqlen=seqlen, text_column=text_column, device=device,
        dtype=dtype, record=False, progress=progress,
    )  # fmt: skip
    texts = {source: load_eval_tokens(source, tokenizer, text_column) for source in ppl}
    setup, nothing = Setup(seqlen=figures["seqlen"], device=target, progress=progress), dict.fromkeys(texts)

    def pruned(label: str, recipe: Recipe) -> ComparedModel:
        """Prunes the dense model with the tokens of the run, and measures it as `folder` was measured."""
        result = prune(
            name, recipe, calibration=calibration, distillation=distillation, device=device, dtype=dtype,
            progress=progress,
        )  # fmt: skip
        cast_weights(result.model, parse_dtype(figures["dtype"]))
        return ComparedModel(
            name=label,
            perplexity=measure(OpenModel(result.model), label, None, texts, setup)["perplexity"],
            gap_closed=nothing,
            sparsity=result.manifest.sparsity,
            seconds=result.manifest.seconds.total,
        )

    plain, *solved = (pruned(label, recipe) for label, recipe in _baselines(manifest).items())
    dense = {source: figures["agreement"][source]["dense_perplexity"] for source in texts}
    if record:
        baselines = {"dense": dense, "not_rotated": plain.perplexity}
        if solved:
            baselines["solver"] = solved[0].perplexity
        record_figures(str(folder), figures | {"baselines": baselines})
    compared = ComparedModel(
        name=Path(folder).resolve().name,
        perplexity=figures["perplexity"],
        gap_closed=nothing,
        sparsity=manifest.sparsity,
        seconds=manifest.seconds.total,
    )

    def with_gap(model: ComparedModel) -> ComparedModel:
        base, own = plain.perplexity, model.perplexity
        return replace(model, gap_closed={t: gap_closed(dense[t], base[t], own[t]) for t in texts})

    original = ComparedModel(name="dense", perplexity=dense, gap_closed=nothing, sparsity=0.0, seconds=None)
    return Comparison(models=[original, plain, *map(with_gap, (*solved, compared))], figures=figures)


def _check_dense(name: str, folder: str | Path, recorded: Mapping[str, Any] | None) -> None:
    """Warns if the dense model has other weights than the model that was pruned to `folder`.

    recorded: the identity of the run. It names the weights in the dtype of the run.
    """
    if recorded is None or gguf_file(name) is not None:
        return
    if weights_in_files(name, recorded["dtype"]) != recorded["weights"]:
        logger.warning(
            "%s has other weights than the model that was pruned to %s: the gap is that of %s",
            name, folder, name,
        )  # fmt: skip


def _baselines(manifest: Manifest) -> dict[str, Recipe]:
    """Name → recipe of the runs that a checkpoint is compared with. The first is the method alone."""
    recipe = manifest.recipe
    solved = Recipe(
        rotation=RotationConfig(mode="none"),
        pruning=recipe.pruning,
        recovery=recipe.recovery,
        calibration=recipe.calibration,
    )
    plain = solved.replace(**ONE_SHOT, damping=None, damping_average=None, token_weights="auto")
    name = f"{recipe.pruning.method} {recipe.pruning.sparsity}"
    pruning, recovery = recipe.pruning, recipe.recovery
    of_method = (pruning.solve, pruning.target, recovery.recover) == ("none", "self", "none")
    same = of_method and not recovery.distill_epochs
    return {name: plain} if same or recipe.rotation.mode == "none" else {name: plain, "+ solver": solved}


def _tokens(
    folder: Path, manifest: Manifest, tokenizer: Any, progress: Progress
) -> tuple[Tensor | None, Tensor | None]:
    """The token ids that the run of `folder` read for the calibration, and to train all layers together."""
    recipe, own = manifest.recipe, folder / OWN_TEXT
    if not recipe.reads_calibration:
        return None, None
    try:
        tokens = load_calibration(recipe.calibration, tokenizer, progress, own=own)
    except UserError as error:
        raise UserError(
            f"the calibration text of the run, {recipe.calibration.source}, must be read again: start in the "
            f"folder where drot prune was started ({error})"
        ) from None
    if calibration_hash(tokens) != manifest.calibration.sha256:
        logger.warning("the calibration tokens differ from those of the run: so does what they cost")
    further = None
    if count := recipe.recovery.distill_nsamples:
        further = load_further(recipe.calibration, count, tokens, tokenizer, progress, own)
        if calibration_hash(further) != (manifest.identity or {}).get("distillation"):
            logger.warning("the tokens of the training of all layers differ from those of the run")
    return tokens, further
