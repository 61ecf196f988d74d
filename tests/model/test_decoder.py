"""The handles to a model and its layers: what they replace for a while is there again afterwards."""

import pytest
import torch
from small_models import random_tokens, small_model
from torch import nn

import drot
from drot.core.errors import UserError
from drot.model.decoder import DecoderModel


def empty(shape, dtype):
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "gemma4_text-lends"])
def test_the_recorded_arguments_compute_the_model(family):
    """Layer after layer from the recorded input, with the masks and positions of the model's own forward."""
    model, tokens = small_model(family), random_tokens(3, 20)
    handle = DecoderModel(model)
    hidden, kwargs = handle.record(tokens, empty)
    assert torch.equal(hidden, model.model.embed_tokens(tokens))
    for layer in handle.layers:
        hidden = layer(hidden, kwargs[layer.index])
    logits = handle.logits_of(model.lm_head(model.model.norm(hidden)))
    torch.testing.assert_close(logits, model(tokens).logits)


def test_the_layers_are_back_after_an_error():
    model = small_model("llama")
    layers = model.model.layers
    with pytest.raises(IndexError):
        DecoderModel(model).record(torch.tensor([[10**6]]), empty)
    assert model.model.layers is layers


def test_a_module_that_replaced_a_linear_is_found_and_has_no_plain_weight():
    model = small_model("llama")
    linear = DecoderModel(model).layers[2].linears["up_proj"]
    linear.module = wrapped = nn.Sequential(linear.module)
    assert model.model.layers[2].mlp.up_proj is wrapped and linear.module is wrapped
    with pytest.raises(UserError, match=r"mlp\.up_proj must be a plain"):
        _ = linear.weight


def test_a_copy_of_a_layer_is_its_own():
    layer = DecoderModel(small_model("qwen3")).layers[1]
    copy = layer.copy(dtype=torch.float64)
    assert (copy.index, copy.dtype, layer.dtype) == (1, torch.float64, torch.float32)
    copy.linears["q_proj"].weight.zero_()
    assert bool(layer.linears["q_proj"].weight.any())


def test_a_copy_in_another_dtype_shares_nothing():
    model = DecoderModel(small_model("qwen2", dtype=torch.bfloat16))
    layer = model.layers[0]
    wide, same = layer.copy(dtype=torch.float32), layer.copy(dtype=torch.bfloat16)
    for (name, tensor), other, equal in zip(
        layer.module.named_parameters(), wide.module.parameters(), same.module.parameters(), strict=True
    ):
        assert other.dtype == torch.float32 and equal.dtype == torch.bfloat16, name
        assert torch.equal(other, tensor.float()) and torch.equal(equal, tensor)
        assert equal.data_ptr() != tensor.data_ptr()
        assert isinstance(other, nn.Parameter) and other.requires_grad == tensor.requires_grad


def test_the_share_of_zeros():
    model = small_model("llama")
    weights = [linear.weight for layer in DecoderModel(model).layers for linear in layer.linears.values()]
    weights[0].zero_()
    weights[-1][:, ::2] = 0
    zeros = weights[0].numel() + weights[-1].numel() // 2
    assert DecoderModel(model).zero_share() == zeros / sum(weight.numel() for weight in weights)


@pytest.mark.parametrize("path", ["mlp.up_proj", "self_attn.q_proj", "input_layernorm"])
def test_layers_that_share_a_weight_are_refused(path):
    """The second layer would be pruned, or its norm folded, after the first has changed the weight."""
    model = small_model("llama")
    DecoderModel(model).check()
    first, second = (model.model.layers[index].get_submodule(path) for index in (0, 2))
    second.weight = first.weight
    with pytest.raises(UserError, match=r"layer 2: \w+.*\w+ shares its weight with layer 0: .* its own copy"):
        drot.prune(model, calibration=random_tokens(2, 16), device="cpu")
    second.weight = nn.Parameter(
        first.weight.detach().view_as(first.weight)
    )  # another object, the same memory
    with pytest.raises(UserError, match="shares its weight"):
        DecoderModel(model).check()
