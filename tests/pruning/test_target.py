"""The dense model as the target of a linear, against least squares over the tokens in fp64."""

import copy

import pytest
import torch
from small_models import random_tokens, small_model

from drot.calibration.dense_reference import DenseReference, TargetStatistics
from drot.calibration.hessian import factorize
from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.model.families import INPUT_GROUPS, architecture_of, decoder_layers, layer_linears
from drot.pruning import dense_target


def test_the_target_is_the_least_squares_fit():
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    weight, x, residual = draw(8, 12), draw(100, 12), draw(100, 8)
    x_dense = x + 0.3 * draw(100, 12)
    scale = 2 / 100
    statistics = TargetStatistics(scale * x.T @ x, scale * (x_dense - x).T @ x, scale * residual.T @ x)
    wanted = x_dense @ weight.T + residual
    fit = torch.linalg.lstsq(x, wanted).solution.T
    factor = factorize(statistics.hessian, 0.0)
    full = dense_target(weight, statistics, factor, share=1.0)
    torch.testing.assert_close(full, fit, rtol=1e-9, atol=1e-9)
    half = dense_target(weight, statistics, factor, share=0.5)
    torch.testing.assert_close(half, (weight + fit) / 2, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("role", ["k_proj", "o_proj", "up_proj", "down_proj"])
def test_statistics_are_those_of_the_tokens(family, role):
    """H, C and E from the inputs that a forward pass of both layers gives."""
    model, dense = small_model(family).double(), small_model(family).double()
    arch = architecture_of(model.config)
    layer, dense_layer = decoder_layers(model, arch)[1], decoder_layers(dense, arch)[1]
    for linear in layer_linears(layer, arch).values():
        linear.weight.mul_(torch.rand_like(linear.weight) > 0.5)
    stream = CalibrationStream.embed(model, arch, random_tokens(3, 10), torch.device("cpu"))
    inputs = CalibrationStream(stream.hidden_states + 0.1, stream.layer_kwargs)
    group = next(group for group, roles in INPUT_GROUPS.items() if role in roles)
    reference = DenseReference(LayerPass(dense_layer, inputs, 1, arch))
    found = reference.statistics(LayerPass(layer, stream, 1, arch), group)

    def pass_through(module, states):
        seen = {}
        linear = layer_linears(module, arch)[role]
        handle = linear.register_forward_hook(lambda m, a, out: seen.update(x=a[0], y=out))
        after = module.post_attention_layernorm.register_forward_pre_hook(
            lambda m, a: seen.update(middle=a[0])
        )
        out = module(states, **stream.layer_kwargs[1])
        handle.remove(), after.remove()
        total = {"o_proj": seen["middle"], "down_proj": out}.get(role)
        return seen["x"].flatten(0, 1), None if total is None else (total - seen["y"]).flatten(0, 1)

    x, rest = pass_through(layer, stream.hidden_states)
    x_dense, rest_dense = pass_through(dense_layer, inputs.hidden_states)
    tolerance = dict(rtol=1e-4, atol=1e-5)  # the sums are in fp32
    torch.testing.assert_close(found.hessian.double(), 2 / 3 * x.T @ x, **tolerance)
    torch.testing.assert_close(found.input_change.double(), 2 / 3 * (x_dense - x).T @ x, **tolerance)
    if rest is None:
        assert found.residual_change is None
    else:
        expected = 2 / 3 * (rest_dense - rest).T @ x
        torch.testing.assert_close(found.residual_change.double(), expected, **tolerance)
    # o_proj reads the layer's input as residual, which differs by 0.1 everywhere
    if role == "o_proj":
        torch.testing.assert_close(rest_dense - rest, torch.full_like(rest, 0.1))


def test_without_a_difference_the_target_is_the_weight():
    model = small_model("llama")
    arch = architecture_of(model.config)
    layer = decoder_layers(model, arch)[0]
    stream = CalibrationStream.embed(model, arch, random_tokens(3, 10), torch.device("cpu"))
    reference = DenseReference(LayerPass(copy.deepcopy(layer), stream.offloaded_copy(), 0, arch))
    weight = layer_linears(layer, arch)["down_proj"].weight
    statistics = reference.statistics(LayerPass(layer, stream, 0, arch), "down")
    target = dense_target(weight, statistics, factorize(statistics.hessian, 0.01), share=1.0)
    torch.testing.assert_close(target, weight, rtol=1e-5, atol=1e-5)
