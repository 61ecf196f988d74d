"""The norms, the gated MLPs and the RoPE of a layer that one op computes."""

import pytest
import torch
from small_models import FAMILIES, random_tokens, small_model
from torch import nn

from drot.model import one_op_rope
from drot.model.decoder import DecoderModel
from drot.model.mixins import mix
from drot.model.one_op import GatedMLP, OneOpNorm, use_one_op, use_stock_ops
from drot.model.one_op_rope import OneOpRope


@torch.no_grad()
def random_model(family: str):
    """A small model whose norms have weights other than 1."""
    model = small_model(family)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
    return model


def use(function, model) -> None:
    for layer in DecoderModel(model).layers:
        function(layer.module, layer.family)


def replaced(model: nn.Module) -> dict[str, int]:
    """How many modules of the first layer are OneOpNorms, GatedMLPs and OneOpRopes."""
    modules = list(DecoderModel(model).layers[0].module.modules())
    kinds = (OneOpNorm, GatedMLP, OneOpRope)
    return {kind.__name__: sum(isinstance(m, kind) for m in modules) for kind in kinds}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_logits_stay(family: str) -> None:
    model, tokens = random_model(family), random_tokens(2, 9)
    classes = [type(module) for module in model.modules()]
    before = model(tokens).logits
    use(use_one_op, model)
    use(use_one_op, model)  # a second time changes nothing
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-5, atol=1e-5)
    use(use_stock_ops, model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize(
    ("family", "norms", "mlps", "ropes"),
    [
        ("llama", 2, 1, 1),
        ("qwen3", 4, 1, 1),
        ("phi3", 2, 1, 1),
        ("olmo2", 4, 1, 1),
        ("gemma2", 0, 0, 1),  # norms multiply by 1 + γ, and the activation is GELU
        ("cohere", 0, 1, 0),  # norms subtract the mean, and RoPE turns neighbours
        ("starcoder2", 0, 0, 1),  # no gate
        ("mixtral", 2, 0, 1),  # experts
        ("opt", 0, 0, 0),
    ],
)
def test_which_modules(family: str, norms: int, mlps: int, ropes: int) -> None:
    model = small_model(family)
    use(use_one_op, model)
    assert replaced(model) == {"OneOpNorm": norms, "GatedMLP": mlps, "OneOpRope": ropes}


def test_rope_is_one_op_for_a_prompt_and_a_token(device: str, monkeypatch) -> None:
    """One call for each layer, but none where a gradient is needed, and the tokens of the stock model."""
    calls = []
    rope = one_op_rope.rope
    monkeypatch.setattr(one_op_rope, "rope", lambda *given: calls.append(given[0].shape[2]) or rope(*given))
    model, tokens = small_model("llama").to(device), random_tokens(2, 9).to(device)
    options = dict(max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(tokens), pad_token_id=0)
    wanted = model.generate(tokens, **options)
    use(use_one_op, model)
    assert torch.equal(model.generate(tokens, **options), wanted)
    layers = len(DecoderModel(model).layers)
    assert calls == [9] * layers + [1] * (2 * layers)
    calls.clear()
    embedded = model.get_input_embeddings()(tokens).requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    assert not calls and bool(embedded.grad.any())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attention_with_one_op_has_the_bits_of_the_stock_one(dtype: torch.dtype, device: str) -> None:
    layer = DecoderModel(random_model("llama").to(dtype).to(device)).layers[0]
    attention = layer.module.self_attn
    x = torch.randn(4, 32, attention.config.hidden_size, device=device).to(dtype)
    angle = 30 * torch.rand(1, 32, layer.heads.head_dim // 2, device=device).repeat(1, 1, 2)
    factors = angle.cos().to(dtype), angle.sin().to(dtype)
    stock = attention(x, position_embeddings=factors, attention_mask=None)[0]
    mix(attention, OneOpRope)
    assert torch.equal(attention(x, position_embeddings=factors, attention_mask=None)[0], stock)


@torch.no_grad()
def test_a_norm_in_16_bits(device: str) -> None:
    """Rounded at most as often as by transformers, against fp64."""
    norm = DecoderModel(random_model("llama").to(torch.bfloat16).to(device)).layers[0].norms[0]
    x = 30 * torch.randn(64, norm.weight.shape[0], device=device).bfloat16()
    scale = (x.double().square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    want = norm.weight.double() * x.double() * scale

    def error() -> float:
        return float((norm(x).double() - want).norm() / want.norm())

    stock = error()
    norm.__class__ = type("Norm", (OneOpNorm, type(norm)), {})
    assert error() <= 1.01 * stock < 2**-8
    mixed = norm.float()(x)  # fp32 weights and a bf16 stream, as under autocast
    assert float((mixed.double() - want).norm() / want.norm()) < 2**-8


@torch.no_grad()
def test_a_norm_under_autocast_is_the_stock_one(device: str) -> None:
    """On a GPU torch's rms_norm would return fp32 there, and a stream of twice the bytes would follow."""
    norm = DecoderModel(random_model("llama").to(torch.bfloat16).to(device)).layers[0].norms[0]
    x = 30 * torch.randn(64, norm.weight.shape[0], device=device).bfloat16()
    stock = norm(x)
    norm.__class__ = type("Norm", (OneOpNorm, type(norm)), {})
    assert not norm(x).equal(stock)  # which is rounded once more
    with torch.autocast(device, torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.bfloat16 and found.equal(stock)
