"""The tables of a report: those of `drot info`, and what only a page has room for."""

from collections.abc import Sequence

from drot.checkpoint.records import LinearRecord
from drot.checkpoint.tables import Table, change, facts, layers_table, number, short, times_table
from drot.reporting.runs import ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Run, TextEvaluation, tasks


def run_tables(run: Run) -> list[Table]:
    """Everything about one run but its evaluations."""
    manifest = run.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    more = [("SHA-256 of the calibration", manifest.calibration.sha256), ("versions", versions)]
    about = [{"fact": name, "value": value} for name, value in [*facts(manifest), *more]]
    settings = [
        {"setting": f"{part} {name}", "value": _setting(name, value)}
        for part, fields in run.recipe.to_dict().items()
        for name, value in fields.items()
    ]
    return [
        Table("Model and run", about),
        layers_table(manifest),
        Table("Linears: before → after the rotation", [linear_row(*found) for found in run.pruned()]),
        times_table(manifest),
        Table("Recipe", settings),
    ]


def _setting(name: str, value: object) -> str:
    """A value of the recipe as text; of a file its name alone."""
    text = ", ".join(map(str, value if isinstance(value, list) else [value]))
    return short(text) if name == "source" else text


def linear_row(layer: int, role: str, linear: LinearRecord) -> dict[str, str]:
    """The figures of a linear that was pruned."""
    importance, error = ([figure(linear) for figure in both] for both in (REMOVED_IMPORTANCE, ONE_SHOT_ERROR))
    return {
        "linear": f"{layer} {role}",
        "zeros": f"{linear.sparsity:.1%}",
        "pruned importance": change(*importance, form=".2%"),
        "one-shot error": change(*error, form=".4f"),
        "output error": number(linear.output_error, ".4f"),
        "damping": number(linear.damping, "g"),
    }


def lost_table(run: Run, measured: Sequence[TextEvaluation]) -> Table | None:
    """Perplexities, the share of the gap, agreement and accuracies; None without an evaluation."""
    rows = [
        {
            "measure": f"perplexity on {entry.text}, windows of {entry.seqlen}",
            "dense": number(entry.dense, ".3f"),
            "not rotated": number(entry.unrotated, ".3f"),
            "solver alone": number(entry.solver, ".3f"),
            "this run": number(entry.perplexity, ".3f"),
            "gap closed": number(entry.share, ".0%"),
        }
        for entry in measured
    ]
    for entry in measured:
        if (agreement := entry.agreement) is not None:
            equal, kl = f"{agreement.equal_tokens:.1%}", agreement.kl
            divergence = f"{number(kl.mean, '.4f')} ({number(kl.p99, '.3f')})"
            measure = f"KL divergence on {entry.text}, mean (99th percentile)"
            rows.append(
                {"measure": f"equal next tokens on {entry.text}", "dense": "100.0%", "this run": equal}
            )
            rows.append({"measure": measure, "dense": "0", "this run": divergence})
    rows += [{"measure": task, "this run": f"{value:.2%}"} for task, value in tasks(run).items()]
    caption = "Measured by drot eval."
    if any(entry.share is not None for entry in measured):
        caption = "Gap closed: (not rotated - this run) / (not rotated - dense), in perplexities."
    return Table(caption, rows) if rows else None
