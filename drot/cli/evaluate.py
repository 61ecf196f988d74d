"""`drot eval`: its options and its table."""

from typing import Annotated, Any

import typer
from rich.table import Table

from drot.cli.options import Device, Dtype, Json, TextColumn, option, print_json, stdout_for_the_result
from drot.cli.tables import output
from drot.config import CalibrationConfig

DEFAULTS = CalibrationConfig()

EPILOG = "Example: drot eval llama-2of4 --ppl wikitext2 --tasks piqa,winogrande"


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Name on the Hugging Face hub, or a local folder; dense or pruned by drot."
        ),
    ],
    ppl: Annotated[
        list[str] | None,
        option(
            "Measures",
            "Text for the perplexity: wikitext2 (its test split) or a text file. May be repeated.",
            metavar="[wikitext2|PATH]",
        ),
    ] = None,
    seqlen: Annotated[int, option("Measures", "Tokens in a window of the perplexity.")] = DEFAULTS.seqlen,
    tasks: Annotated[
        str,
        option("Measures", "Zero-shot tasks of lm_eval, separated by commas: piqa,winogrande,…"),
    ] = "",
    text_column: TextColumn = DEFAULTS.text_column,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure MODEL: perplexity (on wikitext2 unless you name a text or tasks) and zero-shot accuracy."""
    from drot.cli.progress_bars import progress_bar
    from drot.evaluation import evaluate as evaluation

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with stdout_for_the_result(), progress_bar() as progress:
        figures = evaluation.evaluate(
            model,
            ppl=ppl or ([] if names else ["wikitext2"]),
            tasks=names,
            seqlen=seqlen,
            text_column=text_column,
            device=device,
            dtype=dtype,
            progress=progress,
        )
    if as_json:
        print_json(figures)
    else:
        print_figures(figures)


def print_figures(figures: dict[str, Any]) -> None:
    """Perplexities and accuracies of `drot eval`."""
    table = Table("measure", title=str(figures["model"]), title_justify="left")
    table.add_column("value", justify="right")
    for source, value in figures["perplexity"].items():
        table.add_row(f"perplexity on {source}, windows of {figures['seqlen']}", f"{value:.3f}")
    for task, accuracy in figures["tasks"].items():
        table.add_row(task, f"{accuracy:.2%}")
    output().print(table)
