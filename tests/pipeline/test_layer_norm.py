"""Families with LayerNorm, whose R1 leaves the vector of ones as it is."""

import pytest
import torch
from runs import assert_opens, assert_patterns, one_shot, prune, saved_bytes
from small_models import random_tokens, relative_error, save_small_model, small_model

import drot
from drot.checkpoint.artifact.apply import apply_artifact
from drot.checkpoint.artifact.export import export_artifact
from drot.checkpoint.convert import convert
from drot.checkpoint.rotations import open_rotations
from drot.core.errors import UserError
from drot.model.decoder import DecoderModel
from drot.model.rotation import around_ones

pytestmark = pytest.mark.slow

FAMILIES = ["cohere2", "opt"]
MODES = {
    "none": one_shot("none"),
    "shared": one_shot("shared"),
    "input": one_shot(down_rotation="auto"),
    "residual": one_shot(down_rotation="auto", boundary="residual", hessians="dense", target="dense"),
    "entropy": one_shot(down_rotation="none", objective="entropy", blocks=2),
    "paper": one_shot(down_rotation="none", optimizer="paper", lr=0.01),
}


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_what_leaves_the_first_unit_vector_becomes_what_leaves_ones(size):
    q = torch.linalg.qr(torch.randn(size - 1, size - 1, dtype=torch.float64))[0]
    r1 = around_ones(torch.block_diag(torch.ones(1, 1, dtype=torch.float64), q))
    ones = torch.ones(size, dtype=torch.float64)
    assert torch.allclose(r1 @ ones, ones) and torch.allclose(r1 @ r1.T, torch.eye(size, dtype=torch.float64))
    x = torch.randn(5, size, dtype=torch.float64)
    norm = torch.nn.functional.layer_norm
    assert torch.allclose(norm(x @ r1, (size,)), norm(x, (size,)) @ r1, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *((FAMILIES[i % 2], mode) for i, mode in enumerate(MODES)),
        (FAMILIES[1], "input"),
        ("starcoder2", "residual"),
    ],
)
def test_from_the_dense_model_to_a_checkpoint(family, mode, tmp_path):
    chosen, tokens, out = MODES[mode], random_tokens(2, 30, seed=5), tmp_path / "out"
    result = prune(
        small_model(family),
        chosen,
        out=out,
        save_rotations_to=None if mode == "none" else out / "r.safetensors",
    )
    assert_patterns(result.model, chosen.pruning)
    if mode != "none":
        assert result.manifest.relative_logit_error < 1e-5
        rotations, _ = open_rotations(out / "r.safetensors", DecoderModel(result.model))
        for rotation in rotations.values():
            assert float((rotation.r1.sum(1) - 1).abs().max()) < 1e-6
            assert relative_error(rotation.r1, torch.eye(32)) > 0.1
        for layer in result.manifest.layers:
            if layer.rotation is not None:
                assert layer.rotation.loss_after < layer.rotation.loss_before
    assert_opens(out, result.model, tmp_path / "again")
    convert(out, tmp_path / "packed", "packed")
    packed = drot.load(tmp_path / "packed", device="cpu")
    assert relative_error(packed(tokens).logits, result.model(tokens).logits) < 1e-5


def test_an_r1_that_moves_ones_is_refused(tmp_path):
    file = tmp_path / "r.safetensors"
    prune(
        small_model("mistral", head_dim=8, num_key_value_heads=4),
        one_shot(down_rotation="none"),
        save_rotations_to=file,
    )
    with pytest.raises(
        UserError, match="must hold an R1 with R1 1 = 1 for a model with LayerNorm, got an error"
    ):
        prune(small_model("opt"), one_shot(down_rotation="none"), rotations=file)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_text"])
def test_an_artifact_gives_the_checkpoint_again(family, tmp_path):
    """Its rotations are computed from the checkpoint: with positions, shifts of norms and no R2 too."""
    source = save_small_model(small_model(family), tmp_path / "source")
    prune(str(source), one_shot(down_rotation="auto"), out=tmp_path / "out")
    export_artifact(tmp_path / "out", tmp_path / "artifact", model=source)
    apply_artifact(tmp_path / "artifact", tmp_path / "again", model=source)
    assert saved_bytes(tmp_path / "again") == saved_bytes(tmp_path / "out")
