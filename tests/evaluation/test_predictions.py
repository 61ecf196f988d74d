"""Predictions with one decoder layer at a time on the device are those of the whole model."""

import pytest
import torch
from small_models import FAMILIES, random_tokens, save_small_model, small_model

import drot
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig
from drot.core.errors import UserError
from drot.evaluation.agreement import agreement
from drot.evaluation.models import open_model
from drot.evaluation.perplexity import perplexity, perplexity_of
from drot.evaluation.predictions import predict
from drot.model.decoder import DecoderModel
from drot.sparse.fused import FusedLinear, FusedRotation, fuse

TOKENS = random_tokens(1, 200)[0]
SEQLEN = 24


def assert_same(model, device, rel=1e-5):
    """Streamed and whole, the model has the same perplexity and the same predictions."""
    streamed = predict(model, TOKENS, SEQLEN, torch.device(device))
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    got = perplexity_of(streamed)
    whole = model.to(device)
    assert got == pytest.approx(perplexity(whole, TOKENS, seqlen=SEQLEN), rel=rel)
    figures = agreement(predict(whole, TOKENS, SEQLEN), streamed)
    assert figures["equal_tokens"] == 1 and figures["kl"]["p99"] < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, device):
    assert_same(small_model(family), device)


@pytest.mark.parametrize(("boundary", "format"), [("input", "dense"), ("residual", "packed")])
def test_rotated_packed_and_fused(boundary, format, device):
    recipe = Recipe(
        rotation=RotationConfig(boundary=boundary, hessians="dense", steps=3),
        pruning=PruningConfig(method="wanda"),
        calibration=CalibrationConfig(seqlen=16),
    )
    model = drot.prune(
        small_model("qwen3-biased"), recipe, calibration=random_tokens(8, 16), format=format, device="cpu"
    ).model
    if format == "packed":
        fuse(model)
        kinds = {type(module) for module in model.modules()}
        assert FusedLinear in kinds and (FusedRotation in kinds) == (boundary == "residual")
    assert_same(model, device)


def test_a_dense_model_in_16_bits_has_the_same_logits(tmp_path):
    """Streamed from its files: transformers' own ops compute it in both cases."""
    folder = save_small_model(small_model("llama", dtype=torch.bfloat16), tmp_path / "model")
    opened = [open_model(folder, "bfloat16", streamed=streamed) for streamed in (False, True)]
    devices = (None, torch.device("cpu"))
    found = [
        predict(each.model, TOKENS, SEQLEN, device, weights=each.weights).logits(slice(0, 2))
        for each, device in zip(opened, devices, strict=True)
    ]
    assert torch.equal(*found)


def test_one_layer_at_a_time(monkeypatch):
    """Each layer goes to the device and back before the next one goes."""
    model, moves = small_model("llama"), []
    layers = list(DecoderModel(model).layer_modules)
    original = torch.nn.Module.to

    def to(module, target):
        if module in layers:
            moves.append((layers.index(module), torch.device(target)))
        return original(module, "cpu")

    monkeypatch.setattr(torch.nn.Module, "to", to)
    there, events = torch.device("cpu", 0), []
    predict(model, TOKENS, SEQLEN, there, events.append)
    home = torch.device("cpu")
    assert moves == [move for index in range(3) for move in ((index, there), (index, home))]
    assert [(event.phase, event.layer, event.layers) for event in events] == [
        ("stream", index, 3) for index in range(3)
    ]


def test_all_windows_pass_a_layer_before_the_next(monkeypatch):
    model, calls = small_model("llama"), []
    for index, layer in enumerate(DecoderModel(model).layer_modules):
        layer.register_forward_hook(
            lambda module, args, out, index=index: calls.append((index, len(args[0])))
        )
    monkeypatch.setattr("drot.calibration.stream.TOKENS_PER_BATCH", {"cpu": 3 * SEQLEN})
    predict(model, TOKENS, SEQLEN, torch.device("cpu"))
    assert calls == [(index, windows) for index in range(3) for windows in (3, 3, 2)]


def test_a_family_that_is_not_listed_is_refused():
    model = small_model("llama")
    model.config.model_type = "other"
    with pytest.raises(UserError, match="model type 'other' is not supported"):
        predict(model, TOKENS, SEQLEN, torch.device("cpu"))
