"""The pipeline of `drot prune`, replaced for tests of its command line."""

import pytest
from made_manifests import made_manifest
from torch import nn

from drot.core.events import ProgressEvent
from drot.pipeline import prune as pipeline


@pytest.fixture
def calls(monkeypatch):
    """The arguments with which `drot prune` calls the pipeline, which is replaced by a function."""
    seen = []

    def prune(model, recipe, **options):
        seen.append((model, recipe, options))
        print("a library prints to stdout")
        options["progress"](ProgressEvent(phase="prune", layer=0, layers=1))
        return pipeline.PruneResult(nn.Identity(), made_manifest(recipe), options["out"])

    monkeypatch.setattr(pipeline, "prune", prune)
    return seen
