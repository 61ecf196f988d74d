"""The dense model as the target of a linear, against least squares over the tokens in fp64."""

import pytest
import torch
from small_models import random_tokens, small_model

from drot.calibration.hessian import factorize
from drot.calibration.layer_pass import LayerPass, TargetStatistics, target_statistics
from drot.calibration.stream import CalibrationStream
from drot.model.decoder import DecoderModel
from drot.pruning import dense_target


def test_the_target_is_the_least_squares_fit():
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    weight, x, residual = draw(8, 12), draw(100, 12), draw(100, 8)
    x_dense = x + 0.3 * draw(100, 12)
    hessian = 2 / 100 * x.T @ x
    factor = factorize(hessian, 0.0)
    of_inputs = TargetStatistics(hessian, input_change=2 / 100 * (x_dense - x).T @ x)
    y, y_dense = x @ weight.T, x_dense @ weight.T + residual
    of_outputs = TargetStatistics(hessian, output_change=2 / 100 * (y_dense - y).T @ x)
    for statistics, wanted in ((of_inputs, x_dense @ weight.T), (of_outputs, y_dense)):
        fit = torch.linalg.lstsq(x, wanted).solution.T
        full = dense_target(weight, statistics, factor, share=1.0)
        torch.testing.assert_close(full, fit, rtol=1e-9, atol=1e-9)
        half = dense_target(weight, statistics, factor, share=0.5)
        torch.testing.assert_close(half, (weight + fit) / 2, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen2", "granite"])
@pytest.mark.parametrize("name", ["k_proj", "o_proj", "up_proj", "down_proj"])
def test_statistics_are_those_of_the_tokens(family, name):
    """H, and C or E of the outputs, from the inputs that a forward pass of both layers gives."""
    model = DecoderModel(small_model(family).double())
    layer, dense_layer = model.layers[1], model.layers[1].copy()
    for linear in layer.linears.values():
        linear.weight.mul_(torch.rand_like(linear.weight) > 0.5)
    stream = CalibrationStream.embed(model, random_tokens(3, 10), torch.device("cpu"))
    inputs = CalibrationStream(stream.hidden_states + 0.1, stream.layer_kwargs)
    dense = LayerPass(dense_layer, inputs, fixed=True)
    dense_states = inputs.hidden_states.clone()  # the stream of a fixed layer advances with its last group
    found = target_statistics(LayerPass(layer, stream), dense, layer.linears[name].group)

    def pass_through(layer, states):
        seen = {}
        linear = layer.linears[name].module
        handle = linear.register_forward_hook(lambda m, a, out: seen.update(x=a[0]))
        after = layer.module.post_attention_layernorm.register_forward_pre_hook(
            lambda m, a: seen.update(middle=a[0])
        )
        out = layer.module(states, **stream.layer_kwargs[1])
        handle.remove(), after.remove()
        written = {"o_proj": seen["middle"], "down_proj": out}.get(name)
        return seen["x"].flatten(0, 1), None if written is None else written.flatten(0, 1)

    x, y = pass_through(layer, stream.hidden_states)
    x_dense, y_dense = pass_through(dense_layer, dense_states)
    tolerance = dict(rtol=1e-4, atol=1e-5)  # the sums are in fp32
    torch.testing.assert_close(found.hessian.double(), 2 / 3 * x.T @ x, **tolerance)
    if y is None:
        assert found.output_change is None
        torch.testing.assert_close(found.input_change.double(), 2 / 3 * (x_dense - x).T @ x, **tolerance)
    else:
        assert found.input_change is None
        change = (y_dense - y) / (0.22 if family == "granite" else 1)
        torch.testing.assert_close(found.output_change.double(), 2 / 3 * change.T @ x, **tolerance)


def test_without_a_difference_the_target_is_the_weight():
    model = DecoderModel(small_model("llama"))
    layer = model.layers[0]
    stream = CalibrationStream.embed(model, random_tokens(3, 10), torch.device("cpu"))
    dense = LayerPass(layer.copy(), stream.offloaded_copy(), fixed=True)
    down = layer.linears["down_proj"]
    statistics = target_statistics(LayerPass(layer, stream), dense, down.group)
    target = dense_target(down.weight, statistics, factorize(statistics.hessian, 0.01), share=1.0)
    torch.testing.assert_close(target, down.weight, rtol=1e-5, atol=1e-5)
