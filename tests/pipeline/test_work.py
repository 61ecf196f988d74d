"""The estimates of a run: its formulas against the operations that torch counts, and a dry run."""

import contextlib

import pytest
import torch
from small_models import random_tokens, small_model
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from drot.calibration.stream import CalibrationStream
from drot.config import PruningConfig, Recipe, RecoveryConfig, RotationConfig, resolve
from drot.core.errors import UserError
from drot.core.events import silent
from drot.model.decoder import DecoderModel
from drot.pipeline import work as formulas
from drot.pipeline.context import RunContext
from drot.pipeline.disk import disk_needs
from drot.pipeline.dry_run import run_needs
from drot.pipeline.objective import layer_objective
from drot.pipeline.run import PruningRun
from drot.pipeline.sizes import Sizes, sizes_of
from drot.rotation.optimizers import FastOptimizer

pytestmark = pytest.mark.slow

SIZES = dict(hidden_size=64, intermediate_size=112, num_hidden_layers=2)
TOKENS = random_tokens(6, 32)


def each_head(q, keys_or_values):
    """The shape of keys or values with a head for each head of q: torch 2.11 counts no shared heads."""
    return (*q[:2], *keys_or_values[2:])


def counter() -> FlopCounterMode:
    """Counts also what torch's own list lacks: products in place, a CPU's attention, factorisations."""
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten.addmm_: lambda c, a, b, out_shape=None, **_: 2 * a[0] * a[1] * b[1],
            aten._scaled_dot_product_flash_attention_for_cpu: (
                lambda q, k, v, *_, out_shape=None, **__: sdpa_flop_count(q, each_head(q, k), each_head(q, v))
            ),
            aten._scaled_dot_product_flash_attention_for_cpu_backward: (
                lambda dy, q, k, v, *_, out_shape=None, **__: sdpa_backward_flop_count(
                    dy, q, each_head(q, k), each_head(q, v)
                )
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
    given = dict(tokens=tuple(TOKENS.shape), distillation=len(TOKENS))
    resolved = resolve(recipe, down_width=SIZES["intermediate_size"], **given)
    model, device = small_model(family, **SIZES), torch.device("cpu")
    return RunContext(model, resolved, TOKENS, device, silent, distill_tokens=TOKENS)


def small_sizes() -> Sizes:
    return sizes_of(DecoderModel(small_model("llama", **SIZES)), *TOKENS.shape)


def recipe(*, quality="fast", method="sparsegpt", keep=(), sparsity="2:4", **rotation) -> Recipe:
    return Recipe(
        rotation=RotationConfig(**{"steps": 4, "down_rotation": 8} | rotation),
        pruning=PruningConfig(method=method, keep=keep, sparsity=sparsity),
        recovery=RecoveryConfig(recover_epochs=2),
    ).with_quality(quality)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_forward_and_hessians(family):
    """A Hessian takes n² operations a token, and twice that where both of its halves are computed."""
    run = context(recipe(), family)
    sizes = sizes_of(run.model, *TOKENS.shape)
    stream = CalibrationStream.embed(run.model, TOKENS, run.device)
    layer = run.model.layers[0]
    assert counted(lambda: stream.advance(layer)) == formulas.forward(sizes, layer, len(TOKENS))
    for last in range(1, len(layer.groups) + 1):
        groups = layer.groups[:last]
        count = counted(lambda: stream.hessians(layer, groups))  # noqa: B023
        half = formulas.hessians(sizes, layer, len(TOKENS), groups)
        needed = formulas.forward(sizes, layer, len(TOKENS), groups) + half
        least = 0.7 if groups[-1].input == "r2" else 1.0  # the attention right before is left out
        assert least * (count - half) <= needed <= count, groups


@pytest.mark.parametrize(
    "chosen",
    [
        recipe(),
        recipe(method="wanda", objective="entropy"),
        recipe(method="magnitude", blocks=4),
        recipe(down_rotation="none"),
        recipe(keep=("down_proj", "k_proj")),
        recipe(keep=("self_attn.*",), sparsity="0.5"),
    ],
    ids=lambda r: f"{r.pruning.method} {r.rotation.objective} {r.rotation.blocks} {r.pruning.keep}",
)
def test_the_training_of_a_rotation(chosen):
    """The products of R2 and R3, and those of R1 with the Hessians, are left out."""
    run, sizes = context(chosen), small_sizes()
    stream = CalibrationStream.embed(run.model, TOKENS, run.device)
    objective, _ = layer_objective(run.model.layers[0], stream, run.recipe)
    optimizer = FastOptimizer(list(objective.identity()), lr=0.1, steps=4, objective=objective.objective)
    _, *gradients = objective.value_and_grad(*optimizer.matrices)
    evaluation = counted(lambda: objective.value_and_grad(*optimizer.matrices))
    step = counted(lambda: optimizer.step(gradients))
    cubes = sum(matrix.numel() * matrix.shape[-1] for matrix in optimizer.matrices)
    assert step == pytest.approx(2 * formulas.FAST_PRODUCTS[objective.objective] * cubes, rel=1e-12)
    needed = formulas.rotate(sizes, run.recipe, [(run.model.layers[0], sizes.pruned(run.recipe)[0])])
    assert 0.7 <= needed / (5 * evaluation + 4 * step) <= 1


def counted_by_step(run: PruningRun) -> dict[str, float]:
    """The operations that torch counts in each step of a run."""
    steps: dict[str, float] = {}
    with counter() as count:

        @contextlib.contextmanager
        def during(step):
            steps[step] = steps.get(step, 0.0) - count.get_total_flops()
            yield
            steps[step] += count.get_total_flops()

        run.context.watch.during = during
        run.execute(None)
    return steps


@pytest.mark.parametrize(
    "chosen",
    [
        recipe(steps=20),
        recipe(mode="shared", steps=20),
        recipe(hessians="dense", objective="entropy"),
        recipe(steps=20, layers_per_rotation=2),
        recipe(mode="none"),
        recipe(quality="best", steps=20).replace(recover="block"),
    ],
    ids=["layer", "shared", "dense hessians", "layers that share", "not rotated", "best"],
)
def test_every_step_of_a_run(chosen, monkeypatch):
    """A formula is never above what is computed. A run computes more: both halves of a symmetric product,
    linears again for the outputs of a layer, output errors, figures, and what is too small to be counted."""
    run = PruningRun(context(chosen))
    steps, resolved, sizes = counted_by_step(run), run.context.recipe, small_sizes()
    linears = [linear for layer in run.layers for linear in layer["linears"].values()]
    iterations = min(linear.get("admm_iterations", 0) for linear in linears)
    monkeypatch.setattr(formulas, "USUAL_ADMM_ITERATIONS", iterations)
    work = formulas.run_work(sizes, resolved, torch.float32)
    needed = {step: done["float32"] for step, done in work.items()}
    assert needed.keys() == {
        "calibrate",
        "prune",
        *(["weigh"] if resolved.pruning.token_weights == "gradient" else []),
        *(["rotate"] if chosen.rotation.mode != "none" else []),
        *(["recover", "distill"] if chosen.recovery.recover == "block" else []),
    }
    least = {"calibrate": 0.5, "rotate": 0.75, "prune": 0.65, "recover": 0.85, "distill": 0.75, "weigh": 0.9}
    if chosen.rotation.mode == "layer" and chosen.rotation.hessians == "dense":
        del needed["rotate"]  # trained in a thread, where torch does not count
    for step, amount in needed.items():
        assert least[step] <= amount / steps[step] <= 1, (step, amount / steps[step])


@pytest.mark.parametrize("trains", [True, False])
def test_rotations_from_a_file_take_no_training(trains):
    work = formulas.run_work(small_sizes(), resolve(recipe()), torch.float32, trains=trains)
    assert ("rotate" in work) == trains


def test_the_time_at_the_peaks_adds_up():
    work = {"calibrate": {"float16": 4.0, "float32": 3.0}, "prune": {"float32": 3.0}}
    assert formulas.seconds_at(work, {"float32": 2.0, "float16": 8.0}.__getitem__) == 3.5


def test_a_dry_run_needs_what_the_run_writes(tmp_path):
    """Without reading a weight: the sizes of the meta model are those of the loaded one."""
    small_model("llama", **SIZES).save_pretrained(tmp_path / "model")
    needs = run_needs(
        tmp_path / "model", recipe().replace(nsamples=6, seqlen=32), device="cpu", save_dtype="bfloat16"
    )
    sizes = small_sizes()
    assert (needs.checkpoint, needs.partial) == disk_needs(sizes, needs.recipe, torch.bfloat16)
    assert (needs.tokens, needs.dtype, needs.save_dtype) == (192, "float32", "bfloat16")
    assert needs.work == formulas.run_work(sizes, needs.recipe, torch.float32)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert not needs.tokens_known
    assert run_needs(tmp_path / "model", Recipe().replace(mode="none", method="magnitude")).tokens == 0
    with pytest.raises(UserError, match="`blocks` must divide the hidden size 64; got 5"):
        run_needs(tmp_path / "model", Recipe().replace(blocks=5))


@pytest.mark.parametrize(
    ("family", "keep"),
    [("llama", ("down_proj", "up_proj")), ("phi3", ("down_proj", "up_proj")), ("lfm2", ("q_proj",))],
)
def test_a_last_group_of_which_a_part_is_pruned(family, keep):
    """The passes end where that group begins."""
    sizes = sizes_of(DecoderModel(small_model(family)), *TOKENS.shape)
    kept, everything = (
        formulas.run_work(sizes, resolve(recipe(keep=keep, down_rotation="none")), torch.float32)
        for keep in (keep, ())
    )
    assert 0 < kept["prune"]["float32"] < everything["prune"]["float32"]
