"""The command `drot export`."""

from pathlib import Path

from rich.filesize import decimal as size_text

from drot.cli.output import print_json, print_line
from drot.cli.progress_bars import working


def export(
    folder: Path,
    out: Path,
    model: str | None = None,
    rotations: Path | None = None,
    as_json: bool = False,
) -> None:
    """Write what DIR has beyond the dense MODEL as one small file, from which drot apply makes DIR again.

    The file holds rotations, masks and changes of the kept weights. Nobody gets the model from it without
    MODEL.

    Example: drot export llama-2of4 --out llama-2of4.drot

    Arguments:
        folder DIR: A checkpoint that drot prune wrote, dense or packed.
    Output:
        out: File to write. It must be new. DIR is made from it once beside it, to compare the hashes.
        as_json:
    Source:
        model MODEL: The dense model from which DIR was made: a name on the Hugging Face hub, or a local
            folder. Default: the model that drot.json names.
        rotations: The file that --save-rotations wrote in the run that made DIR, if DIR is rotated. Default:
            the rotations are computed from DIR and MODEL, and the artifact is somewhat larger.
    """
    from drot.checkpoint.artifact.export import export_artifact

    with working() as progress:
        result = export_artifact(folder, out, model=model, rotations=rotations, progress=progress)
    if as_json:
        print_json({"out": out, **result})
    else:
        share = result["bytes"] / result["checkpoint_bytes"]
        print_line(f"Saved to {out}: {size_text(result['bytes'])}, {share:.0%} of the checkpoint")
