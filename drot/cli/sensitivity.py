"""`drot prune --sensitivity`: measures output errors and prints them as tables."""

import statistics
from typing import TYPE_CHECKING, Any

from drot.checkpoint.tables import Table, number
from drot.cli.output import print_json, print_line, print_table
from drot.cli.progress_bars import working
from drot.config import Recipe

if TYPE_CHECKING:
    from drot.pipeline.sensitivity import SensitivityResult

#: linears that the last line names
NAMED = 3


def _table(result: "SensitivityResult", sparsity: str) -> Table:
    """Layer × linear → output error at `sparsity`, with the mean of the layers. A star marks the largest.

    Of experts, the largest error of a linear of this name is shown.
    """
    errors: dict[str, dict[str, float | None]] = {}
    for name, row in result.errors.items():  # layers.0.mlp.up_proj
        of_layer, linear = errors.setdefault(name.split(".")[1], {}), name.rpartition(".")[2]
        seen = [error for error in (of_layer.get(linear), row[sparsity]) if error is not None]
        of_layer[linear] = max(seen, default=None)
    known = [error for row in errors.values() for error in row.values() if error is not None]

    def cell(error: float | None) -> str:
        return number(error, ".4f") + "*" * (error is not None and error == max(known))

    linears = dict.fromkeys(linear for row in errors.values() for linear in row)  # layers may differ
    means = {}
    for linear in linears:
        found = [error for row in errors.values() if (error := row.get(linear)) is not None]
        means[linear] = number(statistics.fmean(found) if found else None, ".4f")
    rows = [{"layer": i} | {linear: cell(row.get(linear)) for linear in linears} for i, row in errors.items()]
    return Table(f"Output error at {sparsity} (* is the largest)", [*rows, {}, {"layer": "mean"} | means])


def advice(result: "SensitivityResult") -> str:
    """The linears whose error is largest at the sparsity of the recipe, and the options that lower it."""
    largest = result.largest(NAMED)
    if not largest:
        return "The recipe keeps all linears dense."
    shown = ", ".join(f"{name} {error:.4f} ({sparsity})" for name, sparsity, error in largest)
    name, _, error = largest[0]
    lower = {
        text: other for text, other in result.errors[name].items() if other is not None and other < error
    }
    best = min(lower, key=lambda text: lower[text], default=None)
    other = (
        ""
        if best is None
        else f', or give it another sparsity: --sparsity-of "{name}={best}" ({lower[best]:.4f})'
    )
    return f"Largest output error with this recipe: {shown}. Keep the first dense: --keep {name}{other}."


def show_sensitivity(model: str, recipe: Recipe, as_json: bool, **options: Any) -> None:
    """Measures the output errors of each linear, and prints them as tables or as JSON.

    options: further arguments of `drot.sensitivity`.
    """
    from drot.pipeline import sensitivity

    with working() as progress:
        result = sensitivity.sensitivity(model, recipe, progress=progress, **options)
    if as_json:
        print_json(result.to_dict())
        return
    for sparsity in result.sparsities:
        print_table(_table(result, sparsity), texts=0)
    print_line(advice(result))
