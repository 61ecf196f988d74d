"""Two pruned random models for the tests of reports: one rotated and recovered, one not rotated."""

import dataclasses
import json
from pathlib import Path

import pytest
from small_models import random_tokens, small_model

import drot
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig


@pytest.fixture(scope="session")
def pruned(tmp_path_factory) -> dict[str, Path]:
    """The folders `rotated` and `plain`, which tests must not change."""
    pytest.importorskip("matplotlib", reason="a report needs matplotlib")
    folder = tmp_path_factory.mktemp("report")
    plain = Recipe(
        rotation=RotationConfig(mode="none"),
        pruning=PruningConfig(block_size=16),
        calibration=CalibrationConfig(seqlen=40),
    )
    rotated = (
        dataclasses.replace(plain, rotation=RotationConfig(steps=5))
        .with_quality("best")
        .replace(recover="block")
    )
    for name, recipe in {"rotated": rotated, "plain": plain}.items():
        drot.prune(
            small_model("llama"), recipe, calibration=random_tokens(8, 40), device="cpu", out=folder / name
        )
        file = folder / name / "drot.json"
        manifest = json.loads(file.read_text())
        memory = {"prune": {"process": 2**30}, "save": {"process": 2**31}}  # equal peaks are not drawn
        file.write_text(json.dumps(manifest | {"base_model": "someone/<b>some model", "peak_memory": memory}))
    return {name: folder / name for name in ("rotated", "plain")}
