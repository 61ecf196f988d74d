"""SHA-256 of files and of tensors, by which damaged and swapped files are found."""

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

import torch
from torch import Tensor

from drot.config.recipe_file import MANIFEST
from drot.core.checks import path_exists
from drot.core.errors import UserError
from drot.core.reading import read_json

#: the key of a JSON file's own digest
DIGEST = "digest"
#: the files from which transformers loads the weights of a folder
WEIGHTS = re.compile(r"(adapter_)?model[^/]*\.safetensors(\.index\.json)?")
#: The weights of a model are hashed whole up to this size in bytes. One core hashes about 1 GB a second, so
#: this takes half a minute, against hours of pruning. Of a larger model, the ends of each tensor are hashed.
WHOLE_HASH_BYTES = 32 * 2**30
#: bytes at each end of a tensor of a larger model
SAMPLE_BYTES = 2**20
CHUNK_BYTES = 2**22


class FileRecord(TypedDict):
    """sha256: hexadecimal digits. bytes: size of the file."""

    sha256: str
    bytes: int


# ---- JSON with its own digest ------------------------------------------------------------------------


def with_digest(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with the key DIGEST: the SHA-256 of all other keys, which do not depend on the file's layout."""
    content = {key: value for key, value in data.items() if key != DIGEST}
    return content | {DIGEST: json_digest(content)}


def json_digest(data: Any) -> str:
    """The SHA-256 of plain JSON data, independent of the order of its keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_fits(data: dict[str, Any]) -> bool:
    """Whether the digest in `data` is right. True for data of an older drot, which has no digest."""
    return DIGEST not in data or with_digest(data)[DIGEST] == data[DIGEST]


# ---- tensors -----------------------------------------------------------------------------------------


def tensors_digest(tensors: Mapping[str, Tensor], sample: int | None = None) -> str:
    """The SHA-256 of the names, dtypes, shapes and bytes of `tensors`, which may be on any device.

    sample: bytes to hash at each end of a tensor; None hashes all bytes.
    """
    names = sorted(tensors)
    with ThreadPoolExecutor(_workers(len(names))) as pool:
        digests = pool.map(lambda name: _tensor_digest(tensors[name], sample), names)
        return json_digest([[name, digest] for name, digest in zip(names, digests, strict=True)])


def _tensor_digest(tensor: Tensor, sample: int | None) -> str:
    flat = tensor.detach().reshape(-1)
    ends = [flat]
    if sample is not None and flat.nbytes > 2 * sample:
        count = sample // flat.element_size()
        ends = [flat[:count], flat[-count:]]
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    for end in ends:
        digest.update(end.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_record(tensors: Mapping[str, Tensor], bound: int = WHOLE_HASH_BYTES) -> dict[str, Any]:
    """Names the weights of a model, wherever they were loaded from.

    bytes: size of all tensors. hashed: `all bytes`, or what was hashed of a model of more than `bound` bytes.
    sha256: the hash, which covers the name, the dtype and the shape of each tensor too.
    """
    size = sum(tensor.nbytes for tensor in tensors.values())
    whole = size <= bound
    return {
        "bytes": size,
        "hashed": "all bytes" if whole else f"{SAMPLE_BYTES} bytes at both ends of each tensor",
        "sha256": tensors_digest(tensors, None if whole else SAMPLE_BYTES),
    }


# ---- files -------------------------------------------------------------------------------------------


def file_record(file: Path, stop: threading.Event | None = None) -> FileRecord:
    """The hash and the size of a file. The reading ends early when `stop` is set."""
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb", buffering=0) as handle:
        while (count := handle.readinto(buffer)) and not (stop and stop.is_set()):
            digest.update(buffer[:count])
            size += count
    return {"sha256": digest.hexdigest(), "bytes": size}


def damage(file: Path, record: FileRecord, stop: threading.Event | None = None) -> str | None:
    """Says in what `file` differs from `record`, as in 'is missing'; None if it does not differ."""
    if not file.is_file():
        return "is missing"
    try:
        if (size := file.stat().st_size) != record["bytes"]:
            return f"has {size} bytes, not {record['bytes']}"
        return None if file_record(file, stop) == record else "has another SHA-256"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def folder_records(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileRecord]:
    """The records of the files `names` in `folder`; None takes all files but the manifest."""
    chosen = sorted(files_in(folder) - {MANIFEST} if names is None else names)
    with ThreadPoolExecutor(_workers(len(chosen))) as pool:
        return dict(zip(chosen, pool.map(lambda name: file_record(folder / name), chosen), strict=True))


def files_in(folder: Path) -> set[str]:
    """The paths of all files below `folder`, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def recorded_files(manifest: dict[str, Any], file: Path) -> dict[str, FileRecord] | None:
    """The entry `files` of a manifest; None for a manifest of an older drot, which has no hashes.

    Raises UserError that names `file`, the file of the manifest, if the entry is damaged or was removed.
    """
    files = manifest.get("files")
    if files is None and digest_fits(manifest):
        return None
    if not isinstance(files, dict) or not all(_is_record(name, record) for name, record in files.items()):
        raise UserError(f"{file}: the hashes in its entry files are damaged: copy the checkpoint again")
    return files


def _is_record(name: str, record: Any) -> bool:
    path = PurePosixPath(name)
    return (
        not path.is_absolute()
        and ".." not in path.parts
        and isinstance(record, dict)
        and isinstance(record.get("sha256"), str)
        and type(record.get("bytes")) is int
        and len(record) == 2
    )


def compare(folder: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
    """File → what is wrong with it, for each of `files` that is damaged, and for weights not among them."""
    names = sorted(files)
    with ThreadPoolExecutor(_workers(len(names))) as pool:
        found = dict(
            zip(names, pool.map(lambda name: damage(folder / name, files[name]), names), strict=True)
        )
    problems = {name: problem for name, problem in found.items() if problem is not None}
    return problems | {name: "is extra" for name in files_in(folder) - set(files) if is_loaded(name)}


def is_loaded(name: str) -> bool:
    """Whether a model is made from the file `name` of its folder: from its weights and its config."""
    return name == "config.json" or WEIGHTS.fullmatch(name) is not None


@contextlib.contextmanager
def verified_while_loading(folder: Path) -> Iterator[None]:
    """Compares the files of a model with their hashes in drot.json while the caller loads the model.

    Weights and config.json are compared; other files, such as the tokenizer's, may be edited. Nothing is
    compared for a folder without drot.json, and for a checkpoint of an older drot.

    Raises UserError that names a file that differs. An error of the caller is raised instead.
    """
    if not path_exists(folder / MANIFEST):
        yield
        return
    files = recorded_files(read_json(folder / MANIFEST), folder / MANIFEST)
    if files is None:
        yield
        return
    present = {file.name for file in folder.iterdir()}
    loaded = sorted(name for name in files.keys() | present if is_loaded(name))
    stop = threading.Event()
    with ThreadPoolExecutor(_workers(len(loaded))) as pool:
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
        if problem is not None:
            raise UserError(
                f"{folder / name} is not the file that {MANIFEST} describes: it {problem}; copy the "
                "checkpoint again, or record a change that you made yourself with drot info and `accept=True`"
            )


def _workers(tasks: int) -> int:
    """Threads for `tasks` hashes. hashlib releases the interpreter, so that they run on all cores."""
    return max(1, min(tasks, os.cpu_count() or 1, 8))
