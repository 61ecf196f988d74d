"""The operations of a run, by formulas from the sizes of the model, and the seconds that they take.

A multiplication and an addition are two operations. Counted are the matrix products and the factorisations
that a phase cannot do without; element-wise work is not counted, nor what is computed for the figures of a
report. Half of a symmetric product is enough, so a Hessian of n inputs takes n² operations a token.
tests/pipeline/test_work.py compares the formulas with the operations that torch counts.
"""

import dataclasses
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from drot.config import WITHOUT_HESSIAN, ResolvedRecipe
from drot.machine.devices import dtype_name, is_gpu
from drot.model.family import InputGroup
from drot.pipeline.batches import held_out_sequences
from drot.pipeline.distill import HELD_OUT_SHARE
from drot.pipeline.sizes import Sizes
from drot.pruning.solve import ADMM_INTERVAL, PCG_ITERATIONS, PCG_ITERATIONS_AFTER_ADMM
from drot.rotation.importance import is_rotated

#: Objective → n x n products in one step of `fast` for a matrix [n, n]: the gradient in so(n), 2 for the
#: norm, for `pruned` 1 + 3 + 4 · 2 in the steps of the polar factor, the turn and one correction of rounding
#: (drot/rotation/retraction.py).
FAST_PRODUCTS = {"pruned": 1 + 2 + 12 + 2 + 2, "entropy": 1 + 2 + 2 + 2}
#: the same for `paper`, in products of 2 n³ operations: Householder QR with its Q (8/3 n³), and the gradient
#: of QR (two products, and a triangular solve of n³)
PAPER_PRODUCTS = 4 / 3 + 2 + 1 / 2
#: iterations after which ADMM's mask usually stops moving: 20 to 28 (drot/pruning/solve.py)
USUAL_ADMM_ITERATIONS = 24


# ---- a whole run -----------------------------------------------------------------------------------------


def run_work(
    sizes: Sizes,
    recipe: ResolvedRecipe,
    dtype: torch.dtype,
    *,
    trains: bool = True,
    admm_iterations: int = USUAL_ADMM_ITERATIONS,
) -> dict[str, dict[str, float]]:
    """Phase → dtype → operations of a run in `dtype` that stops no training early.

    trains: whether the rotations are trained, and not loaded from a file.
    """
    work: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    calibrate, prunes = work["calibrate"], work["prune"]
    own, fp32 = dtype_name(dtype), "float32"
    layers = sizes.pruned(recipe)
    if recipe.pruning.token_weights == "gradient" and sizes.tokens:
        work["weigh"][own] = weigh(sizes)
    if trains and recipe.rotation.mode != "none":
        nsamples = recipe.training_nsamples(sizes.nsamples, sizes.seqlen, sizes.hidden)
        training = dataclasses.replace(sizes, nsamples=nsamples)
        for index, roles in enumerate(layers):
            of_layer, groups = training.of_layer(index), sizes.groups_of(roles)
            if recipe.rotation.objective == "entropy":  # it needs no Hessian of inputs that are not rotated
                groups = [group for group in groups if is_rotated(group, recipe.rotation.down_block)]
            if recipe.pruning.method in WITHOUT_HESSIAN:
                groups = []
            calibrate[own] += hessians(of_layer, groups)
            if recipe.rotation.hessians == "dense":
                calibrate[own] += rest_of_forward(of_layer, groups)
            calibrate[fp32] += metrics(training, recipe, groups)
        together = [layers] if recipe.rotation.mode == "shared" else [[roles] for roles in layers]
        work["rotate"][recipe.rotation.product_dtype] = sum(rotate(sizes, recipe, part) for part in together)
    recovers, to_dense = recipe.recovery.recover == "block", recipe.pruning.target == "dense"
    for index, roles in enumerate(layers):
        of_layer, groups = sizes.of_layer(index), sizes.groups_of(roles)
        if recipe.needs_dense_states:
            prunes[own] += forward(of_layer)
        prunes[own] += forward(of_layer, tokens=recipe.recovery.distill_nsamples * sizes.seqlen)
        prunes[own] += hessians(of_layer, groups, [g for g in groups if to_dense and g.expert is None])
        prunes[fp32] += prune(sizes, recipe, roles, admm_iterations)
        if recovers:
            work["recover"][own] += recover(of_layer, recipe.recovery.recover_epochs)
        if epochs := recipe.recovery.distill_epochs:
            work["distill"][own] += distill(of_layer, epochs, recipe.recovery.distill_nsamples)
        calibrate[own] += forward(of_layer) if recovers else rest_of_forward(of_layer, groups)
    if epochs := recipe.recovery.distill_epochs:
        work["distill"][own] += logits_of_distillation(sizes, epochs, recipe.recovery.distill_nsamples)
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


# ---- the parts of a run ----------------------------------------------------------------------------------


def forward(sizes: Sizes, groups: Collection[InputGroup] | None = None, tokens: int | None = None) -> float:
    """A forward pass of the linears of `groups`, with the attention if its last linear is among them."""
    tokens = sizes.tokens if tokens is None else tokens
    groups = sizes.groups if groups is None else groups
    weights = (
        2.0
        * tokens
        * sum(
            sizes.share(group) * math.prod(sizes.shapes[linear.name])
            for group in groups
            for linear in group.linears
        )
    )
    return weights + sum(_attention(sizes, tokens) for group in groups if group.input == "r2")


def _attention(sizes: Sizes, tokens: int) -> float:
    """The scores of every pair of tokens in a sequence, and the sums of values that they weight."""
    return 4.0 * tokens * sizes.seqlen * sizes.heads.heads * sizes.heads.head_dim


def _forward_before(sizes: Sizes, group: InputGroup) -> float:
    """The forward pass up to the input of `group`."""
    before = sizes.groups[: sizes.groups.index(group)]
    return forward(sizes, before) + (_attention(sizes, sizes.tokens) if group.input == "r2" else 0.0)


def weigh(sizes: Sizes) -> float:
    """The gradients in the outputs of all linears, where the inputs of all layers are kept.

    The layers are computed twice, and go back once: a product for each linear, and four for each attention.
    So do the logits of all tokens but the second time.
    """
    layers = [sizes.of_layer(index) for index in range(len(sizes.names))]
    attentions = sum(
        _attention(sizes, sizes.tokens) for layer in layers for group in layer.groups if group.input == "r2"
    )
    return 3 * sum(map(forward, layers)) + attentions + 4.0 * sizes.tokens * sizes.head


def factorisation(n: int) -> float:
    """The Cholesky factor of an n x n matrix and its inverse, n³/3 each."""
    return 2 / 3 * n**3


def hessians(sizes: Sizes, groups: Sequence[InputGroup], to_dense: Sequence[InputGroup] = ()) -> float:
    """A forward pass up to the last of `groups`, and the Hessian of the input of each of them.

    to_dense: the groups whose target is the dense model's (TargetStatistics).
    """
    if not groups or not sizes.tokens:
        return 0.0
    total = _forward_before(sizes, groups[-1])
    total += sum(sizes.share(group) * sizes.tokens * sizes.inputs(group) ** 2 for group in groups)
    for group in to_dense:  # y and (y_dense - y) xᵀ, or (x_dense - x) xᵀ
        n, out = sizes.inputs(group), sizes.shapes[group.linears[0].name][0]
        total += 2 * sizes.share(group) * sizes.tokens * n * (2 * out if group.writes_residual else n)
    return total


def rest_of_forward(sizes: Sizes, groups: Sequence[InputGroup]) -> float:
    """The rest of the forward pass behind the pass of `hessians`: the outputs of a layer for all tokens."""
    return forward(sizes) - (_forward_before(sizes, groups[-1]) if groups else 0.0)


def metrics(sizes: Sizes, recipe: ResolvedRecipe, groups: Collection[InputGroup]) -> float:
    """What the training of a rotation makes of the Hessians of `groups`: H⁻¹ by SparseGPT's score."""
    if recipe.pruning.method != "sparsegpt":
        return 0.0
    total = 0.0
    for group in groups:  # H⁻¹ from its factor: whole, its diagonal blocks, or its diagonal
        n = sizes.inputs(group)
        down_block = recipe.rotation.down_block or 0
        block = {"r1": n, "r2": sizes.heads.head_dim, "r3": down_block, None: 0}[group.input]
        total += factorisation(n) + n**2 * block
    return total


def evaluation(
    sizes: Sizes, recipe: ResolvedRecipe, roles: Collection[str], *, gradients: bool = True
) -> float:
    """One evaluation of a layer's loss, of which the linears `roles` are pruned."""
    head, block = sizes.heads.head_dim, sizes.hidden // recipe.rotation.blocks
    blocks = {"r1": block, "r2": head, "r3": recipe.rotation.down_block or 0}
    total = 0.0
    for linear in (linear for group in sizes.groups for linear in group.linears if linear.name in roles):
        out, width = sizes.shapes[linear.name]
        if "r1" in linear.rotations:  # the rotated weight, and the gradient in R1
            total += (4 if gradients else 2) * out * width * block
        if "r2" in (linear.input, linear.output):  # R2, its gradient, and the way back
            total += (6 if gradients else 2) * out * width * head
        if linear.input == "r3":
            total += (6 if gradients else 2) * out * width * blocks["r3"]
    if recipe.pruning.method not in WITHOUT_HESSIAN:
        for group in sizes.groups_of(roles):
            total += 2 * sizes.inputs(group) * blocks.get(group.input or "", 0) ** 2
    return total


def optimizer_step(
    sizes: Sizes, recipe: ResolvedRecipe, layers: Sequence[Collection[str]], share: float = 1.0
) -> float:
    """One step of the optimizer on one R1 and on the R2 and R3 of a share of the layers.

    layers: the pruned linears of each layer.
    """
    rotation = recipe.rotation
    products = FAST_PRODUCTS[rotation.objective] if rotation.optimizer == "fast" else PAPER_PRODUCTS
    hidden, head = sizes.hidden, sizes.heads.head_dim
    r1 = hidden * (hidden // rotation.blocks) ** 2
    own = len(layers) * sizes.heads.kv_heads * head**3
    own += sum(map(sizes.down_inputs, layers)) * (rotation.down_block or 0) ** 2
    return products * 2.0 * (r1 + share * own)


def rotate(sizes: Sizes, recipe: ResolvedRecipe, layers: Sequence[Collection[str]]) -> float:
    """The training of one R1 in all its steps, with the entropy before, meanwhile and after.

    layers: the pruned linears of each layer that shares R1.
    """
    steps, trained = recipe.rotation.steps, [roles for roles in layers if roles]
    if not trained:
        return 0.0
    once = sum(evaluation(sizes, recipe, roles) for roles in trained)
    of_entropy = sum(evaluation(sizes, recipe, roles, gradients=False) for roles in trained)
    share = min(1.0, (recipe.rotation.layers_per_step or len(trained)) / len(trained))
    # the first and the last evaluation are of all layers, and so are the entropies
    evaluations, entropies = (steps - 1) * share + 2 if steps else 1, 2
    if recipe.rotation.objective != "entropy" and share == 1:
        entropies += len({steps * part // 4 for part in (1, 2, 3)} - {0})
    turns = steps * optimizer_step(sizes, recipe, trained, share)
    return evaluations * once + entropies * of_entropy + turns


def prune(sizes: Sizes, recipe: ResolvedRecipe, roles: Collection[str], admm_iterations: int) -> float:
    """The pruning of a layer's linears `roles`: one factorisation for each input, sweeps and solvers.

    A GPU computes the inverses of ADMM but the first from 4 n³ operations in bf16, and not from n³ in fp32.
    """
    if not sizes.tokens:
        return 0.0
    total, to_dense, solver = 0.0, recipe.pruning.target == "dense", recipe.pruning.solve
    sweeps = "sparsegpt" in (recipe.pruning.method, solver)
    for group in sizes.groups_of(roles):
        n, members = sizes.inputs(group), [linear.name for linear in group.linears if linear.name in roles]
        product = 2 * n**2 * sum(sizes.shapes[role][0] for role in members)  # the weights and a matrix [n, n]
        if sweeps or to_dense:
            total += factorisation(n)
        if sweeps:
            total += product / 2
        if to_dense:  # the two triangular factors of H⁻¹, and W C of a linear that does not write E
            total += (2 if group.writes_residual else 3) * product
        if solver == "pcg":
            total += (1 + PCG_ITERATIONS) * product
        if solver == "admm":  # the first gradient, and conjugate gradients for the new mask
            total += (2 + admm_iterations + PCG_ITERATIONS_AFTER_ADMM) * product
            total += admm_iterations // ADMM_INTERVAL * n**3
    return total


def recover(sizes: Sizes, epochs: int) -> float:
    """The training of the kept weights: a backward pass takes twice the operations of a forward pass."""
    held = held_out_sequences(sizes.nsamples) * sizes.seqlen
    once, test = forward(sizes, tokens=sizes.tokens - held), forward(sizes, tokens=held)
    return 3 * epochs * once + (epochs + 1) * test


def distill(sizes: Sizes, epochs: int, nsamples: int) -> float:
    """The training of a layer together with all others, where its backward pass computes nothing again."""
    test = held_out_sequences(nsamples, HELD_OUT_SHARE)
    return forward(sizes, tokens=(3 * epochs * (nsamples - test) + 2 * test) * sizes.seqlen)


def logits_of_distillation(sizes: Sizes, epochs: int, nsamples: int) -> float:
    """The logits of both models, and the gradient in the hidden states, also of held-out sequences."""
    test = held_out_sequences(nsamples, HELD_OUT_SHARE)
    return 2.0 * sizes.head * 3 * (epochs * (nsamples - test) + 2 * test) * sizes.seqlen
