"""The command `drot convert`."""

import shlex
from pathlib import Path

from drot.cli.output import print_json, print_line, saved_line
from drot.cli.progress_bars import working


def convert(model: str, out: Path, format: str, as_json: bool = False) -> None:
    """Copy MODEL to a new folder with its 2:4 weights packed, or with its packed weights dense.

    Example: drot convert llama-2of4-dense --out llama-2of4-packed --format packed

    Arguments:
        model MODEL: A model with 2:4 weights: a name on the Hugging Face hub, or a local folder.
    Output:
        out:
        format:
        as_json:
    """
    from drot.checkpoint import convert as conversion
    from drot.checkpoint.disk_space import weight_file_bytes

    with working():
        manifest = conversion.convert(model, out, format)
    if as_json:
        sizes = {"before": weight_file_bytes(model), "after": weight_file_bytes(out)}
        print_json({"out": out, "weight_bytes": sizes, **(manifest.to_dict() if manifest else {})})
    else:
        print_line(saved_line(model, out))
        if format == "packed":
            serve = f"drot serve {shlex.quote(str(out))}"
            print_line("Next:")
            print_line(f"  {serve}  # an OpenAI-compatible server; drot chat talks to the model")
