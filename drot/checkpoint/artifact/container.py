"""The file of an artifact: a zip archive with the parts of each tensor, the rotations and the small files.

| member                    | content                                                             |
|---------------------------|---------------------------------------------------------------------|
| artifact.json             | versions, hash of the dense model, hash of each file, tolerances    |
| files/NAME                | a file of the checkpoint without weights, such as drot.json         |
| headers/NAME              | the header of a safetensors file of the checkpoint                  |
| rotations/layers.I.r1, …  | r1, r2, r3 in fp32; a layer without r1 has that of the layer before |
| tensors/NAME/PIECE/PART   | parts of drot/checkpoint/artifact/coding.py; `positions` of a packed tensor    |
"""

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from drot.checkpoint.artifact.coding import from_planes, to_planes
from drot.checkpoint.integrity import Files
from drot.config import BoundaryPlace
from drot.core.checks import shortened
from drot.core.errors import UserError, quoted
from drot.core.reading import Entries, check_regular, check_schema, parse_json
from drot.model.decoder import DecoderModel
from drot.model.rotation import LayerRotation, RotationsOfLayers

ARTIFACT_VERSION = 1
ARTIFACT_INDEX = "artifact.json"
#: A few compressed bytes can stand for any number. Texts and headers have at most this many bytes for each
#: compressed byte, beyond SMALL bytes; of all other members the reader knows the size.
INFLATION, SMALL = 100, 2**16
#: what zipfile raises for damaged archives
DAMAGE = (
    *(KeyError, OSError, EOFError, ValueError, NotImplementedError, RuntimeError, OverflowError, IndexError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)


class ArtifactIndex(Entries):
    """The entries of artifact.json that drot reads."""

    format_version: int
    model: str
    model_sha256: str
    rotated: bool
    boundary: BoundaryPlace | None
    layers_per_rotation: Annotated[int, Field(ge=2)] | None = None
    down_rotation: Annotated[int, Field(ge=2)] | None = None
    files: Annotated[Files, Field(min_length=1)]
    tolerances: dict[str, Annotated[float, Field(ge=0)]]


class Writer(zipfile.ZipFile):
    """Writes the members of an artifact to the file `path`. A context manager."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")

    def add(self, name: str, data: bytes) -> None:
        # a fixed date, so that equal artifacts are equal files
        self.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)

    def add_rotations(self, rotations: Iterable[LayerRotation]) -> None:
        before = None
        for index, rotation in enumerate(rotations):
            for name, matrix in rotation.matrices.items():
                if name != "r1" or before is None or not torch.equal(matrix, before):
                    bits = matrix.float().contiguous().view(torch.int32).numpy()
                    self.add(f"rotations/layers.{index}.{name}", to_planes(bits, torch.float32))
            before = rotation.r1


class Reader(zipfile.ZipFile):
    """Reads an artifact. A context manager.

    Raises UserError for a file that is damaged or no artifact, there and in every method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not os.path.exists(path):
            raise UserError(f"there is no artifact {path}: write one with drot export")
        check_regular(path)
        try:
            super().__init__(path)
        except DAMAGE as error:
            raise UserError(f"{path} is no artifact of drot ({quoted(error)})") from None
        self._names = frozenset(self.namelist())
        if len(self._names) < len(self.namelist()):
            raise self.damaged("a member stands twice")
        if ARTIFACT_INDEX not in self._names:
            raise UserError(f"{path} is no artifact of drot (it holds no {ARTIFACT_INDEX})")
        where = f"{path}: {ARTIFACT_INDEX}"
        data = parse_json(self.content(ARTIFACT_INDEX), where)
        if (version := data.get("format_version")) != ARTIFACT_VERSION:
            raise UserError(
                f"{path} must be of format_version {ARTIFACT_VERSION}, got {shortened(version)}: update drot"
            )
        self.index = check_schema(ArtifactIndex, data, where)

    def damaged(self, why: object) -> UserError:
        return UserError(f"{self.path} is damaged ({why}): copy it again")

    def content(self, name: str, largest: int | None = None) -> bytes:
        """The content of a member of at most `largest` bytes; None is for a text or a header (INFLATION)."""
        try:
            member = self.getinfo(name)
            bound = INFLATION * member.compress_size + SMALL if largest is None else largest
            if member.file_size > bound or member.compress_type not in (
                zipfile.ZIP_DEFLATED,
                zipfile.ZIP_STORED,
            ):
                raise self.damaged(f"{name} has {member.file_size} bytes")
            return self.read(name)
        except UserError:
            raise
        except DAMAGE as error:
            raise self.damaged(quoted(error)) from None

    def parts(self, prefix: str, names: tuple[str, ...], largest: int) -> dict[str, bytes]:
        """Name → content of the members `prefix`/name that exist, each of at most `largest` bytes."""
        found = (name for name in names if f"{prefix}/{name}" in self._names)
        return {name: self.content(f"{prefix}/{name}", largest) for name in found}

    def rotations(self, source: DecoderModel) -> RotationsOfLayers:
        """The rotation of each layer of the dense model `source`, which is read when it is asked for.

        That raises UserError if its size does not fit the model.
        """
        hidden, block = source.hidden_size, self.index.down_rotation

        def read(index: int) -> LayerRotation:
            firsts = (f"rotations/layers.{before}.r1" for before in range(index, 0, -1))
            first = next((name for name in firsts if name in self._names), "rotations/layers.0.r1")
            layer = source.layers[index]
            shape = layer.heads
            size = [shape.kv_heads, shape.head_dim, shape.head_dim]
            r2, r3 = self._matrix(f"rotations/layers.{index}.r2", size), None
            if block is not None:
                size = [layer.down_inputs() // block, block, block]
                r3 = self._matrix(f"rotations/layers.{index}.r3", size)
            return LayerRotation(self._matrix(first, [hidden, hidden]), r2, r3)

        return RotationsOfLayers(read, range(len(source.layers)))

    def _matrix(self, name: str, size: list[int]) -> Tensor:
        expected = 4 * math.prod(size)
        data = self.content(name, expected)
        if len(data) != expected:
            raise self.damaged(f"{name} has {len(data)} bytes")
        numbers = from_planes(data, torch.float32)
        return torch.from_numpy(numbers.astype("uint32").view("float32")).reshape(size)
