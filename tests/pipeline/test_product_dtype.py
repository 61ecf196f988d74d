"""`product_dtype="auto"` is resolved once, recorded, and shared by a resumed run; fp32 products are exact."""

import pytest
import torch
from runs import interrupted, prune
from runs import recipe as small_recipe
from small_models import random_tokens, small_model

import drot
from drot.config import Recipe, resolve
from drot.core.errors import UserError
from drot.machine.products import fp32_products

pytestmark = pytest.mark.slow


def recipe(**fields):
    return small_recipe(**{"steps": 2} | fields)


def test_auto_is_bfloat16_for_training_on_a_gpu_and_float32_elsewhere():
    def used(device, **fields):
        return resolve(recipe(**fields), device=device).rotation.product_dtype

    assert (used("cuda"), used("cpu"), used("cuda", mode="none")) == ("bfloat16", "float32", "float32")
    for name in ("float32", "bfloat16"):
        assert used("cuda", product_dtype=name) == used("cpu", product_dtype=name) == name


def test_the_manifest_records_the_dtype_that_was_used(tmp_path):
    prune(chosen=recipe(), out=tmp_path / "auto")
    assert Recipe.from_file(tmp_path / "auto").rotation.product_dtype == "float32"
    manifest = prune(chosen=recipe(product_dtype="bfloat16")).manifest
    assert manifest.recipe.rotation.product_dtype == "bfloat16"


def test_a_run_is_not_resumed_in_another_dtype(tmp_path):
    """A run of a GPU, whose recipe is resolved for a GPU, does not go on in fp32 on a CPU."""
    out = tmp_path / "out"
    interrupted(chosen=resolve(recipe(), device="cuda"), out=out)
    with pytest.raises(UserError, match="product_dtype"):
        prune(chosen=recipe(), out=out, resume=True)
    resumed = prune(chosen=recipe(product_dtype="bfloat16"), out=out, resume=True)
    assert resumed.manifest.recipe.rotation.product_dtype == "bfloat16"


@pytest.mark.parametrize("call", [prune, "sensitivity"])
def test_fp32_products_are_not_rounded_where_the_caller_rounds_them(call):
    """With TF32 the check of the rotated model would fail on a GPU."""
    products, seen = torch.backends.cuda.matmul, []

    def progress(event):
        seen.append((event.phase, products.fp32_precision))

    with fp32_products("tf32"):
        if call is prune:
            prune(chosen=recipe(), progress=progress)
        else:
            drot.sensitivity(
                small_model("llama"), recipe(), calibration=random_tokens(4, 32), progress=progress
            )
        assert products.fp32_precision == "tf32"
    assert len(seen) > 3 and {precision for _, precision in seen} == {"ieee"}
