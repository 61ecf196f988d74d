"""A dry run: what a run needs, from the config of the model alone."""

import pytest
import torch
from small_models import random_tokens, small_model

from drot.config import PruningConfig, Recipe, RecoveryConfig, RotationConfig
from drot.core.errors import UserError
from drot.model.decoder import DecoderModel
from drot.pipeline import estimate
from drot.pipeline.disk import disk_needs
from drot.pipeline.dry_run import run_needs

SIZES = dict(hidden_size=64, intermediate_size=112, num_hidden_layers=2)
TOKENS = random_tokens(6, 32)


def small_sizes() -> estimate.Sizes:
    return estimate.sizes_of(DecoderModel(small_model("llama", **SIZES)), *TOKENS.shape)


def recipe(*, quality="fast", method="sparsegpt", keep=(), sparsity="2:4", **rotation) -> Recipe:
    return Recipe(
        rotation=RotationConfig(**{"steps": 4, "down_rotation": 8} | rotation),
        pruning=PruningConfig(method=method, keep=keep, sparsity=sparsity),
        recovery=RecoveryConfig(recover_epochs=2),
    ).with_quality(quality)


def test_a_dry_run_needs_what_the_run_writes(tmp_path):
    """Without reading a weight: the sizes of the meta model are those of the loaded one."""
    small_model("llama", **SIZES).save_pretrained(tmp_path / "model")
    needs = run_needs(
        tmp_path / "model", recipe().replace(nsamples=6, seqlen=32), device="cpu", save_dtype="bfloat16"
    )
    sizes = small_sizes()
    assert (needs.checkpoint, needs.partial) == disk_needs(sizes, needs.recipe, torch.bfloat16)
    assert (needs.tokens, needs.dtype, needs.save_dtype) == (192, "float32", "bfloat16")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert run_needs(tmp_path / "model", Recipe().replace(mode="none", method="magnitude")).tokens == 0
    with pytest.raises(UserError, match="`blocks` must divide the hidden size 64; got 5"):
        run_needs(tmp_path / "model", Recipe().replace(blocks=5))
