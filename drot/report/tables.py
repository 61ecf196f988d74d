"""The tables of a report, as text."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drot.report.evaluations import Measured, tasks
from drot.report.reading import BASES, ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Run, final_error

NONE = "–"


@dataclass(frozen=True)
class Table:
    """caption: what it holds. headings: of the columns. rows: cells, the first of which names the row."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def lost_table(run: Run, measured: Sequence[Measured]) -> Table | None:
    """Perplexities, the share of the gap, agreement and accuracies; None without an evaluation."""
    rows = [
        [
            f"perplexity on {entry.text}, windows of {entry.seqlen}",
            number(entry.dense, ".3f"),
            number(entry.unrotated, ".3f"),
            number(entry.perplexity, ".3f"),
            number(entry.share, ".0%"),
        ]
        for entry in measured
    ]
    for entry in measured:
        if entry.agreement is not None:
            equal, kl = number(entry.agreement.equal_tokens, ".1%"), entry.agreement.kl
            divergence = f"{number(kl.mean, '.4f')} ({number(kl.p99, '.3f')})"
            text = entry.text
            rows.append([f"equal next tokens on {text}", "100.0%", NONE, equal, NONE])
            rows.append([f"KL divergence on {text}, mean (99th percentile)", "0", NONE, divergence, NONE])
    rows += [[task, NONE, NONE, number(value, ".2%"), NONE] for task, value in tasks(run).items()]
    if not rows:
        return None
    names = {entry.unrotated_name for entry in measured if entry.unrotated is not None}
    source = f" Not rotated: {', '.join(sorted(names))}." if names else ""
    caption = f"Won back is (not rotated - this run) / (not rotated - dense), in perplexities.{source}"
    headings = ["measure", "dense", "not rotated", "this run", "won back"]
    shown = [i for i in range(len(headings)) if i == 0 or any(row[i] != NONE for row in rows)]
    return Table(caption, [headings[i] for i in shown], [[row[i] for i in shown] for row in rows])


def comparison(runs: Sequence[Run], measured: Sequence[Sequence[Measured]]) -> Table:
    """A row for each figure, a column for each run."""
    rows: list[list[str]] = []

    def add(name: str, values: Iterable[object], form: str = "") -> None:
        cells = [number(value, form) for value in values]
        if any(cell != NONE for cell in cells):
            rows.append([name, *cells])

    recipes = [run.recipe for run in runs]
    add("method", [recipe.pruning.method for recipe in recipes])
    add("sparsity asked for", [str(recipe.pruning.sparsity) for recipe in recipes])
    add("rotation", [recipe.rotation.mode for recipe in recipes])
    # without a rotation nothing is trained, whatever objective the recipe names
    add("objective", [run.recipe.rotation.objective if run.rotated else None for run in runs])
    add("solver", [recipe.pruning.solve for recipe in recipes])
    add("recovery", [recipe.recovery.recover for recipe in recipes])
    add("zeros in the linears", [run.manifest.sparsity for run in runs], ".2%")
    by_text = [{(entry.text, entry.seqlen): entry for entry in entries} for entries in measured]
    for text, seqlen in dict.fromkeys(key for entries in by_text for key in entries):
        found = [entries.get((text, seqlen)) for entries in by_text]
        where = f"{text}, windows of {seqlen}"
        add(f"perplexity of the dense model, {where}", [entry and entry.dense for entry in found], ".3f")
        add(f"perplexity, {where}", [entry and entry.perplexity for entry in found], ".3f")
        add(f"won back, {where}", [entry and entry.share for entry in found], ".0%")
        agreements = [entry and entry.agreement for entry in found]
        add(f"equal next tokens, {text}", [a and a.equal_tokens for a in agreements], ".1%")
        add(f"mean KL divergence, {text}", [a and a.kl.mean for a in agreements], ".4f")
    scores = [tasks(run) for run in runs]
    for task in dict.fromkeys(task for score in scores for task in score):
        add(task, [score.get(task) for score in scores], ".2%")
    for basis, figure in zip(BASES, REMOVED_IMPORTANCE, strict=True):
        add(f"pruned importance {basis} the rotation", [run.mean(figure) for run in runs], ".2%")
    add("output error, mean", [run.mean(final_error) for run in runs], ".4f")
    add("seconds", [run.manifest.seconds.total for run in runs], ".1f")
    peaks = [list(run.manifest.peak_memory.values()) for run in runs]
    add("peak memory, GiB", [_largest(peak.process for peak in found) for found in peaks], ".2f")
    add("peak memory of the GPU, GiB", [_largest(peak.gpu for peak in found) for found in peaks], ".2f")
    return Table("Figures of each run; a dash stands for a figure that was not measured.",
                 ["figure", *(run.name for run in runs)], rows)  # fmt: skip


def layer_table(run: Run) -> Table:
    """A row for each layer."""
    rows = []
    for layer in run.manifest.layers:
        trained, recovery = layer.rotation, layer.recovery
        errors = [e for linear in layer.linears.values() if (e := linear.output_error) is not None]
        rows.append(
            [
                str(layer.layer),
                change(trained.loss_before, trained.loss_after) if trained else NONE,
                change(trained.entropy_before, trained.entropy_after) if trained else NONE,
                number(statistics.fmean(errors) if errors else None, ".4f"),
                change(recovery.error_before, recovery.error_after) if recovery else NONE,
                number(layer.seconds, ".1f"),
            ]
        )
    headings = ["layer", "loss", "entropy", "output error", "recovery", "seconds"]
    return Table("Layers: before → after", headings, rows)


def linear_table(run: Run) -> Table:
    """A row for each linear that was pruned."""
    rows = []
    for layer, role, linear in run.pruned():
        rows.append(
            [
                f"{layer} {role}",
                f"{linear.sparsity:.1%}",
                change(*(figure(linear) for figure in REMOVED_IMPORTANCE), form=".2%"),
                change(*(figure(linear) for figure in ONE_SHOT_ERROR), form=".4f"),
                number(linear.output_error, ".4f"),
                number(linear.damping, "g"),
            ]
        )
    headings = ["linear", "zeros", "pruned importance", "one-shot error", "output error", "damping"]
    return Table("Linears: before → after the rotation", headings, rows)


def recipe_table(run: Run) -> Table:
    """Every setting of the recipe."""
    rows = [
        [f"{part} {name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)]
        for part, settings in run.recipe.to_dict().items()
        for name, value in settings.items()
    ]
    return Table("Recipe", ["setting", "value"], rows)


def machine_table(run: Run) -> Table:
    """Model, versions, device, calibration and time."""
    manifest = run.manifest
    rows = [["model", manifest.base_model]]
    rows += [[name, str(version)] for name, version in manifest.versions.items()]
    rows += [["device", manifest.device], ["dtype", manifest.dtype]]
    rows.append(["calibration", " × ".join(map(str, manifest.calibration.shape)) + " tokens"])
    rows.append(["SHA-256 of the calibration", manifest.calibration.sha256])
    if (error := manifest.relative_logit_error) is not None:
        rows.append(["relative logit error of the rotation", f"{error:.1e}"])
    seconds = {**manifest.seconds.phases, "total": manifest.seconds.total}
    rows += [[f"seconds, {phase}", f"{value:.1f}"] for phase, value in seconds.items()]
    return Table("Model, versions and machine", ["fact", "value"], rows)


def number(value: object, form: str) -> str:
    """A value in a format; a dash for None."""
    return NONE if value is None else format(value, form)


def change(before: float | None, after: float | None, *, form: str = ".4g") -> str:
    """'0.4 → 0.2'; one value alone, or a dash."""
    if before is None or after is None:
        return number(before if after is None else after, form)
    return f"{number(before, form)} → {number(after, form)}"


def _largest(peaks: Iterable[int | None]) -> float | None:
    """The largest of `peaks`, in bytes, in GiB."""
    return max((peak / 2**30 for peak in peaks if peak is not None), default=None)
