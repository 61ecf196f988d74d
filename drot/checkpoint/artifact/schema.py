"""Schema of artifact.json, the index of an artifact (drot/checkpoint/artifact/container.py)."""

from typing import Annotated

from pydantic import Field

from drot.checkpoint.integrity import Files
from drot.config import BoundaryPlace
from drot.core.reading import Entries


class ArtifactIndex(Entries):
    """The entries that drot reads."""

    format_version: int
    model: str
    model_sha256: str
    rotated: bool
    boundary: BoundaryPlace | None
    down_rotation: Annotated[int, Field(ge=2)] | None = None
    files: Annotated[Files, Field(min_length=1)]
    tolerances: dict[str, Annotated[float, Field(ge=0)]]
