"""Output on stdout: the console, single lines, and the table of a manifest."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from drot.checkpoint.size import size_text, weight_bytes
from drot.cli.safe_text import SafeConsole
from drot.config import Recipe

if TYPE_CHECKING:
    from drot.manifest.manifest import CheckpointManifest, Manifest
    from drot.manifest.records import EvaluationRecord, FinetuneRecord, LayerRecord, SharedRotationRecord

#: columns of the table of layers; the table omits a column that has no figure in any row
COLUMNS = ("layer", "loss", "entropy", "sparsity", "output error", "recovery", "seconds")

#: what a rotation of the residual gives and costs; benchmarks/README.md has the measurement
BOUNDARY_COST = "part of down_proj's product; costs about 0.1 of perplexity more than --boundary input"


def output() -> SafeConsole:
    """A console that prints to the current stdout; 100 columns wide if stdout is not a terminal."""
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=100)


def print_line(line: str) -> None:
    """Prints one line on stdout, without breaking it."""
    output().print(line, soft_wrap=True)


def number_table(*headings: str, texts: int = 1, **settings: Any) -> Table:
    """A table whose first `texts` columns hold text, and whose others hold numbers."""
    table = Table(title_justify="left", **settings)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < texts else "right")
    return table


def saved_line(source: str, out: Path) -> str:
    """Says where a checkpoint was saved, and how many bytes its weights and those of its source have."""
    before, after = weight_bytes(source), weight_bytes(out)
    if after is None:
        return f"Saved to {out}"
    if before is None:  # a model on the hub
        return f"Saved to {out}: {size_text(after)}"
    return f"Saved to {out}: {size_text(before)} -> {size_text(after)}, {after / before:.2f} of the bytes"


def print_manifest(manifest: "CheckpointManifest") -> None:
    """Prints a few lines about a checkpoint and, if drot pruned it, a row for each layer and each phase."""
    from drot.manifest.manifest import Manifest

    console, facts = output(), Table(show_header=False, box=None, pad_edge=False)
    for name, value in _facts(manifest) if isinstance(manifest, Manifest) else _facts_elsewhere(manifest):
        facts.add_row(name, value)
    console.print(facts)
    if isinstance(manifest, Manifest):
        console.print(layers_table(manifest))
        console.print(times_table(manifest))


def _facts(manifest: "Manifest") -> Iterator[tuple[str, str]]:
    """The lines about a model that drot pruned: name and value."""
    pruning, rotation = manifest.recipe.pruning, manifest.recipe.rotation
    yield "model", manifest.base_model
    damping = f", damping {pruning.damping:g} of the {pruning.damping_average}"
    patterns = [
        *(f"{pattern}={sparsity}" for pattern, sparsity in pruning.sparsity_of),
        *(f"{pattern} dense" for pattern in pruning.keep),
    ]
    mixed = "".join(f", {pattern}" for pattern in patterns)
    yield (
        "pruning",
        f"{pruning.method} {pruning.sparsity}{mixed}{damping if pruning.method == 'sparsegpt' else ''}",
    )
    yield "kept weights", _kept_weights_line(manifest.recipe)
    yield "rotation", _rotation_line(manifest)
    if rotation.boundary == "residual" and manifest.format == "packed":
        yield "boundary", BOUNDARY_COST
    if manifest.shared_rotation is not None:
        yield "shared training", _shared_line(manifest, manifest.shared_rotation)
    yield "calibration", _calibration_line(manifest)
    yield "sparsity", f"{manifest.sparsity:.2%} of the decoder layers' linear weights"
    if manifest.relative_logit_error is not None:
        yield "invariance", f"relative logit error {manifest.relative_logit_error:.1e}"
    yield from _later_facts(manifest)
    computed = manifest.compute_dtype
    dtype = manifest.dtype + ("" if computed == manifest.dtype else f" (computed in {computed})")
    yield "opens as", f"{_opens_as(manifest)}, {dtype}"
    if manifest.untied_lm_head:
        yield "lm_head", "untied from the embedding, as it now contains the final norm's weight"
    yield "took", f"{manifest.seconds.total:.1f} s on {manifest.device}"


def _facts_elsewhere(manifest: "CheckpointManifest") -> Iterator[tuple[str, str]]:
    """The lines about a model that another program pruned and drot fine-tuned."""
    yield "model", manifest.base_model
    yield "pruning", "by another program"
    yield "sparsity", f"{manifest.sparsity:.2%} of the decoder layers' linear weights"
    yield from _later_facts(manifest)
    yield "opens as", f"{_opens_as(manifest)}, {manifest.dtype}"


def _later_facts(manifest: "CheckpointManifest") -> Iterator[tuple[str, str]]:
    """What was done with the model after its pruning."""
    yield from (("fine-tuning", finetune_line(record)) for record in manifest.finetune)
    yield from (("evaluation", evaluation_line(entry)) for entry in manifest.evaluations)


def layers_table(manifest: "Manifest") -> Table:
    """A row for each layer. A column that has no figure in any row is left out."""
    table = Table(title="Layers", title_justify="left")
    rows = [_layer_cells(layer) for layer in manifest.layers]
    shown = [heading for heading in COLUMNS if any(row[heading] != "-" for row in rows)]
    if manifest.recipe.rotation.objective == "entropy" and "entropy" in shown:
        shown.remove("loss")  # the loss is the entropy
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    return table


def times_table(manifest: "Manifest") -> Table:
    """Where the time of a run went: a row for each phase, the longest first."""
    total = manifest.seconds.total
    phases = {phase: value for phase, value in manifest.seconds.phases.items() if value > 0}
    table = Table(title="Time", title_justify="left")
    for heading in ("phase", "seconds", "share"):
        table.add_column(heading, justify="left" if heading == "phase" else "right", no_wrap=True)
    rows = sorted(phases.items(), key=lambda item: -item[1])
    for phase, value in [*rows, ("other", max(0.0, total - sum(phases.values()))), ("total", total)]:
        table.add_row(phase, f"{value:.1f}", f"{value / total:.1%}" if total else "-")
    return table


def scaled(value: float, unit: str) -> str:
    """A value with three digits and a prefix, as in 12.5 GFLOP/s."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{three_digits(value / scale)} {prefix}{unit}"
    return f"{three_digits(value)} {unit}"


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def finetune_line(record: "FinetuneRecord") -> str:
    """The settings and the figures of a fine-tuning."""
    settings, text, held_out = record.settings, record.text, record.held_out
    kind = f"LoRA r {settings.rank}" if record.method == "lora" else "all kept weights"
    perplexity = _change(held_out.perplexity_before, held_out.perplexity_after)
    return (
        f"{kind}, lr {settings.lr:g}, {record.steps} steps, {text.shape[0]} x {text.shape[1]} "
        f"tokens of {text.source}; held-out perplexity {perplexity}; {record.seconds:.0f} s"
    )


def evaluation_line(entry: "EvaluationRecord") -> str:
    """The figures of an evaluation that `drot eval` recorded."""
    parts = [
        f"perplexity {_number(value)} on {Path(source).name} (windows of {entry.seqlen})"
        for source, value in entry.perplexity.items()
    ]
    original = Path(entry.against or "").name
    parts += [
        f"{figures.equal_tokens:.1%} of next tokens as {original} on {Path(source).name}"
        for source, figures in entry.agreement.items()
    ]
    parts += [
        f"{task} {'not finite' if accuracy is None else f'{accuracy:.1%}'}"
        for task, accuracy in entry.tasks.items()
    ]
    return f"{'; '.join(parts)}; {entry.dtype}, {entry.date.partition('T')[0]}"


def _number(value: float | None) -> str:
    """A figure of a manifest, where null stands for a figure that is not finite."""
    return "not finite" if value is None else f"{value:.3f}"


def _opens_as(manifest: "CheckpointManifest") -> str:
    """Whether the checkpoint needs drot to be opened, and what for."""
    from drot.manifest.manifest import Manifest

    if manifest.finetune and manifest.finetune[-1].settings.keep_adapter:
        return f"an adapter for peft on top of {manifest.finetune[-1].start}"
    if manifest.stock_architecture:
        return "stock architecture"
    rotated = isinstance(manifest, Manifest) and manifest.recipe.rotation.mode == "layer"
    needs = ["packed 2:4 weights"] * (manifest.format == "packed") + ["boundary rotations"] * rotated
    return f"a model that needs drot ({', '.join(needs)})"


def _kept_weights_line(recipe: Recipe) -> str:
    """How the kept weights are computed and recovered."""
    pruning, recovery = recipe.pruning, recipe.recovery
    solved = f"solved by {pruning.solve}"
    parts = [f"as {pruning.method} leaves them" if pruning.solve == "none" else solved]
    if pruning.target == "dense":
        parts.append(f"target dense, weight {pruning.target_weight:g}")
    if recovery.recover == "block":
        epochs, lr = recovery.recover_epochs, recovery.recover_lr
        parts.append(f"recovered by block, up to {epochs} epochs, lr {lr:g}")
    return ", ".join(parts)


def _calibration_line(manifest: "Manifest") -> str:
    """The calibration text and the sequences that were cut from it."""
    settings, (nsamples, seqlen) = manifest.recipe.calibration, manifest.calibration.shape
    if nsamples == 0:
        return "none: magnitude pruning without a rotation needs no text"
    whole = " (all that the model reads)" if seqlen == manifest.positions else ""
    return f"{settings.source}, {nsamples} x {seqlen} tokens{whole}, seed {settings.seed}"


def _rotation_line(manifest: "Manifest") -> str:
    """The rotation settings, or the file from which the rotations came."""
    rotation, file = manifest.recipe.rotation, manifest.rotations_file
    if rotation.mode == "none":
        return "none"
    blocks = list(rotation.blocks) if isinstance(rotation.blocks, tuple) else rotation.blocks
    kind = rotation.mode if blocks == 1 else f"{rotation.mode}, blocks {blocks}"
    if rotation.boundary == "residual":
        kind += ", boundary on the residual"
    if file is not None:
        return f"{kind}, from {file.file}"
    training = f"{rotation.steps} steps of {rotation.optimizer}, lr {rotation.lr:g}"
    hessians = ", dense Hessians" if rotation.hessians == "dense" else ""
    return f"{kind}, objective {rotation.objective}, {training}{hessians}"


def _shared_line(manifest: "Manifest", trained: "SharedRotationRecord") -> str:
    """The figures of the only training of `mode="shared"`, as means over the layers."""
    layers = len(manifest.layers)
    loss = _change(trained.loss_before / layers, trained.loss_after / layers)
    entropy = _change(trained.entropy_before, trained.entropy_after)
    objective = manifest.recipe.rotation.objective
    shown = f"entropy {entropy}" if objective == "entropy" else f"loss {loss}, entropy {entropy}"
    return f"{len(trained.loss_curve) - 1} steps, {shown} a layer"


def _layer_cells(layer: "LayerRecord") -> dict[str, str]:
    """Heading → text of a layer's row; "-" if there is no figure. Means over the linears of the layer."""
    trained, recovery, linears = layer.rotation, layer.recovery, layer.linears.values()
    errors = [linear.output_error for linear in linears if linear.output_error is not None]
    return {
        "layer": str(layer.layer),
        "loss": _change(trained.loss_before, trained.loss_after) if trained else "-",
        "entropy": _change(trained.entropy_before, trained.entropy_after) if trained else "-",
        "sparsity": f"{statistics.fmean(linear.sparsity for linear in linears):.1%}",
        "output error": f"{statistics.fmean(errors):.4f}" if errors else "-",
        "recovery": _change(recovery.error_before, recovery.error_after) if recovery else "-",
        "seconds": f"{layer.seconds:.1f}",
    }


def _change(before: float, after: float) -> str:
    return f"{_short(before)} -> {_short(after)}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
