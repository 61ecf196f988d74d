"""The recorded importance before and after the rotation, against fp64 and other figures of the run."""

import numpy as np
import pytest
import torch
from runs import TOKENS, interrupted, one_shot, prune
from small_models import FAMILIES, place_in, random_rotations, small_model

from drot.calibration.hessian import InputHessian
from drot.checkpoint.convert import convert
from drot.checkpoint.importance import (
    HISTOGRAM_BINS,
    HISTOGRAM_LOG10,
    IMPORTANCE_MAPS,
    load_importance_maps,
)
from drot.checkpoint.records import OneShotFigures, OneShotRecord
from drot.checkpoint.rotations import open_rotations
from drot.model.decoder import DecoderModel
from drot.model.families import LLAMA
from drot.model.rotation import Bases
from drot.pipeline.importance import GroupImportance, block_means, histogram

DAMPING = 0.01


def recipe(mode="layer", **fields):
    return one_shot(mode, **{"damping": DAMPING} | fields)


def attention_input(model) -> torch.Tensor:
    """H of the inputs of layer 0's q_proj without the weight of the norm, fp64, from the embedding alone."""
    hidden = model.model.embed_tokens.weight.double()[TOKENS].flatten(0, 1)
    x = hidden / (hidden.square().mean(1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    return 2 / len(TOKENS) * x.T @ x


def scores(weight, hessian, method):
    """The scores of the paper's appendix A in fp64."""
    if method == "magnitude":
        return weight**2
    if method == "wanda":
        return weight**2 * hessian.diagonal()
    damped = hessian + DAMPING * hessian.diagonal().median() * torch.eye(len(hessian), dtype=torch.float64)
    return weight**2 / torch.linalg.inv(damped).diagonal()


def smallest(score, sparsity):
    """The mask of the smallest scores: two of every four, or half of every row."""
    groups = score.reshape(score.shape[0], -1, 4 if sparsity == "2:4" else score.shape[1])
    order = groups.argsort(-1).argsort(-1)
    return (order < groups.shape[-1] // 2).reshape(score.shape)


@pytest.mark.parametrize(
    ("method", "sparsity"), [("sparsegpt", "2:4"), ("wanda", "0.5"), ("magnitude", "2:4")]
)
def test_figures_of_the_first_linear_in_fp64(method, sparsity, tmp_path):
    """The map, the histogram and the pruned share of q_proj, from the embedding, the weight and R1 alone."""
    model = small_model("llama")
    layer = model.model.layers[0]
    weight = layer.self_attn.q_proj.weight.double() * layer.input_layernorm.weight.double()
    hessian = attention_input(model)
    chosen = recipe(method=method, sparsity=sparsity)
    result = prune(chosen=chosen, out=tmp_path / "out", save_rotations_to=tmp_path / "r")
    rotations, _ = open_rotations(tmp_path / "r", DecoderModel(model))
    r1 = rotations[0].r1
    bases = {"before": (weight, hessian), "after": (weight @ r1, r1.T @ hessian @ r1)}
    saved = load_importance_maps(tmp_path / "out")
    shares = result.manifest.layers[0].linears["q_proj"].one_shot
    total = scores(*bases["before"], method).sum()
    for basis, (matrix, of_inputs) in bases.items():
        score = scores(matrix, of_inputs, method)
        removed = smallest(score, sparsity)
        share = float(score[removed].sum() / total)
        assert getattr(shares, basis).removed_importance == pytest.approx(share, rel=1e-4)
        relative = score / (total / score.numel())
        name = f"layers.0.self_attn.q_proj.{{}}_{basis}"
        blocks = [[row for row in range(48) if row * 32 // 48 == block] for block in range(32)]
        expected = torch.stack([relative[rows].mean(0) for rows in blocks])
        np.testing.assert_allclose(saved[name.format("map")], expected, rtol=2e-3, atol=1e-4)
        edges = np.linspace(*HISTOGRAM_LOG10, HISTOGRAM_BINS + 1)
        got = saved[name.format("histogram")]
        for row, mask in zip(got, (~removed, removed), strict=True):
            wanted, _ = np.histogram(relative[mask].log10().clamp(*HISTOGRAM_LOG10), edges)
            assert row.sum() == wanted.sum() == mask.sum()
            assert np.abs(row - wanted).sum() <= 8  # scores beside an edge, by rounding to fp32


def test_pruned_shares_add_up_to_the_loss_of_the_training():
    """The objective is the sum of out_features · share; only the linears of one input are pruned here, so
    that the pruning sees the inputs of the training. A rotation changes the median of diag H, so the damping
    is as good as 0."""
    kept = ("o_proj", "*.mlp.*")
    layer = prune(chosen=recipe(keep=kept, damping=1e-6)).manifest.layers[0]
    rows = {"q_proj": 48, "k_proj": 24, "v_proj": 24}
    for basis in ("before", "after"):
        total = sum(
            rows[name] * getattr(layer.linears[name].one_shot, basis).removed_importance for name in rows
        )
        assert total == pytest.approx(getattr(layer.rotation, f"loss_{basis}"), rel=1e-4)
    assert layer.linears["o_proj"].one_shot == OneShotRecord()


def test_error_before_the_rotation_is_the_error_of_a_run_without_rotation():
    """Without damping, because the damping of a run without rotation is that of norms that are not folded."""
    rotated = (
        prune(chosen=recipe(solve="admm", target="dense", damping=0.0, token_weights="equal"))
        .manifest.layers[0]
        .linears
    )
    plain = prune(chosen=recipe("none", damping=0.0)).manifest.layers[0].linears
    for name in ("q_proj", "k_proj", "v_proj"):  # the other linears read what pruned linears computed
        before = rotated[name].one_shot.before.output_error
        assert before == pytest.approx(plain[name].output_error, rel=1e-3)
        assert before == pytest.approx(plain[name].one_shot.before.output_error, rel=1e-3)
        assert plain[name].one_shot.after == OneShotFigures()
        assert rotated[name].output_error < rotated[name].one_shot.after.output_error


@pytest.mark.parametrize(
    ("family", "place"),
    [
        *((family, "input") for family in FAMILIES),
        *((family, "residual") for family in ("llama", "cohere", "opt")),
    ],
)
def test_every_linear_returns_to_its_basis(family, place):
    """Undoing the rotation of a rotated layer gives its folded weights."""
    model = small_model(family)
    layer, rotations = DecoderModel(model).layers[0], random_rotations(model)
    rotation = rotations[0]
    boundary = Bases(place_in(DecoderModel(model), place), 3).merged(0, rotations)
    original = layer.folded_weights()
    layer.rotate(rotation, boundary)
    for group in layer.groups:
        size = original[group.linears[0].name].shape[1]
        hessian = torch.eye(size) + torch.diag(torch.rand(size))
        of_inputs = InputHessian(hessian, DAMPING)
        output_r1 = boundary.next_r1 if boundary and layer.ends_layer(group) else None
        of_group = GroupImportance(group, of_inputs, recipe(), layer.heads, rotation, output_r1)
        for linear in layer.linears_of(group):
            weight = linear.weight
            undone = of_group.unrotated(linear.spec, weight)
            torch.testing.assert_close(undone, original[linear.name], rtol=1e-4, atol=1e-5)
            # the outputs' energy tr(W H Wᵀ) is the same in both bases
            energies = [
                float(((w @ h) * w).sum()) for w, h in ((weight, hessian), (undone, of_group.hessian.matrix))
            ]
            assert energies[0] == pytest.approx(energies[1], rel=1e-4)


def test_a_resumed_run_has_the_same_figures(tmp_path):
    prune(chosen=recipe(), out=tmp_path / "whole")
    interrupted(chosen=recipe(), out=tmp_path / "out")
    resumed = prune(chosen=recipe(), out=tmp_path / "out", resume=True)
    of_linear = resumed.manifest.layers[0].linears["up_proj"].one_shot
    assert None not in (of_linear.before.removed_importance, of_linear.after.removed_importance)
    whole, out = load_importance_maps(tmp_path / "whole"), load_importance_maps(tmp_path / "out")
    assert whole.keys() == out.keys() and len(whole) == 3 * len(LLAMA.linears) * 4
    for name, values in whole.items():
        assert np.array_equal(values, out[name]) and values.dtype == out[name].dtype


def test_block_means_and_histogram_of_awkward_sizes():
    score = torch.rand(70, 33, dtype=torch.float64)
    means = block_means(score)
    assert means.shape == (32, 32)
    rows = [i for i in range(70) if i * 32 // 70 == 5]
    assert means[5, 0] == pytest.approx(float(score[rows][:, :2].mean()))  # 33 columns: block 0 has two
    counts = histogram(torch.tensor([[0.0, 1e9, 1.0]]), torch.tensor([[True, False, False]]))
    assert counts[1, 0] == 1 and counts[0, -1] == 1 and counts.sum() == 3


def test_a_converted_checkpoint_keeps_its_figures(tmp_path):
    result = prune(chosen=recipe("none"), out=tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "packed", "packed")
    dense, packed = load_importance_maps(tmp_path / "dense"), load_importance_maps(tmp_path / "packed")
    assert dense.keys() == packed.keys() and all(np.array_equal(dense[name], packed[name]) for name in dense)
    assert IMPORTANCE_MAPS in result.manifest.files
