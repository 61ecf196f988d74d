"""The check of a folder that drot wrote, a checkpoint or an unfinished run, against the recorded hashes."""

from dataclasses import dataclass
from pathlib import Path

from drot.checkpoint.integrity import differing_files, files_in, recorded_files
from drot.checkpoint.manifest import MANIFEST, read_any_manifest
from drot.checkpoint.resume import IDENTITY, JOURNAL, read_journal, read_parts
from drot.core.hashes import DIGEST, FileRecord, digest_fits
from drot.core.reading import read_json


@dataclass(frozen=True)
class Verification:
    """The result of `verify_folder`.

    files: the names of all files that drot wrote.
    damaged: file → what is wrong with it. A file from which the model would be loaded, but which drot did
        not write, counts as damaged.
    unknown: other files that drot did not write.
    unfinished: whether the folder is that of an unfinished run.
    """

    files: list[str]
    damaged: dict[str, str]
    unknown: list[str]
    unfinished: bool


def verify_folder(folder: Path) -> Verification:
    """Compares all files of a checkpoint, or of the folder of an unfinished run, with their hashes.

    Raises UserError if the folder holds no hashes, or if the file with the hashes cannot be read.
    """
    if (folder / JOURNAL).exists() and not (folder / MANIFEST).exists():
        return _unfinished_run(folder)
    read_any_manifest(folder)  # refuses a folder that drot did not write
    files = recorded_files(folder)
    data = read_json(folder / MANIFEST)
    own = (
        {} if digest_fits(data) else {MANIFEST: f"{'does not fit' if DIGEST in data else 'lacks'} its digest"}
    )
    return _verification(folder, files, own, [MANIFEST], unfinished=False)


def _unfinished_run(folder: Path) -> Verification:
    own = {
        name: "is missing or does not fit its digest"
        for name in (IDENTITY, JOURNAL)
        if read_journal(folder / name) is None
    }
    parts = read_parts(folder) or {}
    files: dict[str, FileRecord] = {
        f"{name}.safetensors": FileRecord(sha256=part["sha256"], bytes=part["bytes"])
        for name, part in parts.items()
    }
    return _verification(folder, files, own, [IDENTITY, JOURNAL], unfinished=True)


def _verification(
    folder: Path, files: dict[str, FileRecord], damaged: dict[str, str], own: list[str], *, unfinished: bool
) -> Verification:
    """own: the files that hold the hashes. damaged: what is wrong with those."""
    damaged = damaged | differing_files(folder, files)
    known = {*files, *own}
    unknown = files_in(folder) - known - set(damaged)
    return Verification(sorted(known), damaged, sorted(unknown), unfinished)
