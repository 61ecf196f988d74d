"""`product_dtype="auto"` is resolved once, recorded, and part of what a resumed run must share."""

import pytest
from small_models import random_tokens, small_model

import drot
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig, resolve
from drot.config.recipe import read_recipe
from drot.core.errors import UserError

TOKENS = random_tokens(4, 40)


def recipe(**rotation):
    return Recipe(
        rotation=RotationConfig(**({"steps": 2} | rotation)),
        pruning=PruningConfig(block_size=16),
        calibration=CalibrationConfig(seqlen=40),
    )


def prune(chosen, **options):
    return drot.prune(small_model("llama", head_dim=16), chosen, calibration=TOKENS, device="cpu", **options)


def test_auto_is_bfloat16_on_a_gpu_and_float32_on_a_cpu():
    assert Recipe().rotation.product_dtype == "auto"
    for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32")):
        assert resolve(recipe(), device=device).rotation.product_dtype == dtype
        for name in ("float32", "bfloat16"):
            chosen = recipe(product_dtype=name)
            assert resolve(chosen, device=device).rotation.product_dtype == name


def test_the_manifest_records_the_dtype_that_was_used(tmp_path):
    prune(recipe(), out=tmp_path / "auto")
    again, _ = read_recipe(tmp_path / "auto")
    assert again.rotation.product_dtype == "float32"
    manifest = prune(recipe(product_dtype="bfloat16")).manifest
    assert manifest["recipe"]["rotation"]["product_dtype"] == "bfloat16"


def test_a_run_is_not_resumed_in_another_dtype(tmp_path):
    """A run of a GPU, whose recipe is resolved on a GPU, does not go on in fp32 on a CPU."""

    def crash(event):
        if event.phase == "prune" and event.layer == 1:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prune(resolve(recipe(), device="cuda"), out=out, progress=crash)
    with pytest.raises(UserError, match="product_dtype"):
        prune(recipe(), out=out, resume=True)
    resumed = prune(recipe(product_dtype="bfloat16"), out=out, resume=True)
    assert resumed.manifest["recipe"]["rotation"]["product_dtype"] == "bfloat16"


def test_a_file_with_a_dtype_keeps_it_and_one_without_is_auto(tmp_path):
    for text, expected in (("bfloat16", "bfloat16"), ("float32", "float32"), (None, "auto")):
        file = tmp_path / "recipe.yaml"
        file.write_text("rotation:\n  steps: 2\n" + (f"  product_dtype: {text}\n" if text else ""))
        assert read_recipe(file)[0].rotation.product_dtype == expected
