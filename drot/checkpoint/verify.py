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
    unfinished = (folder / JOURNAL).exists() and not (folder / MANIFEST).exists()
    own = [IDENTITY, JOURNAL] if unfinished else [MANIFEST]  # which hold the hashes
    if unfinished:
        parts = read_parts(folder) or {}
        files = {
            f"{name}.safetensors": FileRecord(sha256=part["sha256"], bytes=part["bytes"])
            for name, part in parts.items()
        }
        broken = [name for name in own if read_journal(folder / name) is None]
        damaged = dict.fromkeys(broken, "is missing or does not fit its digest")
    else:
        read_any_manifest(folder)  # refuses a folder that drot did not write
        files, data = recorded_files(folder), read_json(folder / MANIFEST)
        problem = f"{'does not fit' if DIGEST in data else 'lacks'} its digest"
        damaged = {} if digest_fits(data) else {MANIFEST: problem}
    damaged |= differing_files(folder, files)
    known = {*files, *own}
    unknown = files_in(folder) - known - set(damaged)
    return Verification(sorted(known), damaged, sorted(unknown), unfinished)
