"""A lower bound of the operations of a run, by formulas from the sizes of the model, and of its seconds.

A multiplication and an addition are two operations. Counted are the matrix products that take most of a run:
passes of the tokens, Hessians, the training of R1, and the pruning. Half of a symmetric product is enough, so
a Hessian of n inputs takes n² operations a token.
"""

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from drot.config import WITHOUT_HESSIAN, ResolvedRecipe
from drot.machine.devices import dtype_name, is_gpu
from drot.model.family import InputGroup
from drot.model.layer import DecoderLayer
from drot.pipeline.batches import DISTILL_HELD_OUT_SHARE, held_out_sequences
from drot.pipeline.sizes import Sizes, groups_of
from drot.pruning.solve import ADMM_INTERVAL, PCG_ITERATIONS, PCG_ITERATIONS_AFTER_ADMM
from drot.rotation.importance import is_rotated

#: Objective → n x n products in one step of `fast` for a matrix [n, n]: the gradient in so(n), 2 for the
#: norm, for `pruned` 1 + 3 + 4 · 2 in the steps of the polar factor, the turn and one correction of rounding
#: (drot/rotation/retraction.py).
FAST_PRODUCTS = {"pruned": 1 + 2 + 12 + 2 + 2, "entropy": 1 + 2 + 2 + 2}
#: iterations after which ADMM's mask usually stops moving: 20 to 28 (drot/pruning/solve.py)
USUAL_ADMM_ITERATIONS = 24


def run_work(
    sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype, *, trains: bool = True
) -> dict[str, dict[str, float]]:
    """Phase → dtype → operations of a run in `dtype` that stops no training early.

    trains: whether the rotations are trained, and not loaded from a file.
    """
    work: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    trains = trains and recipe.rotation.mode != "none"
    layers = list(zip(sizes.layers, sizes.pruned(recipe), strict=True))
    for layer, names in layers:
        groups = groups_of(layer, names)
        for phase, amount in passes(sizes, layer, recipe, groups, trains=trains).items():
            work[phase][dtype_name(dtype)] += amount
        work["prune"]["float32"] += prune(layer, recipe, groups)
    if trains:
        count = len(layers) if recipe.rotation.mode == "shared" else recipe.rotation.layers_per_rotation
        together = [layers[start : start + count] for start in range(0, len(layers), count)]
        work["rotate"][recipe.rotation.product_dtype] = sum(rotate(sizes, recipe, part) for part in together)
    return {phase: dict(by_dtype) for phase, by_dtype in work.items()}


def seconds_at(work: Mapping[str, Mapping[str, float]], rate: Callable[[str], float]) -> float:
    """The seconds of all work, where `rate` gives the operations a second in a dtype (`measured_rate`)."""
    return sum(amount / rate(dtype) for phase in work.values() for dtype, amount in phase.items())


@functools.cache
def measured_rate(device: torch.device, dtype: str) -> float:
    """The operations a second of a product of square matrices, the fastest of four. No run reaches it."""
    rows = 1024 if not is_gpu(device) else 2048 if dtype == "float64" else 8192
    factor, seconds = torch.ones(rows, rows, dtype=getattr(torch, dtype), device=device), []
    for _ in range(4):
        begin = time.perf_counter()
        torch.matmul(factor, factor)
        if is_gpu(device):
            torch.get_device_module(device).synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * rows**3 / min(seconds)


def passes(
    sizes: Sizes, layer: DecoderLayer, recipe: ResolvedRecipe, groups: Sequence[InputGroup], *, trains: bool
) -> dict[str, float]:
    """Phase → operations of the passes of tokens through one layer, with the Hessians of `groups`."""
    rotation, pruning, recovery = recipe.rotation, recipe.pruning, recipe.recovery
    once, to_last = forward(sizes, layer, sizes.nsamples), forward(sizes, layer, sizes.nsamples, groups)
    found = {"calibrate": once - to_last, "prune": to_last + hessians(sizes, layer, sizes.nsamples, groups)}
    if recipe.needs_dense_states:
        found["prune"] += once
    if pruning.token_weights == "gradient":  # the layer is computed twice, and goes back once
        found["weigh"] = 3 * once
    if trains and pruning.method not in WITHOUT_HESSIAN:
        if rotation.objective == "entropy":  # it needs no Hessian of inputs that are not rotated
            groups = [group for group in groups if is_rotated(group, rotation.down_block)]
        nsamples = recipe.training_nsamples(sizes.nsamples, sizes.seqlen, sizes.hidden)
        found["calibrate"] += forward(sizes, layer, nsamples, groups)
        found["calibrate"] += hessians(sizes, layer, nsamples, groups)
    # a backward pass takes twice the operations of a forward pass
    if recovery.recover == "block":
        trained = sizes.nsamples - held_out_sequences(sizes.nsamples)
        found["recover"] = 3 * recovery.recover_epochs * forward(sizes, layer, trained)
    if recovery.distill_epochs:
        held_out = held_out_sequences(recovery.distill_nsamples, DISTILL_HELD_OUT_SHARE)
        trained = recovery.distill_nsamples - held_out
        found["distill"] = 3 * recovery.distill_epochs * forward(sizes, layer, trained)
        found["distill"] += 2 * forward(sizes, layer, held_out)  # before and after
    return found


def forward(
    sizes: Sizes, layer: DecoderLayer, nsamples: int, groups: Sequence[InputGroup] | None = None
) -> float:
    """A pass of sequences through a layer, or through what comes before the last of `groups`."""
    passed, total = layer.groups, 0.0
    if groups is not None:
        last = {linear.name for linear in groups[-1].linears} if groups else set()
        places = (place for place, group in enumerate(passed) if last & {one.name for one in group.linears})
        passed = passed[: next(places, 0)]
    for group in passed:
        tokens = nsamples * sizes.seqlen * sizes.share(group)
        total += 2 * tokens * sum(math.prod(layer.shape_of(linear)) for linear in group.linears)
        if group.input == "r2":  # the scores of every pair of tokens in a sequence, and the sums of values
            total += 4 * tokens * sizes.seqlen * layer.heads.heads * layer.heads.head_dim
    return total


def hessians(sizes: Sizes, layer: DecoderLayer, nsamples: int, groups: Sequence[InputGroup]) -> float:
    tokens = nsamples * sizes.seqlen
    return sum(tokens * sizes.share(group) * layer.shape_of(group.linears[0])[1] ** 2 for group in groups)


def rotate(
    sizes: Sizes, recipe: ResolvedRecipe, layers: Sequence[tuple[DecoderLayer, Collection[str]]]
) -> float:
    """The training of the R1 that `layers` share, each with the names of its pruned linears."""
    rotation, block = recipe.rotation, sizes.hidden // recipe.rotation.blocks
    specs = ((layer, layer.linears[name].spec) for layer, names in layers for name in names)
    weights = sum(math.prod(layer.shape_of(spec)) for layer, spec in specs if "r1" in spec.rotations)
    if not weights:
        return 0.0
    # one evaluation more than there are steps; each computes the rotated weights, and the gradient in R1
    share = min(1.0, (rotation.layers_per_step or len(layers)) / len(layers))
    losses = (1 + rotation.steps * share) * 4 * weights * block
    products = FAST_PRODUCTS[rotation.objective] if rotation.optimizer == "fast" else 0
    return losses + rotation.steps * products * 2 * sizes.hidden * block**2


def prune(layer: DecoderLayer, recipe: ResolvedRecipe, groups: Sequence[InputGroup]) -> float:
    """The pruning of the linears of `groups` from their Hessians."""
    solver, total = recipe.pruning.solve, 0.0
    products = cubes = 0.0  # of the weights with a matrix [n, n], for n inputs; and n³
    if "sparsegpt" in (recipe.pruning.method, solver):  # the sweep; a Cholesky factor and its inverse
        products, cubes = 1 / 2, 2 / 3
    if recipe.pruning.target == "dense":  # the two triangular factors of H⁻¹
        products += 2
    if solver == "pcg":
        products += 1 + PCG_ITERATIONS
    if solver == "admm":  # the first gradient, and conjugate gradients for the new mask
        products += 2 + USUAL_ADMM_ITERATIONS + PCG_ITERATIONS_AFTER_ADMM
        cubes += USUAL_ADMM_ITERATIONS // ADMM_INTERVAL  # on a GPU four times as many, but in bf16
    for group in groups:
        shapes = [layer.shape_of(linear) for linear in group.linears]
        n, rows = shapes[0][1], sum(outputs for outputs, _ in shapes)
        total += products * 2 * n**2 * rows + cubes * n**3
    return total
