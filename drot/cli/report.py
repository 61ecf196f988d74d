"""The command `drot report`: its options and the line that it prints."""

from pathlib import Path
from typing import Annotated

import typer

from drot.cli.options import OUTPUT, Json, option, print_json, stdout_for_the_result
from drot.cli.tables import print_line

EPILOG = "Example: drot report llama-2of4"


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders that drot prune wrote; several are compared."),
    ],
    out: Annotated[
        Path | None,
        option(
            OUTPUT,
            "File of the page. Default: report.html in FOLDER, or drot-report.html in the current folder for "
            "several.",
        ),
    ] = None,
    figures: Annotated[
        Path | None, option(OUTPUT, "Folder for every chart as .svg and .png. Default: none is written.")
    ] = None,
    linears: Annotated[
        list[str] | None,
        option(
            "Content",
            "Linears whose importance is drawn, as in 'layers.0.*' or q_proj. May be given more than once. "
            "Default: all, or those of three layers if there are more than 64.",
            metavar="PATTERN",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page with the figures of pruned models: what was lost, and what is unusual."""
    from drot.cli.progress_bars import progress_bar
    from drot.report.write import write_report

    with stdout_for_the_result(), progress_bar() as progress:
        written = write_report(folders, out=out, figures=figures, linears=linears or [], progress=progress)
    if as_json:
        charts = [str(file) for file in written.figures]
        print_json({"page": str(written.page), "figures": charts, "linears": written.linears})
        return
    print_line(f"Wrote {written.page}")
    if figures is not None:
        print_line(f"Wrote {len(written.figures)} files to {figures}")
