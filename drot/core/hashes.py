"""SHA-256 of files, tensors and JSON data, by which damaged and swapped files are found."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: the key of a JSON file's own digest
DIGEST = "digest"
#: The weights of a model are hashed whole up to this size in bytes, which takes a second or two. Of larger
#: models only the first and the last SAMPLE_BYTES of each tensor are hashed: a run waits for this hash, and
#: a whole 8B model would have to be read from the disk once more.
WHOLE_HASH_BYTES = 2 * 2**30
SAMPLE_BYTES = 2**20
CHUNK_BYTES = 2**22


class FileRecord(BaseModel):
    """The hash and the size of a file. sha256: hexadecimal digits. bytes: size."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    sha256: str
    bytes: Annotated[int, Field(ge=0)]


# ---- JSON with its own digest ------------------------------------------------------------------------


def with_digest(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with the key DIGEST: the SHA-256 of all other keys, which do not depend on the file's layout."""
    content = {key: value for key, value in data.items() if key != DIGEST}
    return content | {DIGEST: json_digest(content)}


def json_digest(data: Any) -> str:
    """The SHA-256 of plain JSON data, independent of the order of its keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_fits(data: Mapping[str, Any]) -> bool:
    """Whether `data` holds its digest, and the digest is right."""
    return with_digest(data)[DIGEST] == data.get(DIGEST)


# ---- tensors -----------------------------------------------------------------------------------------


class Ends(NamedTuple):
    """What `weights_record` hashes of a tensor of a large model: the values at its two ends.

    like: a tensor of its dtype and shape, which may lie on the device `meta`.
    """

    like: "Tensor"
    values: "tuple[Tensor, ...]"


def ends_of(size: int, itemsize: int, sample: int | None) -> list[slice]:
    """The values that are hashed of a tensor with `size` values; None hashes all."""
    if sample is None or size * itemsize <= 2 * sample:
        return [slice(0, size)]
    count = sample // itemsize
    return [slice(0, count), slice(size - count, size)]


def parts_digest(parts: "Iterable[Mapping[str, Tensor | Ends]]", sample: int | None = None) -> str:
    """The SHA-256 of the names, dtypes, shapes and bytes of tensors, which may be on any device.

    parts: all tensors, which are asked for one part after the other.
    sample: bytes to hash at each end of a tensor; None hashes all bytes.
    """
    digests: dict[str, str] = {}
    for part in parts:
        digests |= in_threads(partial(_tensor_digest, part, sample), sorted(part))
    return json_digest(sorted([name, digest] for name, digest in digests.items()))


def _tensor_digest(tensors: "Mapping[str, Tensor | Ends]", sample: int | None, name: str) -> str:
    import torch

    tensor = tensors[name]
    if not isinstance(tensor, Ends):
        flat = tensor.detach().reshape(-1)
        ends = ends_of(len(flat), flat.element_size(), sample)
        tensor = Ends(tensor, tuple(flat[end] for end in ends))
    digest = hashlib.sha256(f"{tensor.like.dtype} {list(tensor.like.shape)}".encode())
    for end in tensor.values:
        digest.update(end.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_record(
    tensors: "Mapping[str, Tensor]",
    bound: int = WHOLE_HASH_BYTES,
    *,
    parts: "Callable[[int | None], Iterable[Mapping[str, Tensor | Ends]]] | None" = None,
) -> dict[str, Any]:
    """Names the weights of a model, wherever they were loaded from.

    tensors: all weights. They hold numbers, or lie on the device `meta` and `parts` gives them part by part.
    parts: called with the bytes at each end of a tensor that are hashed; None for all bytes.

    bytes: size of all tensors. hashed: `all bytes`, or what was hashed of a model of more than `bound` bytes.
    sha256: the hash, which covers the name, the dtype and the shape of each tensor too.
    """
    size = sum(tensor.nbytes for tensor in tensors.values())
    whole = size <= bound
    sample = None if whole else SAMPLE_BYTES
    return {
        "bytes": size,
        "hashed": "all bytes" if whole else f"{SAMPLE_BYTES} bytes at both ends of each tensor",
        "sha256": parts_digest(parts(sample) if parts else [tensors], sample),
    }


# ---- files -------------------------------------------------------------------------------------------


def file_record(file: Path, stop: threading.Event | None = None) -> FileRecord:
    """The hash and the size of a file. The reading ends early when `stop` is set."""
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb", buffering=0) as handle:
        while (count := handle.readinto(buffer)) and not (stop and stop.is_set()):
            digest.update(buffer[:count])
            size += count
    return FileRecord(sha256=digest.hexdigest(), bytes=size)


def damage(file: Path, record: FileRecord, stop: threading.Event | None = None) -> str | None:
    """Says in what `file` differs from `record`, as in 'is missing'; None if it does not differ."""
    if not file.is_file():
        return "is missing"
    try:
        if (size := file.stat().st_size) != record.bytes:
            return f"has {size} bytes, not {record.bytes}"
        return None if file_record(file, stop) == record else "has another SHA-256"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def in_threads(hash_of: Callable[[str], T], names: Sequence[str]) -> dict[str, T]:
    """Name → its hash. hashlib releases the interpreter, so that the hashes run on all cores."""
    with ThreadPoolExecutor(workers(len(names))) as pool:
        return dict(zip(names, pool.map(hash_of, names), strict=True))


def workers(tasks: int) -> int:
    """The number of threads for `tasks` hashes."""
    return max(1, min(tasks, os.cpu_count() or 1, 8))
