"""A checkpoint compared with the hashes of its files, which its manifest records."""

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, Field

from drot.config.recipe_file import MANIFEST
from drot.core.errors import UserError
from drot.core.hashes import FileRecord, damage, file_record, in_threads, workers
from drot.core.reading import Entries, check_schema, read_json

#: what is wrong with a file that drot has not written, and that a model is loaded from
EXTRA = "is extra"
CONFIG_FILE = "config.json"
#: the command that records the files of a folder as they are
RECORD_ANEW = "drot info {} --accept"
#: what `drot report` writes into the folder unless it is told another file; no hash of it is recorded
REPORT = "report.html"
#: the files from which transformers loads the weights of a folder
LOADED_WEIGHTS = re.compile(r"(adapter_)?model[^/]*\.safetensors(\.index\.json)?")


def _stays_inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError("must be the path of a file below the folder")
    return name


#: path of a file below its folder → its hash
Files = dict[Annotated[str, AfterValidator(_stays_inside)], FileRecord]


class Recorded(Entries):
    """The entry of drot.json with the hash of every other file of the checkpoint."""

    files: Annotated[Files, Field(min_length=1)]


def recorded_files(folder: Path) -> Files:
    """The hashes in the manifest of the checkpoint `folder`, whose other entries may be damaged.

    Raises UserError for a manifest that cannot be read or holds no hashes.
    """
    file = folder / MANIFEST
    return check_schema(Recorded, read_json(file), str(file)).files


def folder_records(
    folder: Path, names: Iterable[str] | None = None, *, known: Mapping[str, FileRecord] | None = None
) -> Files:
    """The records of the files `names` in `folder`; None takes all files but the manifest.

    known: records of files that were hashed already, and are not hashed again.
    """
    chosen = files_in(folder) - {MANIFEST} if names is None else set(names)
    known = {name: record for name, record in (known or {}).items() if name in chosen}
    new = in_threads(lambda name: file_record(folder / name), sorted(chosen - known.keys()))
    return dict(sorted((new | known).items()))


def files_in(folder: Path) -> set[str]:
    """The paths of the files of a checkpoint: of all below `folder`, relative to it.

    The report and what lies in hidden folders, such as .git and the hub's .cache, are no part of it: programs
    change them at any time.
    """
    paths = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    hidden = {path for path in paths if any(part.startswith(".") for part in path.parent.parts)}
    return {path.as_posix() for path in paths - hidden} - {REPORT}


def differing_files(folder: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
    """File → what is wrong with it, for each of `files` that is damaged, and for weights not among them."""
    found = in_threads(lambda name: damage(folder / name, files[name]), sorted(files))
    problems = {name: problem for name, problem in found.items() if problem is not None}
    return problems | {name: EXTRA for name in files_in(folder) - set(files) if is_loaded(name)}


def is_loaded(name: str) -> bool:
    """Whether a model is made from the file `name` of its folder: from its weights and its config."""
    return name == CONFIG_FILE or LOADED_WEIGHTS.fullmatch(name) is not None


def check_config_file(folder: Path) -> None:
    """Raises UserError if config.json is not the file that the manifest of a checkpoint describes."""
    if (record := recorded_files(folder).get(CONFIG_FILE)) is not None:
        check_file(folder / CONFIG_FILE, record)


def check_file(file: Path, record: FileRecord) -> None:
    """Raises UserError if `file` is not the file that the manifest of its checkpoint describes."""
    _refuse(file, damage(file, record))


def _refuse(file: Path, problem: str | None) -> None:
    if problem is not None:
        raise UserError(
            f"{file} is not the file that {MANIFEST} describes: it {problem}; copy the checkpoint again, or "
            f"record a change of your own with {RECORD_ANEW.format(file.parent)}"
        )


@contextlib.contextmanager
def verified_while_loading(folder: Path) -> Iterator[None]:
    """Compares the files of a model with their hashes in drot.json while the caller loads the model.

    Weights and config.json are compared; other files, such as the tokenizer's, may be edited. Nothing is
    compared for a folder without drot.json.

    Raises UserError that names a file that differs. An error of the caller is raised instead.
    """
    if not os.path.exists(folder / MANIFEST):
        yield
        return
    files = recorded_files(folder)
    present = {file.name for file in folder.iterdir()}
    loaded = sorted(name for name in files.keys() | present if is_loaded(name))
    stop = threading.Event()
    with ThreadPoolExecutor(workers(len(loaded))) as pool:
        found = [
            pool.submit(damage, folder / name, files[name], stop) if name in files else None
            for name in loaded
        ]
        try:
            yield
        except BaseException:
            stop.set()
            raise
        problems = [future.result() if future else "is not in the list of files" for future in found]
    for name, problem in zip(loaded, problems, strict=True):
        _refuse(folder / name, problem)
