"""The estimates of a run: its formulas against the operations that torch counts, and a dry run."""

import contextlib

import pytest
import torch
from small_models import random_tokens, small_model
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import drot
from drot.calibration.stream import CalibrationStream
from drot.config import PruningConfig, Recipe, RecoveryConfig, RotationConfig, resolve
from drot.core.errors import UserError
from drot.core.events import silent
from drot.model.families import INPUT_GROUPS
from drot.pipeline import estimate
from drot.pipeline.context import RunContext
from drot.pipeline.disk import disk_needs
from drot.pipeline.dry_run import run_needs
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


def context(recipe: Recipe, family="llama") -> tuple[RunContext, estimate.Sizes]:
    run = RunContext(small_model(family, **SIZES), resolve(recipe), TOKENS, [torch.device("cpu")], silent)
    return run, estimate.sizes_of(run.model, *TOKENS.shape)


def recipe(*, quality="fast", method="sparsegpt", keep=(), sparsity="2:4", **rotation) -> Recipe:
    return Recipe(
        rotation=RotationConfig(steps=rotation.pop("steps", 4), **rotation),
        pruning=PruningConfig(method=method, keep=keep, sparsity=sparsity),
        recovery=RecoveryConfig(recover_epochs=2),
    ).with_quality(quality)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_forward_and_hessians(family):
    """A Hessian takes n² operations a token, and twice that where both of its halves are computed."""
    run, sizes = context(recipe(), family)
    stream = CalibrationStream.embed(run.model, run.arch, TOKENS, run.device)
    layer = run.layers[0]
    assert counted(lambda: stream.outputs(layer, 0)) == estimate.forward(sizes)
    paths = dict(run.arch.linears)
    linears = {g: (layer.get_submodule(paths[roles[0]]), None) for g, roles in INPUT_GROUPS.items()}
    for last in range(1, len(INPUT_GROUPS) + 1):
        groups = list(INPUT_GROUPS)[:last]
        count = counted(lambda: stream.hessians(layer, 0, {g: linears[g] for g in groups}))  # noqa: B023
        half = sum(TOKENS.numel() * sizes.inputs(group) ** 2 for group in groups)
        assert count - half <= estimate.hessians(sizes, groups) <= count, groups


@pytest.mark.parametrize(
    "chosen",
    [
        recipe(),
        recipe(method="wanda", objective="entropy"),
        recipe(method="magnitude", blocks=4),
        recipe(keep=("down_proj", "k_proj")),
        recipe(keep=("self_attn.*",), sparsity="0.5"),
    ],
    ids=lambda r: f"{r.pruning.method} {r.rotation.objective} {r.rotation.blocks} {r.pruning.keep}",
)
def test_one_step_of_the_training(chosen):
    run, sizes = context(chosen)
    stream = CalibrationStream.embed(run.model, run.arch, TOKENS, run.device)
    objective, _ = layer_objective(run.layers[0], 0, stream, run.arch, run.shape, run.recipe)
    optimizer = FastOptimizer(list(objective.identity()), lr=0.1, steps=4, objective=objective.objective)
    _, *gradients = objective.value_and_grad(*optimizer.matrices)
    evaluation = counted(lambda: objective.value_and_grad(*optimizer.matrices))
    assert evaluation == pytest.approx(
        estimate.evaluation(sizes, run.recipe, sizes.pruned(run.recipe)[0]), rel=1e-12
    )
    step = counted(lambda: optimizer.step(gradients))
    assert step == pytest.approx(estimate.optimizer_step(sizes, run.recipe, 1), rel=1e-12)


def counted_by_phase(monkeypatch, chosen, **options) -> tuple[dict[str, float], dict]:
    """The operations that torch counts in each phase of a run, and the manifest of the run."""
    phases: dict[str, float] = {}
    clock = RunContext.clock
    with counter() as count:

        @contextlib.contextmanager
        def counting(self, phase, device=None):
            before = count.get_total_flops()
            with clock(self, phase, device):
                yield
            phases[phase] = phases.get(phase, 0.0) + count.get_total_flops() - before

        monkeypatch.setattr(RunContext, "clock", counting)
        result = drot.prune(
            small_model("llama", **SIZES), chosen, calibration=TOKENS, device="cpu", **options
        )
    return phases, result.manifest


@pytest.mark.parametrize(
    "chosen",
    [
        recipe(),
        recipe(mode="shared"),
        recipe(hessians="dense", objective="entropy"),
        recipe(mode="none"),
        recipe(quality="best"),
    ],
    ids=["layer", "shared", "dense hessians", "not rotated", "best"],
)
def test_every_phase_of_a_run(monkeypatch, chosen):
    """A formula is never above what is computed. A run computes more: both halves of a symmetric product,
    linears again for the outputs of a layer, output errors, and figures."""
    phases, manifest = counted_by_phase(monkeypatch, chosen)
    resolved, sizes = resolve(chosen), estimate.sizes_of(small_model("llama", **SIZES), *TOKENS.shape)
    linears = [linear for layer in manifest["layers"] for linear in layer["linears"].values()]
    iterations = min(linear.get("admm_iterations", 0) for linear in linears)
    work = estimate.run_work(sizes, resolved, torch.float32, admm_iterations=iterations)
    needed = {phase: done["float32"] for phase, done in work.items()}
    assert needed.keys() == {
        "calibrate",
        "prune",
        *(["rotate"] if chosen.rotation.mode != "none" else []),
        *(["recover"] if chosen.recovery.recover == "block" else []),
    }
    least = {"calibrate": 0.3, "rotate": 0.95, "prune": 0.28, "recover": 0.9}
    if chosen.rotation.mode == "layer" and chosen.rotation.hessians == "dense":
        del needed["rotate"]  # trained in a thread, where torch does not count
    for phase, amount in needed.items():
        assert least[phase] <= amount / phases[phase] <= 1.001, (phase, amount / phases[phase])


@pytest.mark.parametrize("trains", [True, False])
def test_rotations_from_a_file_take_no_training(trains):
    resolved, sizes = resolve(recipe()), estimate.sizes_of(small_model("llama", **SIZES), *TOKENS.shape)
    assert ("rotate" in estimate.run_work(sizes, resolved, torch.float32, trains=trains)) == trains


def test_the_time_at_the_peaks_adds_up():
    work = {"calibrate": {"float16": 4.0, "float32": 3.0}, "prune": {"float32": 3.0}}
    assert estimate.seconds_at(work, {"float32": 2.0, "bfloat16": 8.0, "copy": 1.0}) == 3.5


def test_a_dry_run_needs_what_the_run_writes(tmp_path):
    """Without reading a weight: the sizes of the meta model are those of the loaded one."""
    small_model("llama", **SIZES).save_pretrained(tmp_path / "model")
    needs = run_needs(
        tmp_path / "model", recipe().replace(nsamples=6, seqlen=32), device="cpu", save_dtype="bfloat16"
    )
    sizes = estimate.sizes_of(small_model("llama", **SIZES), 6, 32)
    assert (needs.checkpoint, needs.partial) == disk_needs(sizes, needs.recipe, torch.float32, torch.bfloat16)
    assert (needs.tokens, needs.dtype, needs.save_dtype) == (192, "float32", "bfloat16")
    assert needs.work == estimate.run_work(sizes, needs.recipe, torch.float32)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert run_needs(tmp_path / "model", Recipe().replace(mode="none", method="magnitude")).tokens == 0
    with pytest.raises(UserError, match="`blocks` must divide the hidden size 64; got 5"):
        run_needs(tmp_path / "model", Recipe().replace(blocks=5))
