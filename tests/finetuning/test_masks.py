"""The parts of a fine-tuning: the masked LoRA layer, gradients under the mask, rounding, and the text."""

import pytest
import torch
from small_models import random_tokens, small_model

from drot.config import CalibrationConfig, FinetuneConfig
from drot.core.errors import UserError
from drot.finetuning.adapter import MaskedLora, add_adapter, merge_adapter
from drot.finetuning.masks import KeepMask, choose_full, pruned_linears, removed_weights, round_trained
from drot.finetuning.text import split_text
from drot.model.decoder import DecoderModel


def pruned_model(family="llama-biased", **options):
    """A small model, half of whose weights are 0, at random."""
    model = small_model(family, **options)
    for _, linear in pruned_linears(model):
        linear.weight.data.masked_fill_(torch.rand_like(linear.weight, dtype=torch.float32) < 0.5, 0)
    return model


def with_random_b(model, **settings):
    """The model with masked LoRA whose B is not 0."""
    adapted = add_adapter(model, FinetuneConfig(**settings))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    return adapted


def test_only_lora_is_trained_and_in_fp32():
    model = pruned_model(dtype=torch.bfloat16)
    adapted = with_random_b(model)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert len(trained) == 2 * 7 * 3
    assert sum(isinstance(module, MaskedLora) for module in adapted.modules()) == 7 * 3


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "lfm2", "granitemoehybrid-dense", "nemotron_h-dense", "hyperclovax"]
)
def test_all_layers_of_a_hybrid_are_trained(family):
    """Also the linears of linear attention, of convolutions and of Mamba, but for its last one, which kernels
    read past an adapter; and all norms by `full`."""
    model = pruned_model(family)
    paths = {name for name, _ in pruned_linears(model)}
    if family in ("granitemoehybrid-dense", "nemotron_h-dense"):
        paths = {name for name in paths if not name.endswith("out_proj")}
    adapted = add_adapter(model, FinetuneConfig())
    assert sum(isinstance(module, MaskedLora) for module in adapted.modules()) == len(paths)
    choose_full(model := pruned_model(family))
    layers = DecoderModel(model).layers
    assert all(norm.weight.requires_grad for layer in layers for norm in (*layer.norms, *layer.post_norms))


def test_forward_and_gradients_against_the_equation():
    """y = x (W + M ∘ (alpha/r) B A)ᵀ + b in fp64, with autograd's own gradients."""
    adapted = with_random_b(pruned_model(), rank=4, alpha=6.0, dropout=0.0).double().train()
    layer = next(module for module in adapted.modules() if isinstance(module, MaskedLora))
    weight, bias = layer.linear.weight, layer.linear.bias
    x = torch.randn(2, 5, weight.shape[1], dtype=torch.float64, requires_grad=True)
    a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    y = x @ (weight + (weight != 0) * (6 / 4) * (b @ a)).T + bias
    upstream = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, a, b), upstream)
    torch.testing.assert_close(layer(x), y)
    for got, wanted in zip(torch.autograd.grad(layer(x), (x, a, b), upstream), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(layer.eval()(x), y)


def test_dropout_acts_on_the_adapter_only():
    adapted = with_random_b(pruned_model(), dropout=0.5).train()
    layer = next(module for module in adapted.modules() if isinstance(module, MaskedLora))
    x = torch.randn(1, layer.linear.in_features)
    torch.manual_seed(1)
    dropped = layer.lora_dropout["default"](x)
    torch.manual_seed(1)
    torch.testing.assert_close(layer(x), layer.linear(x) + dropped @ layer.get_delta_weight("default").T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3-biased", "phi3"])
def test_the_merge_is_exact(family, dtype):
    """Bit for bit: the model that was trained and the merged model have the same logits and zeros."""
    model = pruned_model(family, dtype=dtype)
    zeros, tokens = removed_weights(model), random_tokens(2, 16)
    adapted = with_random_b(model).eval()
    trained = adapted(tokens).logits
    merged = merge_adapter(adapted)
    assert torch.equal(merged(tokens).logits, trained)
    assert all(torch.equal(zeros[name], linear.weight == 0) for name, linear in pruned_linears(merged))


def test_an_ordinary_adapter_merged_under_a_mask_is_not_exact():
    """Why the mask is part of the training: B A fills the zeros."""
    model, tokens = pruned_model(), random_tokens(2, 16)
    zeros = removed_weights(model)
    adapted = with_random_b(model, keep_adapter=True).eval()
    trained = adapted(tokens).logits
    merged = merge_adapter(adapted)
    torch.testing.assert_close(merged(tokens).logits, trained, atol=1e-4, rtol=1e-4)
    for name, linear in pruned_linears(merged):
        linear.weight.data.masked_fill_(zeros[name], 0)
    assert not torch.allclose(merged(tokens).logits, trained, atol=1e-2)


def test_adam_with_weight_decay_never_moves_a_zero():
    model = pruned_model("qwen3")
    zeros = removed_weights(model)
    choose_full(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.1)
    keep = KeepMask()
    keep.on_train_begin(None, None, None, model=model)
    for step in range(3):
        optimizer.zero_grad()
        tokens = random_tokens(2, 16) if step else random_tokens(1, 8)
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
    keep.on_train_end(None, None, None)
    for name, linear in pruned_linears(model):
        assert torch.equal(linear.weight == 0, zeros[name])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert not optimizer.state[linear.weight][moment][zeros[name]].any()
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()  # the hooks are gone
    assert any(linear.weight.grad[zeros[name]].any() for name, linear in pruned_linears(model))


def test_full_trains_linears_and_norms_only():
    model = pruned_model("qwen3-biased")
    choose_full(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("norm" in name or "_proj" in name), name


def test_rounding_keeps_the_zeros():
    """A kept weight that fp16 cannot represent becomes its smallest normal number instead of 0."""
    model = pruned_model()
    _, linear = next(pruned_linears(model))
    row, column = (linear.weight != 0).nonzero()[0].tolist()
    linear.weight.data[row, column] = 1e-9
    zeros = removed_weights(model)
    round_trained(model, zeros, torch.float16)
    assert all(torch.equal(zeros[name], module.weight == 0) for name, module in pruned_linears(model))
    assert linear.weight[row, column] == torch.finfo(torch.float16).tiny
    assert all(torch.equal(p, p.half().float()) for p in model.parameters())
    linear.weight.data[zeros["layer 0, q_proj"]] = 1.0
    with pytest.raises(RuntimeError, match="layer 0, q_proj: a removed weight is no longer 0"):
        round_trained(model, zeros, torch.float16)


class Letters:
    """A tokenizer with one token a letter."""

    def __call__(self, text, **options):
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})


def test_the_held_out_text_is_not_trained_on(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a" * 50 + "b" * 20)
    text = CalibrationConfig(source=str(file), nsamples=30, seqlen=10)
    training, held_out = split_text(FinetuneConfig(text=text, held_out=2), Letters())
    assert training.shape == (30, 10) and (training == ord("a")).all()
    assert held_out.shape == (2, 10) and (held_out == ord("b")).all()
    with pytest.raises(UserError, match="more than 70 tokens, for 6 held-out sequences and one to train on"):
        split_text(FinetuneConfig(text=text, held_out=6), Letters())


def test_several_texts_are_trained_on_and_held_out_by_their_shares(tmp_path):
    """The end of each text is held out of that text."""
    for letter, end in (("a", "x" * 10), ("b", "y" * 20)):
        (tmp_path / f"{letter}.txt").write_text(letter * 50 + end)
    text = CalibrationConfig(source=f"{tmp_path}/a.txt,{tmp_path}/b.txt=2", nsamples=9, seqlen=10)
    training, held_out = split_text(FinetuneConfig(text=text, held_out=3), Letters())
    for found, letters in ((training, "ab"), (held_out, "xy")):
        counts = [(found == ord(letter)).all(dim=1).sum().item() for letter in letters]
        assert counts == [len(found) // 3, 2 * len(found) // 3]
    with pytest.raises(UserError, match="`held_out` must give every text of `source` a sequence"):
        split_text(FinetuneConfig(text=text, held_out=1), Letters())
