"""`drot.sensitivity` against an independent computation, and what it leaves as it was."""

import json

import pytest
import torch
from runs import TOKENS, named_linears, one_shot, prune
from small_models import small_model

import drot
from drot.checkpoint.rotations import open_rotations
from drot.core.errors import UserError
from drot.model.decoder import DecoderModel
from drot.pipeline.sensitivity import SensitivityResult


def recipe(mode="layer", method="wanda", **fields):
    return one_shot(mode, method=method, **fields)


def measure(model, chosen, **options):
    return drot.sensitivity(model, chosen, calibration=TOKENS, device="cpu", **options)


def inputs_of(model, linear):
    """The inputs [tokens, in] of a linear in fp64, from the model's own forward pass."""
    seen = []
    handle = linear.module.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].flatten(0, 1).double())
    )
    model(TOKENS)
    handle.remove()
    return torch.cat(seen)


def removed(score, pattern):
    """The weights that Wanda removes, by sorting."""
    if pattern == "0.5":
        return score.argsort(1).argsort(1) < score.shape[1] // 2
    n, m = map(int, pattern.split(":"))
    return (score.unflatten(1, (-1, m)).argsort(-1).argsort(-1) < m - n).flatten(1)


@pytest.mark.parametrize(
    ("boundary", "name"),
    [("input", "k_proj"), ("input", "up_proj"), ("input", "down_proj"), ("residual", "down_proj")],
)
def test_against_the_outputs_in_fp64(boundary, name, tmp_path):
    """‖X Wᵀ - X Ŵᵀ‖² / ‖X Wᵀ‖² of layer 1 with X from the dense model, rotated by the trained rotations."""
    chosen, file = recipe(boundary=boundary, hessians="dense"), tmp_path / "rotations"
    prune(small_model("qwen3"), chosen, save_rotations_to=file)
    model = small_model("qwen3")
    found = measure(model, chosen, rotations=file)
    handle = DecoderModel(model)
    rotations, _ = open_rotations(file, handle)
    layer = handle.layers[1]
    linear = layer.linears[name]
    x, weight = inputs_of(model, linear), linear.weight.double()
    if name == "down_proj":
        r3 = torch.block_diag(*rotations[1].r3)
        x, weight = x @ r3, rotations[2 if boundary == "residual" else 1].r1.T @ weight @ r3
    else:
        norm = layer.module.get_submodule(linear.group.norm).weight.double()
        x, weight = x / norm @ rotations[1].r1, weight * norm @ rotations[1].r1
    score = weight.abs() * x.square().sum(0).sqrt()
    for pattern in ("2:4", "4:8", "0.5"):
        lost = x @ weight.masked_fill(~removed(score, pattern), 0).T
        expected = float(lost.square().sum() / (x @ weight.T).square().sum())
        assert found.errors[linear.full_name][pattern] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "mode"), [("magnitude", "none"), ("wanda", "shared"), ("sparsegpt", "layer")]
)
def test_every_linear_at_every_sparsity(method, mode):
    """The model is not changed. More freedom for the mask, or fewer weights to remove, lowers the error."""
    model = small_model("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chosen = recipe(mode, method, keep=("layers.0.*",), sparsity_of={"down_proj": "3:4", "o_proj": "4:8"})
    phases = []
    result = measure(model, chosen, progress=lambda event: phases.append((event.phase, event.layer)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert list(result.errors) == list(named_linears(model))
    assert result.sparsities == ["2:4", "4:8", "0.5", "3:4"]
    for errors in result.errors.values():
        assert 0 < errors["3:4"] < errors["2:4"] < 1
    means = [sum(row[text] for row in result.errors.values()) / 21 for text in ("3:4", "4:8", "2:4")]
    assert means == sorted(means)
    assert [layer for phase, layer in phases if phase == "sensitivity"] == [0, 1, 2]
    assert ("rotate" in {phase for phase, _ in phases}) == (mode != "none")
    data = json.loads(json.dumps(result.to_dict()))
    assert data["errors"] == result.errors and data["recipe"]["pruning"]["keep"] == ["layers.0.*"]
    own = {
        name: errors[str(chosen.pruning.sparsity_for(name))]
        for name, errors in list(result.errors.items())[7:]
    }
    name, sparsity, error = result.largest(1)[0]
    assert (error, sparsity) == (max(own.values()), str(chosen.pruning.sparsity_for(name)))
    assert len(result.largest(99)) == 14


def test_the_first_layer_is_pruned_with_this_error():
    """In layer 0 the inputs of q, k and v are those of a pruning run, without and with a rotation."""
    for mode in ("none", "layer"):
        chosen = recipe(mode, "sparsegpt", hessians="dense")
        pruned = prune(chosen=chosen).manifest
        found = measure(small_model("llama"), chosen)
        for name in ("q_proj", "k_proj", "v_proj"):
            expected = pruned.layers[0].linears[name].output_error
            assert found.errors[f"layers.0.self_attn.{name}"]["2:4"] == pytest.approx(expected, rel=1e-6)


def test_a_sparsity_that_does_not_fit_a_linear_has_no_error():
    """12 divides the intermediate size 48 only. The block size 12 is rounded to 8 for 4:8."""
    chosen = recipe(method="sparsegpt", block_size=12, sparsity_of={"down_proj": "6:12"})
    found = measure(small_model("llama"), chosen)
    assert found.sparsities == ["2:4", "4:8", "0.5", "6:12"]
    for name, errors in found.errors.items():
        fits = name.endswith(("down_proj", "o_proj"))  # o_proj has 48 inputs too
        assert (errors["6:12"] is not None) == fits


def test_a_model_that_does_not_fit_is_refused():
    for options, message in (
        (dict(chosen=recipe(keep=("layers.7.*",))), "'layers.7.\\*' of `keep` matches no linear"),
        (dict(chosen=recipe(mode="none"), rotations="file"), '`rotations` need `mode="layer"`'),
    ):
        with pytest.raises(UserError, match=message):
            measure(small_model("llama"), **options)
    broken = small_model("llama")
    broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="layer 1, up_proj: weight must be finite"):
        measure(broken, recipe(mode="none"))


def test_nothing_is_pruned():
    result = measure(small_model("llama"), recipe(keep=("*",)))
    assert isinstance(result, drot.SensitivityResult) and drot.SensitivityResult is SensitivityResult
    assert result.largest(3) == []
