"""The command `drot apply`."""

from pathlib import Path

from drot.cli.output import print_json, print_line
from drot.cli.progress_bars import working


def apply(artifact: Path, out: Path, model: str | None = None, as_json: bool = False) -> None:
    """Make the checkpoint from which ARTIFACT was exported, byte for byte, with the dense MODEL.

    Example: drot apply llama-2of4.drot --out llama-2of4

    Arguments:
        artifact ARTIFACT: A file that drot export wrote.
    Output:
        out:
        as_json:
    Source:
        model MODEL: The dense model: a name on the Hugging Face hub, or a local folder. Its weights must be
            those with which ARTIFACT was made. Default: the name in ARTIFACT.
    """
    from drot.checkpoint.artifact.apply import apply_artifact

    with working() as progress:
        result = apply_artifact(artifact, out, model=model, progress=progress)
    if as_json:
        print_json({"out": out, **result})
    else:
        print_line(f"All {len(result['files'])} files have the hashes of the artifact")
        print_line(f"Saved to {out}")
