"""The command `drot compare`, and its table."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from drot.checkpoint.tables import Table, number, text_names
from drot.cli.evaluate import print_texts
from drot.cli.output import print_json, print_line, print_table
from drot.cli.progress_bars import working

if TYPE_CHECKING:
    from drot.reporting.compare import Comparison


def compare(
    folder: Path,
    model: str | None = None,
    ppl: list[str] | None = None,
    seqlen: int | None = None,
    text_column: str = "text",
    device: str = "auto",
    dtype: str = "auto",
    no_record: bool = False,
    as_json: bool = False,
) -> None:
    """Compare a pruned model with its dense original, and with models pruned without the rotation.

    The dense model is pruned again without a rotation: by the method of DIR alone, and with its solver and
    its training of the kept weights. That takes a part of the time of the run that made DIR. drot report and
    drot info show the figures too.

    Example: drot compare llama-2of4 --ppl wikitext2

    Arguments:
        folder DIR: A checkpoint that drot prune wrote.
    Measures:
        model MODEL: The dense model from which DIR was made: a name on the Hugging Face hub, or a local
            folder. Default: the model that drot.json names.
        ppl [ORG/NAME|PATH]: Text for the perplexity, as in drot eval. It may be given several times. Default:
            wikitext2.
        seqlen:
        text_column:
    Run:
        device:
        dtype:
    Output:
        no_record: Leave drot.json as it is.
        as_json:
    """
    from drot.reporting import compare as comparing

    with working() as progress:
        found = comparing.compare(
            folder,
            ppl=ppl or ["wikitext2"],
            model=model,
            seqlen=seqlen,
            text_column=text_column,
            device=device,
            dtype=dtype,
            record=not no_record,
            progress=progress,
        )
    if as_json:
        print_json(found)
        return
    print_comparison(folder, found)
    if not no_record and os.access(folder, os.W_OK):
        print_line(f"drot report {shlex.quote(str(folder))} shows these figures in a page")


def print_comparison(folder: Path, comparison: "Comparison") -> None:
    """Prints a row for each model, and how all of them were measured."""
    table, names = [], text_names(list(comparison.models[0].perplexity))
    for row in comparison.models:
        cells = {"model": row.name}
        for text, value in row.perplexity.items():
            cells[f"perplexity on {names[text]}"] = f"{value:.3f}"
            cells[f"gap closed on {names[text]}"] = number(row.gap_closed[text], ".0%")
        cells |= {"sparsity": f"{row.sparsity:.0%}", "seconds": number(row.seconds, ".1f")}
        table.append(cells)
    print_table(Table(f"{folder} and its baselines", table))
    print_texts(comparison.figures)
