"""The command `drot apply`: its options, and what it prints."""

from pathlib import Path
from typing import Annotated

import typer

from drot.cli.options import OUTPUT, Json, option, print_json, stdout_for_the_result
from drot.cli.tables import print_line

EPILOG = "Example: drot apply llama-2of4.drot --out llama-2of4"


def apply(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A file that drot export wrote.")],
    *,
    out: Annotated[Path, option(OUTPUT, "Folder to write. It must be new or empty.")],
    model: Annotated[
        str | None,
        option(
            "Source",
            "The dense model: a name on the Hugging Face hub, or a local folder. Its weights must be those "
            "with which ARTIFACT was made. Default: the name in ARTIFACT.",
            metavar="MODEL",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the checkpoint from which ARTIFACT was exported, byte for byte, with the dense MODEL."""
    from drot.artifact.apply import apply_artifact
    from drot.cli.progress_bars import progress_bar

    with stdout_for_the_result(), progress_bar() as progress:
        result = apply_artifact(artifact, out, model=model, progress=progress)
    if as_json:
        print_json({"out": str(out), **result})
    else:
        print_line(f"All {len(result['files'])} files have the hashes of the artifact")
        print_line(f"Saved to {out}")
