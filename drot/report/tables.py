"""The tables of a report, as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drot.report.evaluations import Measured, tasks
from drot.report.reading import Run, final_error, mean, one_shot

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
    for entry in (entry for entry in measured if entry.agreement):
        kl = entry.agreement.get("kl") or {}
        equal, p99 = number(entry.agreement.get("equal_tokens"), ".1%"), number(kl.get("p99"), ".3f")
        rows.append([f"equal next tokens on {entry.text}", "100.0%", NONE, equal, NONE])
        mean_kl = number(kl.get("mean"), ".4f")
        rows.append(
            [f"KL divergence on {entry.text}, mean (99th percentile)", "0", NONE, f"{mean_kl} ({p99})", NONE]
        )
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

    def add(name: str, values: Sequence[Any], form: str) -> None:
        if any(value is not None for value in values):
            rows.append([name, *(number(value, form) for value in values)])

    for name, part, key in (
        ("method", "pruning", "method"),
        ("sparsity asked for", "pruning", "sparsity"),
        ("rotation", "rotation", "mode"),
        ("solver", "pruning", "solve"),
        ("recovery", "recovery", "recover"),
    ):
        add(name, [run.recipe.get(part, {}).get(key) for run in runs], "")
        if name == "rotation":  # without a rotation nothing is trained, whatever objective the recipe names
            objectives = [run.recipe["rotation"]["objective"] if run.rotated else None for run in runs]
            add("objective", objectives, "")
    add("zeros in the linears", [run.manifest["sparsity"] for run in runs], ".2%")
    texts = dict.fromkeys((entry.text, entry.seqlen) for entries in measured for entry in entries)
    for text, seqlen in texts:
        found = [
            next((e for e in entries if (e.text, e.seqlen) == (text, seqlen)), None) for entries in measured
        ]
        for label, key, form in (
            ("perplexity of the dense model", "dense", ".3f"),
            ("perplexity", "perplexity", ".3f"),
            ("won back", "share", ".0%"),
        ):
            add(f"{label}, {text}, windows of {seqlen}", [e and getattr(e, key) for e in found], form)
        equal = [e and e.agreement.get("equal_tokens") for e in found]
        add(f"equal next tokens, {text}", equal, ".1%")
        add(
            f"mean KL divergence, {text}",
            [e and (e.agreement.get("kl") or {}).get("mean") for e in found],
            ".4f",
        )
    scores = [tasks(run) for run in runs]
    for task in dict.fromkeys(task for score in scores for task in score):
        add(task, [score.get(task) for score in scores], ".2%")
    for basis in ("before", "after"):
        shares = [mean(run, one_shot(basis, "removed_importance")) for run in runs]
        add(f"pruned importance {basis} the rotation", shares, ".2%")
    add("output error, mean", [mean(run, final_error) for run in runs], ".4f")
    add("seconds", [run.manifest["seconds"]["total"] for run in runs], ".1f")
    add("peak memory, GiB", [_largest(run, "process") for run in runs], ".2f")
    add("peak memory of the GPU, GiB", [_largest(run, "gpu") for run in runs], ".2f")
    return Table("Figures of each run; a dash stands for a figure that was not measured.",
                 ["figure", *(run.name for run in runs)], rows)  # fmt: skip


def layer_table(run: Run) -> Table:
    """A row for each layer."""
    rows = []
    for layer in run.layers:
        trained, recovery = layer.get("rotation", {}), layer.get("recovery") or {}
        rows.append(
            [
                str(layer["layer"]),
                change(trained.get("loss_before"), trained.get("loss_after")),
                change(trained.get("entropy_before"), trained.get("entropy_after")),
                _of_layer(layer, final_error),
                change(recovery.get("error_before"), recovery.get("error_after")),
                number(layer.get("seconds"), ".1f"),
            ]
        )
    headings = ["layer", "loss", "entropy", "output error", "recovery", "seconds"]
    return Table("Layers: before → after", headings, rows)


def linear_table(run: Run) -> Table:
    """A row for each linear that was pruned."""
    rows = []
    for layer, role, linear in run.pruned():
        share = [one_shot(basis, "removed_importance")(linear) for basis in ("before", "after")]
        error = [one_shot(basis, "output_error")(linear) for basis in ("before", "after")]
        rows.append(
            [
                f"{layer} {role}",
                f"{linear['sparsity']:.1%}",
                change(share[0], share[1], form=".2%"),
                change(error[0], error[1], form=".4f"),
                number(linear["output_error"], ".4f"),
                number(linear["damping"], "g"),
            ]
        )
    headings = ["linear", "zeros", "pruned importance", "one-shot error", "output error", "damping"]
    return Table("Linears: before → after the rotation", headings, rows)


def recipe_table(run: Run) -> Table:
    """Every setting of the recipe."""
    rows = [
        [f"{part} {name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)]
        for part, settings in run.recipe.items()
        for name, value in settings.items()
    ]
    return Table("Recipe", ["setting", "value"], rows)


def machine_table(run: Run) -> Table:
    """Model, versions, device, calibration and time."""
    manifest = run.manifest
    rows = [["model", str(manifest["base_model"])]]
    rows += [[name, str(version)] for name, version in manifest["versions"].items()]
    rows += [["device", str(manifest.get("device"))], ["dtype", str(manifest.get("dtype"))]]
    rows.append(["calibration", " × ".join(map(str, manifest["calibration"]["shape"])) + " tokens"])
    rows.append(["SHA-256 of the calibration", str(manifest["calibration"]["sha256"])])
    if (error := manifest.get("relative_logit_error")) is not None:
        rows.append(["relative logit error of the rotation", f"{error:.1e}"])
    rows += [[f"seconds, {phase}", f"{value:.1f}"] for phase, value in manifest["seconds"].items()]
    return Table("Model, versions and machine", ["fact", "value"], rows)


def number(value: Any, form: str) -> str:
    """A value in a format; a dash for None."""
    return NONE if value is None else format(value, form)


def change(before: float | None, after: float | None, *, form: str = ".4g") -> str:
    """'0.4 → 0.2'; one value alone, or a dash."""
    if before is None or after is None:
        return number(before if after is None else after, form)
    return f"{number(before, form)} → {number(after, form)}"


def _of_layer(layer: dict[str, Any], figure: Any) -> str:
    values = [value for linear in layer["linears"].values() if (value := figure(linear)) is not None]
    return f"{sum(values) / len(values):.4f}" if values else NONE


def _largest(run: Run, kind: str) -> float | None:
    peaks = [peak[kind] / 2**30 for peak in (run.manifest.get("peak_memory") or {}).values() if kind in peak]
    return max(peaks, default=None)
