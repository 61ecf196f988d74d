"""The average of diag H of which the damping is a share: recorded, repeated, and part of a run's identity."""

import pytest
import torch
from safetensors.torch import load_file
from small_models import random_tokens, small_model

import drot
from drot.calibration import hessian
from drot.calibration.hessian import damping_unit
from drot.checkpoint.resume import partial_folder
from drot.config import PruningConfig, Recipe, RotationConfig
from drot.core.errors import UserError
from drot.pipeline import run
from drot.pruning import solve

TOKENS = random_tokens(4, 24)
START = Recipe(rotation=RotationConfig(steps=2), pruning=PruningConfig(solve="pcg", target="dense"))


def prune(recipe, out, **options):
    return drot.prune(
        small_model("llama", num_hidden_layers=2),
        recipe, calibration=TOKENS, device="cpu", out=out, **options,
    )  # fmt: skip


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "rotation",
    [RotationConfig(steps=2), RotationConfig(steps=2, hessians="dense"), RotationConfig(mode="none")],
)
@pytest.mark.parametrize("average", ["mean", "median"])
def test_the_average_reaches_every_factorisation(rotation, average, monkeypatch):
    asked = set()

    def noted(diagonal, average):
        asked.add(average)
        return damping_unit(diagonal, average)

    for module in (hessian, solve):
        monkeypatch.setattr(module, "damping_unit", noted)
    prune(Recipe(rotation=rotation, pruning=PruningConfig(damping_average=average, solve="admm")), None)
    assert asked == {average}


def test_a_run_with_another_average_is_not_resumed(monkeypatch, tmp_path):
    prune_layer, calls = run.prune_layer, []

    def killed(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return prune_layer(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run, "prune_layer", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(START.replace(damping=0.05), tmp_path / "out")
    assert partial_folder(tmp_path / "out").exists()
    changed = START.replace(damping=0.05, damping_average="mean")
    with pytest.raises(UserError, match=r"pruning.damping_average: median in the unfinished run, mean now"):
        prune(changed, tmp_path / "out", resume=True)
    prune(START.replace(damping=0.05, damping_average="median"), tmp_path / "out", resume=True)
