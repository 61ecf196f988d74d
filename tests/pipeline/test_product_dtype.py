"""`product_dtype="auto"` is resolved once, recorded, and part of what a resumed run must share."""

import pytest
import torch
from runs import interrupted, prune
from runs import recipe as small_recipe

from drot.config import Recipe
from drot.config.recipe_file import read_recipe
from drot.core.errors import UserError
from drot.machine.devices import product_dtype
from drot.pipeline.prepare import recipe_on

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def recipe(**fields):
    return small_recipe(**{"steps": 2} | fields)


def test_auto_is_bfloat16_on_a_gpu_and_float32_on_a_cpu():
    assert Recipe().rotation.product_dtype == "auto"
    assert (product_dtype("auto", GPU), product_dtype("auto", CPU)) == ("bfloat16", "float32")
    for name in ("float32", "bfloat16"):
        assert product_dtype(name, GPU) == product_dtype(name, CPU) == name
        assert recipe_on(recipe(product_dtype=name), GPU) == recipe(product_dtype=name)
    assert recipe_on(recipe(), GPU).rotation.product_dtype == "bfloat16"
    assert recipe_on(recipe(mode="none"), GPU) == recipe(mode="none")


def test_the_manifest_records_the_dtype_that_was_used(tmp_path):
    prune(chosen=recipe(), out=tmp_path / "auto")
    again, _ = read_recipe(tmp_path / "auto")
    assert again.rotation.product_dtype == "float32"
    manifest = prune(chosen=recipe(product_dtype="bfloat16")).manifest
    assert manifest["recipe"]["rotation"]["product_dtype"] == "bfloat16"


def test_a_run_is_not_resumed_in_another_dtype(tmp_path):
    """A run of a GPU, whose recipe is `recipe_on` a GPU, does not go on in fp32 on a CPU."""
    out = tmp_path / "out"
    interrupted(chosen=recipe_on(recipe(), GPU), out=out)
    with pytest.raises(UserError, match="product_dtype"):
        prune(chosen=recipe(), out=out, resume=True)
    resumed = prune(chosen=recipe(product_dtype="bfloat16"), out=out, resume=True)
    assert resumed.manifest["recipe"]["rotation"]["product_dtype"] == "bfloat16"


def test_a_file_with_a_dtype_keeps_it_and_one_without_is_auto(tmp_path):
    for text, expected in (("bfloat16", "bfloat16"), ("float32", "float32"), (None, "auto")):
        file = tmp_path / "recipe.yaml"
        file.write_text("rotation:\n  steps: 2\n" + (f"  product_dtype: {text}\n" if text else ""))
        assert read_recipe(file)[0].rotation.product_dtype == expected
