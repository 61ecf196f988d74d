"""The command `drot report`."""

from pathlib import Path

from drot.cli.output import print_json, print_line
from drot.cli.progress_bars import working


def report(
    folders: list[Path],
    out: Path | None = None,
    figures: Path | None = None,
    linears: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Write a page with the figures of pruned models: what was lost, and what is unusual.

    Example: drot report llama-2of4

    Arguments:
        folders FOLDER...: Folders that drot prune wrote; several are compared.
    Output:
        out: File of the page. Default: report.html in FOLDER, or drot-report.html in the current folder for
            several.
        figures: Folder for every chart as .svg and .png. Default: none is written.
        as_json:
    Content:
        linears PATTERN: Linears whose importance is drawn, as in 'layers.0.*' or q_proj. May be given more
            than once. '*' draws all, a quarter of a second each. Default: all, or those of the layers where
            the rotation does best and worst if there are more than 14.
    """
    from drot.reporting import write

    with working() as progress:
        written = write.report(folders, out=out, figures=figures, linears=linears or [], progress=progress)
    if as_json:
        print_json({"page": written.page, "figures": written.figures, "linears": written.linears})
        return
    print_line(f"Wrote {written.page}")
    if figures is not None:
        print_line(f"Wrote {len(written.figures)} files to {figures}")
