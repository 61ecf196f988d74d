"""`drot prune --sensitivity`: measures output errors and prints them as tables."""

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from drot.cli.options import print_json, stdout_for_the_result
from drot.cli.recipe import progress_of
from drot.cli.tables import output, print_line
from drot.config import Recipe

if TYPE_CHECKING:
    from drot.pipeline.sensitivity import SensitivityResult

#: linears that the last line names
NAMED = 3


def print_sensitivity(result: "SensitivityResult") -> None:
    """Prints a table for each sparsity, with a row for each layer, and a line that says what to do."""
    console = output()
    for sparsity in result.sparsities:
        console.print(_table(result, sparsity))
    print_line(advice(result))


def _table(result: "SensitivityResult", sparsity: str) -> Table:
    """Layer × linear → output error at `sparsity`, with the mean of the layers. A star marks the largest."""
    # the last part of a name such as layers.0.mlp.up_proj is the linear, the second is the layer
    errors = {
        (name.split(".")[1], name.rpartition(".")[2]): row[sparsity] for name, row in result.errors.items()
    }
    layers, linears = (list(dict.fromkeys(key[part] for key in errors)) for part in (0, 1))
    largest = max((error for error in errors.values() if error is not None), default=None)
    table = Table(title=f"Output error at {sparsity}", title_justify="left")
    table.add_column("layer", justify="right")
    for linear in linears:
        table.add_column(linear, justify="right", no_wrap=True)
    for layer in layers:
        row = [errors[layer, linear] for linear in linears]
        table.add_row(
            layer,
            *("-" if e is None else Text(f"{e:.4f}*", "bold") if e == largest else f"{e:.4f}" for e in row),
            end_section=layer == layers[-1],
        )
    means = []
    for linear in linears:
        known = [error for layer in layers if (error := errors[layer, linear]) is not None]
        means.append(f"{sum(known) / len(known):.4f}" if known else "-")
    table.add_row("mean", *means)
    return table


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

    Args:
        model: name on the hub or folder of the model.
        recipe: the settings.
        as_json: whether to print JSON.
        options: further arguments of `drot.sensitivity`.
    """
    from drot.pipeline import sensitivity

    with stdout_for_the_result(), progress_of(recipe) as progress:
        result = sensitivity.sensitivity(model, recipe, progress=progress, **options)
    if as_json:
        print_json(result.to_dict())
    else:
        print_sensitivity(result)
