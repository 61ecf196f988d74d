"""The tables of a report: those of `drot info`, and what only a page has room for."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from drot.manifest.records import LinearRecord
from drot.manifest.tables import NONE, Table, change, facts, layers_table, number, short, times_table
from drot.reporting.runs import BASES, ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Measured, Run, final_error, tasks


def run_tables(run: Run) -> list[Table]:
    """Everything about one run but its evaluations."""
    manifest = run.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    more = [("SHA-256 of the calibration", manifest.calibration.sha256), ("versions", versions)]
    about = [{"fact": name, "value": value} for name, value in [*facts(manifest), *more]]
    settings = [
        {
            "setting": f"{part} {name}",
            "value": _setting(name, value),
        }
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


def lost_table(run: Run, measured: Sequence[Measured]) -> Table | None:
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
    names = {entry.unrotated_name for entry in measured if entry.unrotated is not None}
    source = f" Not rotated: {', '.join(sorted(names))}." if names else ""
    caption = "Measured by drot eval."
    if any(entry.share is not None for entry in measured):
        caption = f"Gap closed: (not rotated - this run) / (not rotated - dense), in perplexities.{source}"
    return Table(caption, rows) if rows else None


def comparison(runs: Sequence[Run], measured: Sequence[Sequence[Measured]]) -> Table:
    """A row for each figure, a column for each run."""
    rows: list[dict[str, str]] = []
    best: dict[str, list[str]] = {}

    def add(name: str, values: Iterable[Any], form: str = "", pick: Callable[..., Any] | None = None) -> None:
        """Adds a row. pick: `min` or `max`, if the figure can be the best."""
        known = {run.name: value for run, value in zip(runs, values, strict=True) if value is not None}
        if not known:
            return
        rows.append({"figure": name} | {run.name: number(known.get(run.name), form) for run in runs})
        if pick is not None and len(set(known.values())) > 1:
            best[name] = [run for run, value in known.items() if value == pick(known.values())]

    recipes = [run.recipe for run in runs]
    add("method", [recipe.pruning.method for recipe in recipes])
    add("sparsity asked for", [str(recipe.pruning.sparsity) for recipe in recipes])
    add("rotation", [recipe.rotation.mode for recipe in recipes])
    add("blocks of R3", [recipe.rotation.down_block for recipe in recipes])
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
        add(f"perplexity, {where}", [entry and entry.perplexity for entry in found], ".3f", min)
        add(f"gap closed, {where}", [entry and entry.share for entry in found], ".0%", max)
        agreements = [entry and entry.agreement for entry in found]
        add(f"equal next tokens, {text}", [a and a.equal_tokens for a in agreements], ".1%", max)
        add(f"mean KL divergence, {text}", [a and a.kl.mean for a in agreements], ".4f", min)
    scores = [tasks(run) for run in runs]
    for task in dict.fromkeys(task for score in scores for task in score):
        add(task, [score.get(task) for score in scores], ".2%", max)
    for basis, figure in zip(BASES, REMOVED_IMPORTANCE, strict=True):
        add(f"pruned importance {basis} the rotation", [run.mean(figure) for run in runs], ".2%")
    add("output error, mean", [run.mean(final_error) for run in runs], ".4f", min)
    add("seconds", [run.manifest.seconds.total for run in runs], ".1f", min)
    peaks = [list(run.manifest.peak_memory.values()) for run in runs]
    add("peak memory, GiB", [_largest(peak.process for peak in found) for found in peaks], ".2f")
    add("peak memory of the GPU, GiB", [_largest(peak.gpu for peak in found) for found in peaks], ".2f")
    caption = f"Figures of each run. Bold is the best of a row; {NONE} is a figure that was not measured."
    return Table(caption, rows, best)


def _largest(peaks: Iterable[int | None]) -> float | None:
    """The largest of `peaks`, in bytes, in GiB."""
    return max((peak / 2**30 for peak in peaks if peak is not None), default=None)
