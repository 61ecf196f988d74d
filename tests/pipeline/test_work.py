"""The formulas of drot/pipeline/work.py against the operations that torch counts, and the clock of a run."""

import threading
import time

import pytest
import torch
from small_models import random_tokens, small_model
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import drot
from drot.calibration.stream import CalibrationStream
from drot.config import PruningConfig, Recipe, RecoveryConfig, RotationConfig
from drot.core.events import silent
from drot.model.families import INPUT_GROUPS
from drot.pipeline import work
from drot.pipeline.context import RunContext
from drot.pipeline.objective import layer_objective
from drot.rotation.optimizers import FastOptimizer

SIZES = dict(hidden_size=64, intermediate_size=112, num_hidden_layers=2)
TOKENS = random_tokens(6, 32)
ROLES = [role for roles in INPUT_GROUPS.values() for role in roles]


def counter() -> FlopCounterMode:
    """Counts also what torch's own list lacks: products in place, a CPU's attention, factorisations."""
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten.addmm_: lambda c, a, b, out_shape=None, **_: 2 * a[0] * a[1] * b[1],
            aten._scaled_dot_product_flash_attention_for_cpu: (
                lambda q, k, v, *_, out_shape=None, **__: sdpa_flop_count(q, k, v)
            ),
            aten._scaled_dot_product_flash_attention_for_cpu_backward: (
                lambda dy, q, k, v, *_, out_shape=None, **__: sdpa_backward_flop_count(dy, q, k, v)
            ),
            aten.linalg_cholesky_ex: lambda a, *_, out_shape=None, **__: a[-1] ** 3 / 3,
            # here the right side is the identity, or a triangle
            aten.linalg_solve_triangular: lambda a, b, *_, out_shape=None, **__: a[-1] ** 3 / 3,
        },
    )


def counted(function) -> float:
    with counter() as count:
        function()
    return count.get_total_flops()


def context(recipe: Recipe, family="llama") -> RunContext:
    return RunContext(small_model(family, **SIZES), recipe, TOKENS, [torch.device("cpu")], silent)


def recipe(*, quality="fast", method="sparsegpt", keep=(), sparsity="2:4", **rotation) -> Recipe:
    return Recipe(
        rotation=RotationConfig(steps=rotation.pop("steps", 4), **rotation),
        pruning=PruningConfig(method=method, keep=keep, sparsity=sparsity),
        recovery=RecoveryConfig(recover_epochs=2),
    ).with_quality(quality)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_forward_and_hessians(family):
    """A Hessian takes n² operations a token, and twice that where both of its halves are computed."""
    run = context(recipe(), family)
    stream = CalibrationStream.embed(run.model, run.arch, TOKENS, run.device)
    layer = run.layers[0]
    assert counted(lambda: stream.outputs(layer, 0)) == work.forward(run.sizes)
    paths = dict(run.arch.linears)
    linears = {g: (layer.get_submodule(paths[roles[0]]), None) for g, roles in INPUT_GROUPS.items()}
    for last in range(1, len(INPUT_GROUPS) + 1):
        groups = list(INPUT_GROUPS)[:last]
        count = counted(lambda: stream.hessians(layer, 0, {g: linears[g] for g in groups}))  # noqa: B023
        half = sum(TOKENS.numel() * run.sizes.inputs(group) ** 2 for group in groups)
        assert count - half <= work.hessians(run.sizes, groups) <= count, groups


@pytest.mark.parametrize(
    "chosen",
    [
        recipe(),
        recipe(method="wanda", objective="entropy"),
        recipe(method="magnitude", blocks=4),
        recipe(keep=("down_proj", "k_proj")),
        recipe(keep=("self_attn.*",), sparsity="0.5"),
    ],
    ids=lambda r: f"{r.pruning.method} {r.objective} {r.rotation.blocks} {r.pruning.keep}",
)
def test_one_step_of_the_training(chosen):
    run = context(chosen)
    stream = CalibrationStream.embed(run.model, run.arch, TOKENS, run.device)
    objective, _ = layer_objective(run.layers[0], 0, stream, run.arch, run.shape, chosen)
    optimizer = FastOptimizer(list(objective.identity()), lr=0.1, steps=4, objective=objective.objective)
    _, *gradients = objective.value_and_grad(*optimizer.matrices)
    evaluation = counted(lambda: objective.value_and_grad(*optimizer.matrices))
    assert evaluation == pytest.approx(work.evaluation(run.sizes, chosen, run.pruned_roles(0)), rel=1e-12)
    step = counted(lambda: optimizer.step(gradients))
    assert step == pytest.approx(work.optimizer_step(run.sizes, chosen, 1), rel=1e-12)


def test_the_manifest_says_where_the_time_went(tmp_path):
    started = time.perf_counter()
    manifest = drot.prune(
        small_model("llama"), recipe(), calibration=TOKENS, device="cpu", out=tmp_path / "out"
    ).manifest
    passed = time.perf_counter() - started
    phases = manifest.seconds.phases
    assert 0.7 * passed < sum(phases.values()) <= manifest.seconds.total <= passed
    assert all(
        phases[name] > 0 for name in ("load", "check", "calibrate", "rotate", "merge", "prune", "save")
    )


def test_a_phase_of_several_threads_counts_its_time_once():
    run, both = context(recipe()), threading.Barrier(2)

    def sleep_in_phase(seconds):
        with run.clock("rotate"):
            both.wait()
            time.sleep(seconds)

    threads = [threading.Thread(target=sleep_in_phase, args=[seconds]) for seconds in (0.2, 0.4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.4 <= run.seconds["rotate"] < 0.59
    with pytest.raises(ValueError), run.clock("rotate"):
        raise ValueError
    assert not run._running
