"""The command `drot info`: its options and the table of the machine."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from drot.cli.options import OUTPUT, RUN, Json, option, print_json
from drot.cli.tables import output, print_line, print_manifest, scaled
from drot.core.checks import path_exists
from drot.core.errors import UserError

EPILOG = "Example: drot info llama-2of4"


def info(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="A checkpoint that drot wrote.")
    ] = None,
    verify: Annotated[
        bool,
        option(
            OUTPUT,
            "Compare the files of FOLDER with their SHA-256, which drot recorded, and name each file that "
            "differs. FOLDER may also be the .partial folder of an unfinished run.",
            "--verify",
        ),
    ] = False,
    accept: Annotated[
        bool,
        option(
            OUTPUT,
            "Record the files of FOLDER as they are now. For a checkpoint that you have changed on purpose.",
            "--accept",
        ),
    ] = False,
    measure: Annotated[
        bool,
        option(
            RUN,
            "Measure matrix products and a copy on --device, in a few seconds, and keep the rates in the "
            "tuning cache. drot prune --dry-run estimates a run with them.",
            "--measure",
        ),
    ] = False,
    device: Annotated[
        str,
        option(
            RUN,
            "Device to measure. auto is the first GPU, or the CPU if there is no GPU.",
            metavar="[auto|cpu|cuda:N]",
            autocompletion=lambda: ["auto", "cpu", "cuda"],
        ),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Show the versions, backends and GPUs of this machine; or, with FOLDER, how that model was made."""
    if folder is None and (verify or accept):
        raise UserError(f"{'`verify`' if verify else '`accept`'} needs FOLDER: name a folder that drot wrote")
    if folder is None:
        if measure:
            _measure(device)
        _show_machine(as_json)
        return
    if measure:
        raise UserError("`measure` measures this machine: leave out FOLDER")
    if not path_exists(folder) or not folder.is_dir():
        reason = "is a file" if path_exists(folder) else "does not exist"
        raise UserError(f"{folder} {reason}: name the folder that drot prune wrote")
    from drot.manifest.manifest import accept_files, read_any_manifest

    if accept:
        print_line(f"{len(accept_files(folder).files)} files in {folder} are recorded as they are now")
    if verify:
        _verify(folder, as_json)
    elif not accept:
        manifest = read_any_manifest(folder)
        if as_json:
            print_json(manifest.to_dict())
        else:
            print_manifest(manifest)


def _measure(name: str) -> None:
    """Measures a device and keeps its rates. Raises UserError if they cannot be kept."""
    from drot.machine.devices import pick_device
    from drot.machine.environment import store_peaks
    from drot.speed.peaks import measure_peaks

    device = pick_device(name)
    if not store_peaks(device, measure_peaks(device)):
        raise UserError(
            "the rates cannot be kept, as the tuning cache cannot be written: name a folder in DROT_CACHE"
        )


def _verify(folder: Path, as_json: bool) -> None:
    """Prints a line for each file that is not as drot wrote it. Raises UserError if a file is damaged."""
    from drot.checkpoint.verify import verify_folder

    found = verify_folder(folder)
    if as_json:
        print_json({"files": found.files, "damaged": found.damaged, "unknown": found.unknown})
    else:
        for name, problem in sorted(found.damaged.items()):
            print_line(f"{name} {problem}")
        for name in found.unknown:
            print_line(f"{name} is not listed in drot.json, and no model is loaded from it")
    if found.damaged:
        raise UserError(
            f"{len(found.damaged)} of {len(found.files)} files in {folder} are not as drot wrote them: copy "
            "them again"
        )
    if not as_json:
        print_line(f"{len(found.files)} files in {folder} are as drot wrote them")


def _show_machine(as_json: bool) -> None:
    """Prints one line for each key of `collect` that has a value."""
    from drot.machine.environment import collect

    data = collect()
    if as_json:
        print_json(data)
        return
    peaks = {device: [_rate(*item) for item in rates.items()] for device, rates in data["peaks"].items()}
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in (data | {"peaks": peaks}).items():
        if value is not None and (fact := _fact(value)):
            table.add_row(key.replace("_", " "), fact)
    output().print(table)


def _rate(kind: str, rate: float) -> str:
    """A peak rate with its name, as in `copy 25 GB/s`."""
    return f"{kind} {scaled(rate, 'B/s' if kind == 'copy' else 'FLOP/s')}"


def _fact(value: Any) -> str:
    """A JSON value as text; None and [] in a dict are left out."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(fact)}" for key, fact in value.items() if fact not in (None, []))
    if isinstance(value, list):
        return "; ".join(map(_fact, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
