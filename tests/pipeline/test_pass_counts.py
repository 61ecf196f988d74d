"""How often a run computes each part of a layer, and how often it factorises a Hessian."""

import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
from counted_flops import counted_flops
from runs import one_shot, prune
from small_models import random_rotations, random_tokens, small_model

import drot
from drot.calibration import hessian as hessians
from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.config import resolve
from drot.model.decoder import DecoderModel
from drot.pipeline.layer import prune_layer
from drot.pipeline.objective import layer_objective
from drot.pruning import solve
from drot.rotation import importance

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TOKENS = random_tokens(4, 40)  # one batch
PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def recipe(mode="none", hessians="sequential", **fields):
    return one_shot(mode, hessians=hessians, steps=2, **fields)


def calls_of_parts(chosen, layer=1):
    """How often the linears of a layer are computed for the calibration batch."""
    model, counts = small_model("llama"), Counter()

    def count(part):
        def hook(module, args, output):
            counts[part] += len(args[0]) == len(TOKENS)  # the checks of the rotation take one sequence

        return hook

    for part in PARTS:
        model.model.layers[layer].get_submodule(part).register_forward_hook(count(part))
    prune(model, chosen, calibration=TOKENS)
    return [counts[part] for part in PARTS]


#: q_proj for the inputs of o_proj; o_proj for the inputs of the MLP, with its outputs kept; gate_proj for the
#: inputs of down_proj, which are kept; down_proj for the output of the layer
PRUNING = [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("chosen", "training"),
    [
        (recipe(), [0, 0, 0, 0]),
        (recipe("layer", "sequential"), [1, 1, 1, 0]),  # one pass up to down_proj
        (recipe("layer", "dense"), [1, 1, 1, 1]),  # one pass, whose output is the next layer's input
        (recipe("shared"), [1, 1, 1, 1]),
        (recipe("layer", "dense", method="magnitude"), [1, 1, 1, 1]),
    ],
    ids=["none", "layer", "dense", "shared", "magnitude"],
)
def test_a_layer_is_computed_as_often_as_its_groups_need(chosen, training):
    expected = [a + b for a, b in zip(PRUNING, training, strict=True)]
    assert calls_of_parts(chosen) == expected


def test_inputs_of_down_that_are_too_large_are_computed_twice(monkeypatch):
    monkeypatch.setattr("drot.calibration.layer_pass.KEPT_SHARE", 0)
    assert calls_of_parts(recipe()) == [1, 1, 2, 1]


def test_the_target_of_the_dense_model_takes_one_pass_more():
    """Of the rotated copy of the layer; and o and down of the dense weights in the pruned model."""
    alone = calls_of_parts(recipe("layer", "dense"))
    found = calls_of_parts(recipe("layer", "dense", target="dense"))
    assert [count - before for count, before in zip(found, alone, strict=True)] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("mode", "method", "target"),
    [
        *((mode, "sparsegpt", "self") for mode in ("none", "layer", "dense", "without R3")),
        *(("layer", "sparsegpt", "dense"), ("none", "wanda", "self"), ("layer", "wanda", "dense")),
    ],
)
def test_one_factorisation_for_each_input(mode, method, target, monkeypatch):
    """4 a layer in place of 7, as many for the figures before the rotation, but 3 without R3, which leaves
    down's inputs as they are; 4 for the training. Wanda takes factors for the dense target only."""
    sizes = []

    def counting(matrix, *args):
        sizes.append(len(matrix))
        return real(matrix, *args)

    real = hessians.factorize
    monkeypatch.setattr(hessians, "factorize", counting)
    monkeypatch.setattr(importance, "factorize", counting)
    chosen = recipe(
        "none" if mode == "none" else "layer",
        "dense" if mode == "dense" else "sequential",
        method=method,
        target=target,
        down_rotation="none" if mode == "without R3" else 16,
    )
    prune(chosen=chosen, calibration=TOKENS)
    inputs = {"attention": 32, "o": 48, "mlp": 32, "down": 48}
    expected = list(inputs.values()) if method == "sparsegpt" or target == "dense" else []
    if method == "sparsegpt" and mode != "none":
        rotated = ["attention", "o", "mlp"] + ["down"] * (mode != "without R3")
        expected += [*inputs.values(), *(inputs[group] for group in rotated)]
    assert Counter(sizes) == Counter(3 * expected)


def test_sensitivity_factorises_each_input_once(monkeypatch):
    """For all linears and all sparsities."""
    calls = []
    real = hessians.factorize
    monkeypatch.setattr(hessians, "factorize", lambda *args: calls.append(args) or real(*args))
    drot.sensitivity(small_model("llama"), recipe(), calibration=TOKENS, device="cpu")
    assert len(calls) == 3 * 4


def test_the_hessians_of_training_are_of_the_norms_without_weights():
    """Against the folded layer: the inputs of its linears, in fp64."""
    model = DecoderModel(small_model("qwen3"))
    stream = CalibrationStream.embed(model, TOKENS, torch.device("cpu"))
    layer, chosen = model.layers[1], resolve(recipe("layer", method="wanda"))
    before = stream.hidden_states.clone()
    objective, _ = layer_objective(layer, stream, chosen)
    assert torch.equal(stream.hidden_states, before)
    seen = {}
    for name in ("q_proj", "gate_proj"):
        layer.linears[name].module.register_forward_pre_hook(
            lambda module, args, name=name: seen.update({name: args[0].flatten(0, 1).double()})
        )
    expected_output = layer.module(before, **stream.layer_kwargs[1])
    norms = {"q_proj": layer.module.input_layernorm, "gate_proj": layer.module.post_attention_layernorm}
    matrices = objective.r1_metric.matrix[0].chunk(2)
    for (name, norm), found in zip(norms.items(), matrices, strict=True):
        x = seen[name] / norm.weight.double()
        torch.testing.assert_close(found.double(), 2 / len(TOKENS) * x.T @ x, rtol=1e-4, atol=1e-4)
    layer_objective(layer, stream, chosen, advance=True)
    assert torch.equal(stream.hidden_states, expected_output)


def test_the_operations_of_a_pruned_layer_are_those_of_the_formulas(monkeypatch):
    """benchmarks/pass_flops.py, for Hessians of two to seven panels, against the products of a run."""
    operations = runpy.run_path(str(ROOT / "benchmarks/pass_flops.py"))["operations"]
    monkeypatch.setattr(hessians, "PANEL_COLUMNS", {"cpu": 16})
    sizes = dict(
        hidden_size=48, intermediate_size=112, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    chosen = resolve(recipe("layer"))

    def pass_of(layer, stream, **options):
        # the attention is in no formula: a layer without it
        block = layer.module.self_attn
        block.forward = lambda hidden_states, **others: (attention(block, hidden_states), None)
        return LayerPass(layer, stream, **options)

    def pruned(rotated=False, chosen=chosen):
        model = DecoderModel(small_model("llama", **sizes))
        stream = CalibrationStream.embed(model, TOKENS, torch.device("cpu"))
        dense = pass_of(model.layers[0].copy(), stream.copy(), fixed=True)
        layer_pass = pass_of(model.layers[0], stream)
        rotation = random_rotations(model.model)[0] if rotated else None
        to_dense = dense if chosen.pruning.target == "dense" else None

        def work():
            prune_layer(layer_pass, chosen, dense=to_dense, rotation=rotation)
            layer_pass.advance()
            if to_dense is not None:
                dense.advance()

        return counted_flops(work)

    def attention(block, x):
        q, k, v = block.q_proj(x), block.k_proj(x), block.v_proj(x)
        return block.o_proj(q + torch.cat([k, v], -1))

    parts = operations(48, 112, 2, 1, 16, TOKENS.numel(), 16, "cpu")
    cost = {name: sum(costs.values()) for name, costs in parts.items()}
    figures = (
        cost["figures: Hessians and weights before the rotation"] + cost["figures: sweep before the rotation"]
    )
    maps = cost["figures: maps"]
    assert pruned(rotated=True) - pruned() == figures + maps / 2
    names = (
        "forward passes: pruning",
        "Hessians of pruning",
        "sweep: update right of each block",
        "tr(W H Wᵀ)",
    )
    assert pruned() == sum(cost[name] for name in names) + maps / 2

    monkeypatch.setattr(solve, "ADMM_SETTLED", -1)  # so that every group takes all iterations
    monkeypatch.setattr(solve, "ADMM_ITERATIONS", 8)
    balanced = operations(48, 112, 2, 1, 16, TOKENS.numel(), 16, "cpu", "balanced", 8)
    added = sum(sum(balanced[name].values()) for name in balanced.keys() - parts.keys())
    # a block takes a triangular solve, which is not counted, and a product
    inverses = sum(balanced["ADMM: inverses"].values())
    found = pruned(chosen=resolve(recipe("layer", solve="admm", target="dense"))) - pruned()
    assert found == added + inverses
