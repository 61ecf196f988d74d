"""The command `drot eval`: its options and its table."""

from typing import Annotated, Any

import typer
from rich.table import Table

from drot.cli.options import (
    COMPUTE_DTYPE,
    RUN,
    SEQLEN_DEFAULT,
    TEXT_COLUMN,
    Device,
    Json,
    option,
    print_json,
    stdout_for_the_result,
)
from drot.cli.tables import output
from drot.config import CalibrationConfig
from drot.devices import DTYPES

DEFAULTS = CalibrationConfig()

EPILOG = "Example: drot eval llama-2of4 --ppl wikitext2 --tasks piqa,winogrande"


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name on the Hugging Face hub, or a local folder. The model may be pruned by drot or not.",
        ),
    ],
    ppl: Annotated[
        list[str] | None,
        option(
            "Measures",
            "Text for the perplexity: wikitext2 (its test split); any dataset on the hub as org/name, "
            "org/name:split or org/name:config:split; or a .txt, .json, .jsonl or .parquet file. It may be "
            "given several times. Default without --tasks: wikitext2.",
            metavar="[ORG/NAME|PATH]",
        ),
    ] = None,
    seqlen: Annotated[
        int | None,
        option(
            "Measures",
            f"Length in tokens of the windows into which the text is cut. {SEQLEN_DEFAULT}",
        ),
    ] = None,
    tasks: Annotated[
        str,
        option(
            "Measures",
            "Zero-shot tasks of lm_eval, separated by commas, as in piqa,winogrande. Needs the package "
            "lm_eval.",
        ),
    ] = "",
    text_column: Annotated[str, option("Measures", TEXT_COLUMN)] = DEFAULTS.text_column,
    device: Device = "auto",
    dtype: Annotated[str, option(RUN, COMPUTE_DTYPE, choices=["auto", *DTYPES])] = "auto",
    as_json: Json = False,
) -> None:
    """Measure the perplexity of MODEL on texts and its accuracy in zero-shot tasks."""
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
    """Prints the table of perplexities and accuracies."""
    table = Table("measure", title=str(figures["model"]), title_justify="left")
    table.add_column("value", justify="right")
    for source, value in figures["perplexity"].items():
        table.add_row(f"perplexity on {source}, windows of {figures['seqlen']}", f"{value:.3f}")
    for task, accuracy in figures["tasks"].items():
        table.add_row(task, f"{accuracy:.2%}")
    output().print(table)
