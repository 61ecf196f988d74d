"""What a run needs, by formulas from the shapes of the model: operations, main memory and device memory.

A multiplication and an addition are two operations. Counted are the matrix products and the factorisations
that a phase cannot do without; element-wise work is not counted, nor what is computed for the figures of a
report. Half of a symmetric product is enough, so a Hessian of n inputs takes n² operations a token.
tests/pipeline/test_estimate.py compares the formulas with the operations that torch counts.
"""

import dataclasses
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from drot.calibration.hessian import at_once
from drot.config import WITHOUT_HESSIAN, ResolvedRecipe
from drot.machine.devices import dtype_name, is_gpu
from drot.model.decoder import DecoderModel
from drot.model.family import InputGroup, alike
from drot.model.sizes import HeadShape, routed_share
from drot.pipeline.recover import held_out_sequences
from drot.pruning.solve import ADMM_INTERVAL, PCG_ITERATIONS, PCG_ITERATIONS_AFTER_ADMM
from drot.rotation.importance import is_rotated

#: Objective → n x n products in one step of `fast` for a matrix [n, n]: the gradient in so(n), 2 for the
#: norm, for `pruned` 1 + 3 + 4 · 2 in the steps of the polar factor, the turn and one correction of rounding
#: (rotation/retraction.py).
FAST_PRODUCTS = {"pruned": 1 + 2 + 12 + 2 + 2, "entropy": 1 + 2 + 2 + 2}
#: the same for `paper`, in products of 2 n³ operations: Householder QR with its Q (8/3 n³), and the gradient
#: of QR (two products, and a triangular solve of n³)
PAPER_PRODUCTS = 4 / 3 + 2 + 1 / 2
#: iterations after which ADMM's mask usually stops moving: 20 to 28 (drot/pruning/solve.py)
USUAL_ADMM_ITERATIONS = 24
#: Fp32 copies of the largest Hessian and of its weight on the device while a layer is pruned, without and
#: with ADMM or a dense target: the 32 and 40 GB of a 70B layer (docs/hardware.md).
COPIES, COPIES_OF_SOLVERS = 6.8, 8.6
#: bytes of device memory for a weight of a layer that is recovered (docs/hardware.md)
RECOVERY_BYTES = 17
#: the memory of a training step on a layer, in copies of the layer's linears (tests/rotation/test_memory.py)
TRAINING_COPIES = 6.4


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its calibration.

    groups: the input groups that occur in some layer.
    shapes: name of a linear → its (out, in), which is the same in all layers that have the linear.
    names: for each layer, name of a linear → its full name.
    layer_weights, weights, outside: numbers in the parameters of the largest layer, of the model, and of the
        model without its layers.
    tied_head: numbers in lm_head if it is tied to the embedding; otherwise 0.
    nsamples, seqlen: sequences of calibration tokens, and tokens in a sequence.
    routed: the share of the tokens that an expert reads, on average.
    """

    groups: Sequence[InputGroup]
    shapes: Mapping[str, tuple[int, int]]
    names: Sequence[Mapping[str, str]]
    heads: HeadShape
    layer_weights: int
    weights: int
    outside: int
    tied_head: int
    nsamples: int
    seqlen: int
    routed: float = 1.0

    def share(self, group: InputGroup) -> float:
        """The share of the tokens that a group reads."""
        return 1.0 if group.expert is None else self.routed

    @property
    def tokens(self) -> int:
        return self.nsamples * self.seqlen

    @property
    def hidden(self) -> int:
        return self.inputs(self.groups[0])

    def inputs(self, group: InputGroup) -> int:
        return self.shapes[group.linears[0].name][1]

    @property
    def rotates_stream(self) -> bool:
        return any(linear.output == "r1" for group in self.groups for linear in group.linears)

    @property
    def untied_head(self) -> int:
        """Numbers in lm_head if a rotation unties it; otherwise 0."""
        return self.tied_head if self.rotates_stream else 0

    @property
    def intermediate(self) -> int:
        return self.inputs(self.groups[-1])

    def of_layer(self, index: int) -> "Sizes":
        """The sizes with the groups of one layer alone."""
        return dataclasses.replace(self, groups=self.groups_of(self.names[index]))

    def groups_of(self, linears: Collection[str]) -> list[InputGroup]:
        return [group for group in self.groups if any(linear.name in linears for linear in group.linears)]

    def pruned(self, recipe: ResolvedRecipe) -> list[list[str]]:
        """For each layer, the names of the linears that the recipe prunes."""
        return [
            [linear for linear, name in names.items() if recipe.pruning.sparsity_for(name).ratio > 0]
            for names in self.names
        ]


def sizes_of(model: DecoderModel, nsamples: int, seqlen: int) -> Sizes:
    """The sizes of a model, which may lie on the device `meta`."""
    head = model.head.weight
    of_layers = [sum(p.numel() for p in layer.module.parameters()) for layer in model.layers]
    weights = sum(parameter.numel() for parameter in model.model.parameters())
    return Sizes(
        groups=list(dict.fromkeys(group for layer in model.layers for group in layer.groups)),
        shapes={
            name: layer.shape_of(linear.spec)
            for layer in model.layers
            for name, linear in layer.linears.items()
        },
        names=[
            {name: linear.full_name for name, linear in of_layer.linears.items()} for of_layer in model.layers
        ],
        heads=model.heads,
        layer_weights=max(of_layers),
        weights=weights,
        outside=weights - sum(of_layers),
        tied_head=head.numel() if head is model.embedding.weight else 0,
        nsamples=nsamples,
        seqlen=seqlen,
        routed=routed_share(model.config),
    )


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
        prunes[own] += hessians(of_layer, groups, [g for g in groups if to_dense and g.expert is None])
        prunes[fp32] += prune(sizes, recipe, roles, admm_iterations)
        if recovers:
            work["recover"][own] += recover(of_layer, recipe.recovery.recover_epochs)
        calibrate[own] += forward(of_layer) if recovers else rest_of_forward(of_layer, groups)
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


def main_memory(
    sizes: Sizes,
    recipe: ResolvedRecipe,
    dtype: torch.dtype,
    *,
    rotations_given: bool = False,
    from_gguf: bool = False,
) -> int:
    """The bytes of main memory of a run that reads the layers from files.

    They are those of a layer, or of the embedding and the head, of the hidden states of the calibration, and
    of the rotations that are not on the disk: two, all that are given, or all R2 and R3 beside one shared R1.
    A run on a CPU has the layers that it works on in memory too (`device_memory`).

    from_gguf: whether the model is a GGUF file, all of whose weights stay in memory. They are in fp32 when
        the file is read, and are cast to `dtype` one after the other.
    """
    layers = len(sizes.names)
    # at the beginning and at the end no layer is in memory
    numbers = max(sizes.outside + sizes.untied_head, sizes.layer_weights)
    loaded = 0
    if from_gguf:
        numbers, loaded = sizes.weights + sizes.untied_head, torch.float32.itemsize * sizes.weights
    needed = numbers * dtype.itemsize + state_bytes(sizes, recipe, dtype)
    if recipe.rotation.mode == "none":
        return max(needed, loaded)
    rotation = rotation_bytes(sizes, recipe.rotation.down_block)
    shared = 8 * sizes.hidden**2 if recipe.rotation.mode == "shared" else 0
    kept = layers if rotations_given or shared else min(layers, 2)
    rotations = kept * rotation - (0 if rotations_given else (layers - 1) * shared)
    return max(needed + rotations, loaded)


def state_bytes(sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype) -> int:
    """The bytes of the hidden states of the calibration, also of those in the dense model."""
    return sizes.tokens * sizes.hidden * dtype.itemsize * (2 if recipe.needs_dense_states else 1)


def device_memory(sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype) -> int:
    """About the bytes on the device at the peak: the layer, the next layer, and the pruning of the layer."""
    solves = recipe.pruning.solve == "admm" or recipe.pruning.target == "dense"
    copies, pruning = COPIES_OF_SOLVERS if solves else COPIES, 0.0
    for groups in alike(sizes.groups):
        wide = sizes.inputs(groups[0])
        rows = max(sizes.shapes[linear.name][0] for linear in groups[0].linears)
        at_a_time = min(len(groups), at_once(wide))
        hessian = at_a_time * wide if sizes.tokens else 0
        pruning = max(pruning, (copies if hessian else 1) * 4 * wide * (hessian + at_a_time * rows))
    if recipe.recovery.recover == "block":
        pruning = max(pruning, RECOVERY_BYTES * sizes.layer_weights)
    if recipe.rotation.mode != "none":  # the check of known rotations: a copy in fp32, three R1 in fp64
        pruning = max(pruning, 4 * sizes.layer_weights + 24 * sizes.hidden**2)
    return round(2 * sizes.layer_weights * dtype.itemsize + pruning)


def training_memory(sizes: Sizes, recipe: ResolvedRecipe) -> int:
    """About the bytes on the device while rotations are trained: one step, and all layers that share R1.

    With `layers_per_step` the layers lie in main memory, and one after the other is on the device.
    """
    rotation, blocks = recipe.rotation, {"r2": sizes.heads.head_dim, "r3": recipe.rotation.down_block or 1}
    weights = [sum(math.prod(sizes.shapes[name]) for name in names) for names in sizes.names]
    metrics = [0] * len(weights)
    if recipe.pruning.method not in WITHOUT_HESSIAN:
        blocks |= {"r1": sizes.hidden}
        metrics = [
            sum(sizes.inputs(group) * blocks.get(group.input or "", 1) for group in sizes.groups_of(names))
            for names in sizes.names
        ]
    kept = [sum(both) for both in zip(weights, metrics, strict=True)]
    together = rotation.mode == "shared" and not rotation.layers_per_step
    numbers = (sum if together else max)(kept) + (TRAINING_COPIES - 1) * max(weights)
    return round(numbers * getattr(torch, rotation.product_dtype).itemsize)


def rotation_bytes(sizes: Sizes, down_block: int | None) -> int:
    """The bytes of the rotation of one layer in fp64: R1, the R2 of each head of keys, and R3."""
    r1, r2 = sizes.hidden**2, sizes.heads.kv_heads * sizes.heads.head_dim**2
    return 8 * (r1 + r2 + sizes.intermediate * (down_block or 0))


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
    head, block = sizes.heads.head_dim, sizes.hidden // recipe.rotation.equal_blocks
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
    hidden, head, blocks = sizes.hidden, sizes.heads.head_dim, rotation.blocks
    r1 = sum(b**3 for b in blocks) if isinstance(blocks, tuple) else hidden * (hidden // blocks) ** 2
    of_down = [linear.name for group in sizes.groups for linear in group.linears if linear.input == "r3"]
    downs = sum(name in roles for roles in layers for name in of_down)
    own = len(layers) * sizes.heads.kv_heads * head**3
    own += downs * sizes.intermediate * (rotation.down_block or 0) ** 2
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
    """The pruning of a layer's linears `roles`: one factorisation for each input, sweeps and solvers."""
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
