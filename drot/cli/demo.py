"""The command `drot demo`."""

from pathlib import Path

import typer

from drot.cli.compare import print_comparison
from drot.cli.output import output, print_json, print_line
from drot.cli.progress_bars import working


def demo(out: Path = Path("demo-output"), as_json: bool = False) -> None:
    """Prune a small model that comes with drot to 2:4, without and with solver and rotation, and compare.

    Example: drot demo --out demo-output && drot info demo-output

    Output:
        out:
        as_json:
    """
    from drot.reporting.demo import run_demo
    from drot.reporting.drawing import PACKAGE

    with working() as progress:
        result = run_demo(out, progress=progress)
    if as_json:
        print_json(vars(result) | {"out": out})
    else:
        print_comparison(out, result.comparison)
        output().print(result.sentence)
        print_line(f"Saved to {out}")
        if result.report is None:
            print_line(f"The report is left out: it needs matplotlib (pip install '{PACKAGE}')")
        else:
            print_line(f"Open {result.report} for charts of the run")
    if not result.rotation_helped:
        raise typer.Exit(1)
