"""The command `drot report`."""

from pathlib import Path

from drot.cli.output import print_json, print_line
from drot.cli.progress_bars import working


def report(
    folder: Path, out: Path | None = None, linears: list[str] | None = None, as_json: bool = False
) -> None:
    """Write a page with the figures of a pruned model: what was lost, and what is unusual.

    Example: drot report llama-2of4

    Arguments:
        folder DIR: A folder that drot prune wrote.
    Output:
        out: File of the page. Default: report.html in DIR.
        as_json:
    Content:
        linears PATTERN: Linears whose importance is drawn, as in 'layers.0.*' or q_proj. May be given more
            than once. '*' draws all, a quarter of a second each. Default: all, or those of the layer where
            the rotation does best if there are more than 14.
    """
    from drot.reporting import write

    with working() as progress:
        written = write.report(folder, out=out, linears=linears or [], progress=progress)
    if as_json:
        print_json({"page": written.page, "linears": written.linears})
    else:
        print_line(f"Wrote {written.page}")
