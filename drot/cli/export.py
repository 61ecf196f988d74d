"""The command `drot export`: its options, and the sizes that it prints."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from drot.cli.options import OUTPUT, Json, option, print_json, stdout_for_the_result
from drot.cli.tables import number_table, output, print_line

EPILOG = "Example: drot export llama-2of4 --out llama-2of4.drot --rotations rotations.safetensors"
#: part of an artifact → what it is
PARTS = {
    "rotations": "rotations",
    "mask": "masks",
    "positions": "positions of the packed weights",
    "difference": "changes of the kept weights",
    "unsure": "weights that another machine may round differently",
    "files": "config, tokenizer, manifest and card",
}


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint that drot prune wrote, dense or packed.")
    ],
    *,
    out: Annotated[Path, option(OUTPUT, "File to write. It must be new.")],
    model: Annotated[
        str | None,
        option(
            "Source",
            "The dense model from which DIR was made: a name on the Hugging Face hub, or a local folder. "
            "Default: the model that drot.json names.",
            metavar="MODEL",
        ),
    ] = None,
    rotations: Annotated[
        Path | None,
        option("Source", "The file that --save-rotations wrote in the run that made DIR, if DIR is rotated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write what DIR has beyond the dense MODEL as one small file, from which drot apply makes DIR again.

    The file holds rotations, masks and changes of the kept weights. Nobody gets the model from it without
    MODEL.
    """
    from drot.artifact.export import export_artifact
    from drot.cli.progress_bars import progress_bar

    with stdout_for_the_result(), progress_bar() as progress:
        result = export_artifact(folder, out, model=model, rotations=rotations, progress=progress)
    if as_json:
        print_json({"out": str(out), **result})
        return
    print_sizes(result)
    print_line(f"Saved to {out}")


def print_sizes(result: dict[str, Any]) -> None:
    """Prints what takes how many bytes of an artifact."""
    table = number_table("part", "MB")
    parts: Counter[str] = Counter()
    for name, size in result["parts"].items():
        parts[PARTS.get(name, "index")] += size
    for name, size in parts.most_common():
        table.add_row(name, f"{size / 1e6:.2f}")
    table.add_section()
    share = result["bytes"] / result["checkpoint_bytes"]
    table.add_row(f"artifact ({share:.0%} of the checkpoint)", f"{result['bytes'] / 1e6:.2f}")
    output().print(table)
