"""The file of an artifact: a zip archive with the parts of each tensor, the rotations and the small files.

| member                    | content                                                             |
|---------------------------|---------------------------------------------------------------------|
| artifact.json             | versions, hash of the dense model, hash of each file, tolerances    |
| files/NAME                | a file of the checkpoint without weights, such as drot.json         |
| headers/NAME              | the header of a safetensors file of the checkpoint                  |
| rotations/layers.I.r1, r2 | fp32 matrices; a layer without r1 has that of the layer before      |
| tensors/NAME/PIECE/PART   | parts of drot/artifact/coding.py; `positions` of a packed tensor    |
"""

import json
import struct
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from drot.artifact.coding import from_planes, to_planes
from drot.artifact.schema import ArtifactIndex
from drot.core.checks import shortened
from drot.core.errors import UserError
from drot.core.reading import check_schema, parse_json
from drot.model.families import HeadShape
from drot.model.rotation import LayerRotation

FORMAT_VERSION = 1
INDEX = "artifact.json"
#: Bytes of the largest member that is read; a few compressed bytes can stand for as many as they like. The
#: largest of drot, a rotation of a layer of 16384 channels or a piece of a tensor, has half as many.
LARGEST_MEMBER = 2**31


class Writer:
    """Writes the members of an artifact to the file `path`. A context manager."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exc: object) -> None:
        self._zip.close()

    def add(self, name: str, data: bytes) -> None:
        # a fixed date, so that equal artifacts are equal files
        info = zipfile.ZipInfo(name)
        info.compress_type = zipfile.ZIP_DEFLATED
        self._zip.writestr(info, data)

    def add_rotations(self, rotations: list[LayerRotation]) -> None:
        before = None
        for index, rotation in enumerate(rotations):
            if before is None or not torch.equal(rotation.r1, before):
                self.add(f"rotations/layers.{index}.r1", _matrix_bytes(rotation.r1))
            self.add(f"rotations/layers.{index}.r2", _matrix_bytes(rotation.r2))
            before = rotation.r1

    def sizes(self) -> dict[str, int]:
        """What the members take in the file, in bytes: `rotations`, `mask`, `difference` and so on."""
        sizes: Counter[str] = Counter()
        for info in self._zip.infolist():
            kind, _, rest = info.filename.partition("/")
            sizes[rest.rpartition("/")[2] if kind == "tensors" else kind] += info.compress_size
        return dict(sizes)


class Reader:
    """Reads an artifact. A context manager.

    Raises UserError for a file that is damaged or no artifact, there and in every method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError:
            raise UserError(f"there is no artifact {path}: write one with drot export") from None
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} is no artifact of drot ({error})") from None
        self._names = frozenset(self._zip.namelist())
        if INDEX not in self._names:
            raise UserError(f"{path} is no artifact of drot (it holds no {INDEX})")
        where = f"{path}: {INDEX}"
        data = parse_json(self.read(INDEX), where)
        if (version := data.get("format_version")) != FORMAT_VERSION:
            raise UserError(
                f"{path} must be of format_version {FORMAT_VERSION}, got {shortened(version)}: update drot"
            )
        self.index = check_schema(ArtifactIndex, data, where)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exc: object) -> None:
        self._zip.close()

    def damaged(self, why: object) -> UserError:
        return UserError(f"{self.path} is damaged ({why}): copy it again")

    def read(self, name: str) -> bytes:
        try:
            if (size := self._zip.getinfo(name).file_size) > LARGEST_MEMBER:
                raise self.damaged(f"{name} has {size} bytes")
            return self._zip.read(name)
        except (KeyError, OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
            raise self.damaged(error) from None

    def parts(self, prefix: str, names: tuple[str, ...]) -> dict[str, bytes]:
        """Name → content of the members `prefix`/name that exist."""
        return {name: self.read(f"{prefix}/{name}") for name in names if f"{prefix}/{name}" in self._names}

    def rotations(self, layers: int, hidden: int, shape: HeadShape) -> list[LayerRotation]:
        """The rotation of each layer. Raises UserError if their sizes do not fit the model."""
        found: list[LayerRotation] = []
        for index in range(layers):
            first = f"rotations/layers.{index}.r1"
            alone = first in self._names or not found
            r1 = self._matrix(first, [hidden, hidden]) if alone else found[-1].r1
            size = [shape.kv_heads, shape.head_dim, shape.head_dim]
            found.append(LayerRotation(r1, self._matrix(f"rotations/layers.{index}.r2", size)))
        return found

    def _matrix(self, name: str, size: list[int]) -> Tensor:
        try:
            numbers = from_planes(self.read(name), torch.float32)
            return torch.from_numpy(numbers.astype("uint32").view("float32")).reshape(size)
        except UserError:
            raise
        except (ValueError, RuntimeError) as error:
            raise self.damaged(f"{name}: {error}") from None


def _matrix_bytes(matrix: Tensor) -> bytes:
    bits = matrix.float().contiguous().view(torch.int32).numpy().reshape(-1)
    return to_planes(bits.astype("int64") & 0xFFFFFFFF, torch.float32)


def header_bytes(file: Path) -> bytes:
    """The first bytes of a safetensors file, up to the first tensor."""
    with file.open("rb") as handle:
        start = handle.read(8)
        return start + handle.read(struct.unpack("<Q", start)[0])


def tensors_of(header: bytes, size: int) -> dict[str, tuple[str, list[int], int]]:
    """Name → dtype by safetensors' name, shape, and position in the file, of each tensor of a file.

    Raises ValueError, LookupError, TypeError, AttributeError or RecursionError for the header of another file
    than of one of `size` bytes.
    """
    entries = json.loads(header[8:])
    entries.pop("__metadata__", None)
    places = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
    end = 0
    for first, last in places:
        if first != end or last < first:
            raise ValueError(f"a tensor begins at byte {first}, where {end} was expected")
        end = last
    if len(header) + end != size:
        raise ValueError(f"the tensors end at byte {len(header) + end} of {size}")
    return {
        name: (entry["dtype"], entry["shape"], len(header) + entry["data_offsets"][0])
        for name, entry in entries.items()
    }
