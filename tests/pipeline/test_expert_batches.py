"""Experts are computed together: with the results of each alone, and no more launches for more experts."""

import pytest
import torch
from runs import TOKENS, named_linears, one_shot, prune, recipe
from small_models import small_model
from torch.utils._python_dispatch import TorchDispatchMode

from drot.calibration import hessian
from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.config import resolve
from drot.model import inputs
from drot.model.decoder import DecoderModel
from drot.pipeline.layer import prune_layer
from drot.pipeline.objective import layer_objective
from drot.pruning import solve
from drot.rotation import objective as objectives

CPU = torch.device("cpu")
FAMILIES = ["qwen3_moe", "gpt_oss", "qwen3_next"]


@pytest.fixture
def one_by_one(monkeypatch):
    """Lets a test go over to batches of one expert."""

    def set_limits():
        monkeypatch.setattr(hessian, "BATCH_BYTES", 1)
        monkeypatch.setattr(inputs, "ROUTED_BYTES", 1)
        monkeypatch.setattr(objectives, "STACK_BYTES", 1)

    return set_limits


def layer_of(family, chosen, **changes):
    """A layer with experts, the calibration stream in front of it, and the resolved recipe."""
    model = DecoderModel(small_model(family, **changes), route_all=chosen.pruning.route_all)
    stream = CalibrationStream.embed(model, TOKENS, CPU)
    stream.advance(model.layers[0])
    resolved = resolve(chosen, device="cpu", positions=128)
    return model.layers[1], stream, resolved


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_pruned_as_each_alone(family, one_by_one):
    chosen = one_shot("none")
    together = prune(small_model(family), chosen)
    one_by_one()
    alone = prune(small_model(family), chosen)
    found, expected = named_linears(together.model), named_linears(alone.model)
    for name, linear in expected.items():
        torch.testing.assert_close(found[name].weight, linear.weight, rtol=1e-3, atol=1e-4)
    for of_layer, of_alone in zip(together.manifest.layers, alone.manifest.layers, strict=True):
        for name, linear in of_alone.linears.items():
            assert of_layer.linears[name].tokens == linear.tokens
            assert of_layer.linears[name].output_error == pytest.approx(linear.output_error, rel=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sparsity": "0.5"},
        {"objective": "entropy"},
        {"keep": "*.experts.1.*"},
        {"down_rotation": 8},
        {"down_rotation": 8, "sparsity": "0.5", "keep": "*.experts.1.*"},
        {"down_rotation": 8, "objective": "entropy"},
    ],
)
def test_the_objective_is_the_sum_over_the_experts(fields, one_by_one):
    chosen = recipe("layer", **{"down_rotation": "none", "product_dtype": "float32"} | fields)
    layer, stream, resolved = layer_of("qwen3_moe", chosen)

    def found():
        objective, damping = layer_objective(layer, stream, resolved)
        generator = torch.Generator().manual_seed(0)
        matrices = [
            torch.linalg.qr(torch.randn(eye.shape, generator=generator)).Q for eye in objective.identity()
        ]
        rotated = sum(stack.weight.numel() for stack in objective._stacks)
        return objective.value_and_grad(*matrices), objective.value(*matrices), damping, rotated

    together = found()
    one_by_one()
    alone = found()
    for value, expected in zip(together[0], alone[0], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(together[1], together[0][0], rtol=1e-4, atol=0)
    assert together[2:] == alone[2:]


class Launches(TorchDispatchMode):
    """Counts the ops that compute."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(experts, monkeypatch):
    """Of the objective's evaluation, and of the pruning of a layer by ADMM."""
    monkeypatch.setattr(solve, "ADMM_SETTLED", -1.0)  # all take as many iterations
    monkeypatch.setattr(solve, "ADMM_ITERATIONS", 8)
    # all tokens for all experts, whose numbers of tokens are then alike
    chosen = recipe("layer", quality="balanced", down_rotation=8, route_all=True)
    layer, stream, resolved = layer_of("qwen3_moe", chosen, num_experts=experts)
    objective, _ = layer_objective(layer, stream, resolved)
    with Launches() as of_objective:
        objective.value_and_grad(*objective.identity())
    with Launches() as of_pruning:
        prune_layer(LayerPass(layer, stream), resolved)
    return of_objective.count, of_pruning.count


def test_more_experts_take_no_more_launches(monkeypatch):
    assert launches(4, monkeypatch) == launches(12, monkeypatch)
