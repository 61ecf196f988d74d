"""What a manifest says, as tables of text: for `drot info`, the model card and the page of `drot report`."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drot.checkpoint.manifest import CheckpointManifest, Manifest
from drot.checkpoint.records import DistillationRecord, EvaluationRecord, FinetuneRecord, LayerRecord
from drot.config import Recipe
from drot.config.resolve import GIVEN_TOKENS
from drot.config.rotation import point_of

#: the cell of a figure that there is not
NONE = "-"


@dataclass(frozen=True)
class Table:
    """A table of text.

    caption: what it holds.
    rows: heading → cell; the first cell names the row. A row without cells is a line between two sections.
    """

    caption: str
    rows: Sequence[Mapping[str, str]]

    @property
    def headings(self) -> list[str]:
        """The headings. A column is left out if it has no figure in any row."""
        found = dict.fromkeys(heading for row in self.rows for heading in row)
        return [heading for heading in found if any(row.get(heading, NONE) != NONE for row in self.rows)]

    @property
    def cells(self) -> list[list[str]]:
        """The cells of each row in the order of `headings`; [] for a line between two sections."""
        headings = self.headings
        return [[row.get(heading, NONE) for heading in headings] if row else [] for row in self.rows]


def number(value: object, form: str = "") -> str:
    """A value in a format; NONE for None."""
    return NONE if value is None else format(value, form)


def finite(value: float | None, form: str) -> str:
    """A figure of an evaluation, which is None where it is not finite."""
    return "not finite" if value is None else format(value, form)


def change(before: float | None, after: float | None, *, form: str = "") -> str:
    """'0.4 → 0.2'; one value alone, or NONE. Without a format, numbers have four digits."""
    found = [value for value in (before, after) if value is not None]
    shown = [format(value, form or (".0f" if value >= 1000 else ".4g")) for value in found]
    return " → ".join(shown) or NONE


def short(name: str) -> str:
    """A name on the hub as it is; of a longer path, which is nobody's business, its last part."""
    return Path(name).name if name.count("/") > 1 or Path(name).is_absolute() else name


def text_names(sources: Sequence[str]) -> dict[str, str]:
    """Text → `short` of it, or the whole text where two of `sources` have the same short name."""
    names = {source: short(source) for source in sources}
    return names if len(set(names.values())) == len(names) else {source: source for source in sources}


def short_task(task: str) -> str:
    """The name of a task, with `short` of the text behind `own:`."""
    kind, _, text = task.partition(":")
    return f"{kind}:{short(text)}" if text else task


def short_source(source: str) -> str:
    """`short` of a text, or of each of several with their shares."""
    return ",".join(short(part) for part in source.split(","))


#: the rise of a perplexity, as a share, of which shares would be noise
LEAST_DAMAGE = 1e-3


def gap_closed(dense: float | None, baseline: float | None, model: float | None) -> float | None:
    """(baseline - model) / (baseline - dense), in perplexities on one text.

    1 is the dense model's perplexity, 0 the baseline's. None if a perplexity is not known, and if the
    baseline's pruning does no damage, or less than LEAST_DAMAGE of the dense model's perplexity.

    dense: perplexity of the dense model.
    baseline: perplexity of the model that the baseline pruned, as without a rotation.
    model: perplexity of the model that is compared with the baseline.
    """
    if dense is None or baseline is None or model is None or baseline <= dense * (1 + LEAST_DAMAGE):
        return None
    return (baseline - model) / (baseline - dense)


def facts(manifest: CheckpointManifest) -> Iterator[tuple[str, str]]:
    """What was done with a model, in a few lines: name and value."""
    yield "model", short(manifest.base_model)
    if isinstance(manifest, Manifest):
        yield from _pruning_facts(manifest)
    else:
        yield "pruning", "by another program"
    yield "sparsity", f"{manifest.sparsity:.2%} of the decoder layers' linear weights"
    if manifest.saved_again:
        yield "saved again", "with other weights, whose zeros are counted; other figures are those of the run"
    yield from (("fine-tuning", finetune_line(record)) for record in manifest.finetune)
    for entry, figures in distinct_figures(manifest.evaluations):
        words = [f"{name} {value}" for name, value in figures]
        yield "evaluation", "; ".join([*words, measured(entry)])
    yield "opens as", f"{_opens_as(manifest)}, {manifest.dtype}"
    if isinstance(manifest, Manifest):
        seconds, of_layers = manifest.seconds.total, sum(layer.seconds for layer in manifest.layers)
        resumed = f" since it was resumed, {of_layers:.1f} s for all layers" if of_layers > seconds else ""
        yield "took", f"{seconds:.1f} s{resumed} on {manifest.device}, computed in {manifest.compute_dtype}"


def _pruning_facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The settings of a run, and the figures of the whole model."""
    pruning, rotation = manifest.recipe.pruning, manifest.recipe.rotation
    chosen = [
        f"{pruning.method} {pruning.sparsity}",
        *(f"{pattern}={sparsity}" for pattern, sparsity in pruning.sparsity_of),
        *(f"{pattern} dense" for pattern in pruning.keep),
    ]
    if pruning.method == "sparsegpt":
        chosen.append(f"damping {pruning.damping:g} of the {pruning.damping_average}")
    yield "pruning", ", ".join(chosen)
    yield "kept weights", _kept_weights_line(manifest.recipe)
    yield "rotation", _rotation_line(manifest)
    if manifest.rotations_left_out:
        names = " and ".join(map(str.upper, manifest.rotations_left_out))
        yield "left out", f"{names}, for which this family has no place"
    if rotation.boundary == "residual" and manifest.format == "packed":
        # by the rows in benchmarks/README.md it costs no perplexity
        yield "boundary", "part of the product of the last linear of a layer"
    if (trained := manifest.shared_rotation) is not None:
        layers = len(manifest.layers)
        loss = change(trained.loss_before / layers, trained.loss_after / layers)
        entropy = change(trained.entropy_before, trained.entropy_after)
        shown = f"entropy {entropy}" if rotation.objective == "entropy" else f"loss {loss}, entropy {entropy}"
        yield "shared training", f"{len(trained.loss_curve) - 1} steps, {shown} a layer"
    yield "calibration", _calibration_line(manifest)
    if manifest.distillation is not None:
        yield "trained together", _distillation_line(manifest.distillation)
    if manifest.relative_logit_error is not None:
        yield "invariance", f"relative logit error {manifest.relative_logit_error:.1e}"
    if manifest.untied_lm_head:
        yield "lm_head", "untied from the embedding, as it now contains the final norm's weight"


def layers_table(manifest: Manifest) -> Table:
    """A row for each layer."""
    rows = [_layer(layer) for layer in manifest.layers]
    if manifest.recipe.rotation.objective == "entropy":
        rows = [row | {"loss": NONE} for row in rows]  # the loss is the entropy
    return Table("Layers", rows)


def _layer(layer: LayerRecord) -> dict[str, str]:
    """The row of a layer. Sparsity and output error are means over its linears."""
    trained, recovery, linears = layer.rotation, layer.recovery, layer.linears.values()
    errors = [linear.output_error for linear in linears if linear.output_error is not None]
    return {
        "layer": str(layer.layer),
        "loss": change(trained.loss_before, trained.loss_after) if trained else NONE,
        "entropy": change(trained.entropy_before, trained.entropy_after) if trained else NONE,
        "sparsity": f"{statistics.fmean(linear.sparsity for linear in linears):.1%}",
        "output error": number(statistics.fmean(errors) if errors else None, ".4f"),
        "recovery": change(recovery.error_before, recovery.error_after) if recovery else NONE,
        "seconds": f"{layer.seconds:.1f}",
    }


def times_table(manifest: Manifest) -> Table:
    """Where the time of a run went: a row for each phase, the longest first."""
    total, phases = manifest.seconds.total, manifest.seconds.phases
    longest_first = sorted(
        ((name, value) for name, value in phases.items() if value > 0), key=lambda p: -p[1]
    )
    other = ("other", max(0.0, total - sum(phases.values())))
    return Table(
        "Time",
        [
            {"phase": name, "seconds": f"{value:.1f}", "share": f"{value / total:.1%}" if total else NONE}
            for name, value in [*longest_first, other, ("total", total)]
        ],
    )


def finetune_line(record: FinetuneRecord) -> str:
    """The settings and the figures of a fine-tuning."""
    settings, text, held_out = record.settings, record.text, record.held_out
    kind = "all kept weights" if settings.full else f"LoRA r {settings.rank}"
    if settings.against:
        kind += f" against {short(settings.against)}"
    perplexity = change(held_out.perplexity_before, held_out.perplexity_after)
    return (
        f"{kind}, lr {settings.resolved_lr:g}, {record.steps} steps, {text.shape[0]} x {text.shape[1]} "
        f"tokens of {short_source(settings.text.source)}; held-out perplexity {perplexity}; "
        f"{record.seconds:.0f} s"
    )


def distinct_figures(
    evaluations: Sequence[EvaluationRecord],
) -> list[tuple[EvaluationRecord, list[tuple[str, str]]]]:
    """Each evaluation with its figures, without those that a later evaluation in the same dtype repeats.

    `drot eval` and `drot compare` may measure the same perplexity. An evaluation without figures of its own
    is left out.
    """
    found, later = [], set()
    for entry in reversed(evaluations):
        own = [figure for figure in evaluation_figures(entry) if (entry.dtype, *figure) not in later]
        later |= {(entry.dtype, *figure) for figure in own}
        found += [(entry, own)] if own else []
    return found[::-1]


def measured(entry: EvaluationRecord) -> str:
    """How an evaluation was measured."""
    return f"{entry.dtype}, {entry.date.partition('T')[0]}"


def evaluation_figures(entry: EvaluationRecord) -> Iterator[tuple[str, str]]:
    """Measure and value of each figure of an evaluation."""
    for text, value in entry.perplexity.items():
        yield f"perplexity on {short(text)}, windows of {entry.seqlen} tokens", finite(value, ".3f")
    if entry.baselines is not None:
        for text, value in entry.perplexity.items():
            dense, plain = (found.get(text) for found in (entry.baselines.dense, entry.baselines.not_rotated))
            if (share := gap_closed(dense, plain, value)) is not None:
                yield f"gap closed on {short(text)}, from {plain:.3f} by the method alone", f"{share:.0%}"
    for text, agreement in entry.agreement.items():
        name = short(entry.against or "")
        yield f"next tokens equal to those of {name} on {short(text)}", f"{agreement.equal_tokens:.1%}"
    for task, value in entry.tasks.items():
        details = entry.task_details.get(task)
        shots = f", {details.fewshot} examples" if details is not None and details.fewshot else ""
        yield f"accuracy in {short_task(task)}{shots}", finite(value, ".2%")


def _opens_as(manifest: CheckpointManifest) -> str:
    """Whether the checkpoint needs drot to be opened, and what for."""
    if manifest.is_adapter:
        return f"an adapter for peft on top of {manifest.finetune[-1].start}"
    if manifest.stock_architecture:
        return "stock architecture"
    needs = ["packed 2:4 weights"] * (manifest.format == "packed")
    if isinstance(manifest, Manifest):
        rotation = manifest.recipe.rotation
        of_r1 = "R1 inside of the layers" if rotation.boundary == "inside" else "boundary rotations"
        needs += [of_r1] * (rotation.mode == "layer")
        needs += ["R3 in front of down_proj"] * (rotation.down_block is not None)
    return f"a model that needs drot ({', '.join(needs)})"


def _kept_weights_line(recipe: Recipe) -> str:
    """How the kept weights are computed and recovered."""
    pruning, recovery = recipe.pruning, recipe.recovery
    parts = [f"as {pruning.method} leaves them" if pruning.solve == "none" else f"solved by {pruning.solve}"]
    if pruning.target == "dense":
        parts.append(f"target dense, weight {pruning.target_weight:g}")
    if recovery.recover == "block":
        parts.append(
            f"recovered by block, up to {recovery.recover_epochs} epochs, lr {recovery.recover_lr:g}"
        )
    if epochs := recovery.distill_epochs:
        times = "1 epoch" if epochs == 1 else f"{epochs} epochs"
        parts.append(f"trained together for {times}, lr {recovery.distill_lr:g}")
    return ", ".join(parts)


def _distillation_line(record: DistillationRecord) -> str:
    """What came of the training of all layers together."""
    if record.left_out:
        return f"left out: {record.left_out}"
    if record.kl_before is None or record.kl_after is None:
        return "diverged, so the weights stayed as they were pruned"
    kl = f"KL {change(record.kl_before, record.kl_after)} on held-out sequences"
    if record.passes > 1:
        kl += f", the others read {record.passes} times"
    return kl if record.trained else f"{kl}, so the weights stayed as they were pruned"


def _calibration_line(manifest: Manifest) -> str:
    """The calibration text and the sequences that were cut from it."""
    settings, (nsamples, seqlen) = manifest.recipe.calibration, manifest.calibration.shape
    if nsamples == 0:
        return "none: magnitude pruning without a rotation needs no text"
    weighted = ", weighted by gradients" if manifest.recipe.pruning.token_weights == "gradient" else ""
    if settings.source == GIVEN_TOKENS:
        return f"token ids from a Python program, {nsamples} x {seqlen} tokens{weighted}"
    whole = " (all that the model reads)" if seqlen == manifest.positions else ""
    size = f"{nsamples} x {seqlen} tokens{whole}"
    return f"{short_source(settings.source)}, {size}, seed {settings.seed}{weighted}"


def _rotation_line(manifest: Manifest) -> str:
    """The rotation settings, or the file from which the rotations came."""
    rotation, file = manifest.recipe.rotation, manifest.rotations_file
    if rotation.mode == "none":
        return "none"
    point = point_of(rotation)
    parts = [rotation.mode if point is None else f"{point} ({rotation.mode})"]
    if rotation.blocks != 1:
        parts.append(f"blocks {rotation.blocks}")
    if rotation.layers_per_rotation != 1:
        parts.append(f"one R1 for {rotation.layers_per_rotation} layers")
    if rotation.boundary == "residual":
        parts.append("boundary on the residual")
    elif rotation.boundary == "inside":
        parts.append("R1 inside of the layers")
    if rotation.down_block is not None:
        parts.append(f"R3 in blocks of {rotation.down_block}")
    if file is not None:
        return ", ".join([*parts, f"from {file.file}"])
    parts += [f"objective {rotation.objective}", f"{rotation.steps} steps of {rotation.optimizer}"]
    parts.append(f"lr {rotation.lr:g}")
    return ", ".join(parts + ["dense Hessians"] * (rotation.hessians == "dense"))
