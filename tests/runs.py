"""Small runs of `drot.prune` for tests: a recipe of few steps, a run on a CPU, and a run that is cut off."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_models import random_tokens, small_model
from torch import nn
from transformers import AutoModelForCausalLM

import drot
from drot.config import PruningConfig, Recipe
from drot.core.events import ProgressEvent
from drot.model.decoder import DecoderModel
from drot.model.linear import Linear

#: calibration tokens
TOKENS = random_tokens(8, 40)


def recipe(mode: str = "layer", *, quality: str | None = None, **fields: Any) -> Recipe:
    """A recipe of five training steps and blocks of 16 columns. fields: as in `Recipe.replace`.

    With one R1 a layer, R3 has three blocks in a small model.
    """
    down = {"down_rotation": 16} if mode == "layer" else {}
    chosen = Recipe().replace(**{"mode": mode, "steps": 5, "block_size": 16, "seqlen": 40} | down | fields)
    return chosen.with_quality(quality).replace(**fields) if quality else chosen


def one_shot(mode: str = "layer", **fields: Any) -> Recipe:
    """A recipe without solver and without the dense target, the quickest kind."""
    return recipe(mode, **{"solve": "none", "target": "self"} | fields)


def prune(model: Any = None, chosen: Recipe | None = None, **options: Any) -> drot.PruneResult:
    """`drot.prune` on a CPU. model: None is a small LLaMA.

    A training of all layers together has token ids of its own.
    """
    model = small_model("llama") if model is None else model
    chosen, options = chosen or recipe(), {"calibration": TOKENS, "device": "cpu"} | options
    if chosen.recovery.distill_epochs:
        other = random_tokens(8, options["calibration"].shape[1], seed=7)
        options = {"distillation": other} | options
    return drot.prune(model, chosen, **options)


def interrupted(
    model: Any = None, chosen: Recipe | None = None, *, at: tuple[Any, ...] = ("prune", 1), **options: Any
) -> None:
    """`prune`, cut off as by Ctrl-C. at: a phase, a layer and, if it matters, a step."""

    def stop(event: ProgressEvent) -> None:
        if (event.phase, event.layer, event.step)[: len(at)] == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(model, chosen, progress=stop, **options)


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Name → tensor, from all files with weights of a checkpoint."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def saved_bytes(folder: Path) -> list[bytes]:
    """The bytes of all files with weights of a checkpoint."""
    return [file.read_bytes() for file in sorted(folder.glob("model*.safetensors"))]


def named_linears(model: nn.Module) -> dict[str, Linear]:
    """Full name → linear of all decoder layers."""
    layers = DecoderModel(model).layers
    return {linear.full_name: linear for layer in layers for linear in layer.linears.values()}


def assert_patterns(model: nn.Module, pruning: PruningConfig) -> None:
    """Every linear has exactly the zeros of its n:m, or nearly its ratio of zeros."""
    for name, linear in named_linears(model).items():
        sparsity, zeros = pruning.sparsity_for(name), linear.weight == 0
        if sparsity.structured:
            assert (zeros.unflatten(1, (-1, sparsity.m)).sum(-1) == sparsity.m - sparsity.n).all(), name
        else:
            assert float(zeros.float().mean()) == pytest.approx(sparsity.ratio, abs=0.02), name


def assert_opens(out: Path, model: nn.Module, again: Path) -> nn.Module:
    """A checkpoint is `model`: in transformers, with and without a cache, and when it is saved `again`.

    Returns the model that transformers opened.
    """
    tokens, options = random_tokens(2, 30, seed=5), dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    opened, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(opened(tokens).logits, model(tokens).logits)
    cached, plain = (opened.generate(tokens, **options, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, plain)
    opened.save_pretrained(again)
    for loaded in (drot.load(again, device="cpu"), AutoModelForCausalLM.from_pretrained(again)):
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    return opened


def assert_same_weights(found: nn.Module | Mapping, expected: nn.Module | Mapping) -> None:
    """The same tensors, bit for bit, of two models or dicts of tensors."""
    a, b = (x.state_dict() if isinstance(x, nn.Module) else dict(x) for x in (found, expected))
    assert a.keys() == b.keys()
    different: list[str] = [name for name, tensor in a.items() if not torch.equal(tensor, b[name])]
    assert not different
