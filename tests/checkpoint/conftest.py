"""The embedded model pruned once for all tests of this folder, as a dense and as a packed checkpoint."""

import shutil

import pytest
from packed_checkpoints import PRUNE

from drot.cli import app as cli
from drot.reporting.demo import MODEL


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A dense and a packed checkpoint of the embedded model, with rotations. Tests must not change them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for format in ("dense", "packed"):
        out = str(folder / format)
        assert cli.run(["prune", str(MODEL), "--out", out, "--format", format, "--steps", "1", *PRUNE]) == 0
    return folder


@pytest.fixture
def packed(checkpoints, tmp_path):
    """A packed checkpoint that a test may damage."""
    return shutil.copytree(checkpoints / "packed", tmp_path / "packed")
