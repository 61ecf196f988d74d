"""The floating-point operations that the phases of a run need, by formulas from the shapes.

A multiplication and an addition are two operations. Counted are the matrix products and the factorisations
that a phase cannot do without; element-wise work is not counted, nor what is computed for the figures of a
report. Half of a symmetric product is enough, so a Hessian of n inputs takes n² operations a token.
tests/pipeline/test_work.py compares the formulas with the operations that torch counts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from drot.config import ResolvedRecipe
from drot.model.families import INPUT_GROUPS, HeadShape
from drot.pruning.solve import ADMM_INTERVAL, PCG_ITERATIONS

#: Objective → n x n products in one step of `fast` for a matrix [n, n]: the gradient in so(n), 2 for the
#: norm, for `pruned` 1 + 3 + 4 · 2 in the steps of the polar factor, the turn and one correction of rounding
#: (rotation/retraction.py).
FAST_PRODUCTS = {"pruned": 1 + 2 + 12 + 2 + 2, "entropy": 1 + 2 + 2 + 2}
#: the same for `paper`, in products of 2 n³ operations: Householder QR with its Q (8/3 n³), and the gradient
#: of QR (two products, and a triangular solve of n³)
PAPER_PRODUCTS = 4 / 3 + 2 + 1 / 2


@dataclass(frozen=True)
class Sizes:
    """The sizes of one decoder layer and of its calibration.

    shapes: role → (out, in) of each linear.
    heads: attention sizes of the model.
    tokens, seqlen: calibration tokens in all, and in one sequence.
    """

    shapes: Mapping[str, tuple[int, int]]
    heads: HeadShape
    tokens: int
    seqlen: int

    def inputs(self, group: str) -> int:
        """The number of inputs of an input group."""
        return self.shapes[INPUT_GROUPS[group][0]][1]


def forward(sizes: Sizes, groups: Collection[str] = tuple(INPUT_GROUPS), tokens: int | None = None) -> float:
    """A forward pass of the linears of `groups`, with the attention before o_proj if `o` is among them.

    tokens: the number of tokens; None for all.
    """
    tokens = sizes.tokens if tokens is None else tokens
    shapes = [sizes.shapes[role] for group in groups for role in INPUT_GROUPS[group]]
    weights = 2.0 * tokens * sum(out * width for out, width in shapes)
    return weights + (_attention(sizes, tokens) if "o" in groups else 0.0)


def _attention(sizes: Sizes, tokens: int) -> float:
    """The scores of every pair of tokens in a sequence, and the sums of values that they weight."""
    return 4.0 * tokens * sizes.seqlen * sizes.heads.heads * sizes.heads.head_dim


def _forward_before(sizes: Sizes, group: str) -> float:
    """The forward pass up to the input of `group`."""
    groups = list(INPUT_GROUPS)[: list(INPUT_GROUPS).index(group)]
    return forward(sizes, groups) + (_attention(sizes, sizes.tokens) if group == "o" else 0.0)


def groups_of(roles: Collection[str]) -> list[str]:
    """The input groups of the linears `roles`."""
    return [group for group, members in INPUT_GROUPS.items() if not set(members).isdisjoint(roles)]


def factorisation(n: int) -> float:
    """The Cholesky factor of an n x n matrix and its inverse, n³/3 each."""
    return 2 / 3 * n**3


def trained_groups(recipe: ResolvedRecipe, roles: Collection[str]) -> list[str]:
    """The input groups whose Hessians the training of a rotation needs.

    roles: the linears of the layer that are pruned.
    """
    if recipe.pruning.method == "magnitude":
        return []
    return [group for group in groups_of(roles) if group != "down" or recipe.rotation.objective == "pruned"]


def hessians(sizes: Sizes, groups: Collection[str], to_dense: Collection[str] = ()) -> float:
    """A forward pass up to the last of `groups`, and the Hessian of the input of each of them.

    to_dense: the groups for which the layer that is not pruned sees the same tokens too
        (TargetStatistics).
    """
    if not groups or not sizes.tokens:
        return 0.0
    total = _forward_before(sizes, list(groups)[-1])
    total += sum(sizes.tokens * sizes.inputs(group) ** 2 for group in groups)
    if to_dense:
        total += _forward_before(sizes, list(to_dense)[-1])
    for group in to_dense:  # (x_dense - x) xᵀ, and (r_dense - r) xᵀ of the residual stream
        n, out = sizes.inputs(group), sizes.shapes[INPUT_GROUPS[group][0]][0]
        total += 2 * sizes.tokens * n * (n + (out if group in ("o", "down") else 0))
    return total


def rest_of_forward(sizes: Sizes, groups: Collection[str]) -> float:
    """The rest of the forward pass behind the pass of `hessians`: the outputs of a layer for all tokens."""
    return forward(sizes) - (_forward_before(sizes, list(groups)[-1]) if groups else 0.0)


def metrics(sizes: Sizes, recipe: ResolvedRecipe, groups: Collection[str]) -> float:
    """What the training of a rotation makes of the Hessians of `groups`: H⁻¹ by SparseGPT's score."""
    if recipe.pruning.method != "sparsegpt":
        return 0.0
    # H⁻¹ from its factor; of o_proj only the blocks on the diagonal, of down_proj only the diagonal
    hidden, width, head = sizes.inputs("mlp"), sizes.inputs("o"), sizes.heads.head_dim
    inverse = {"attention": hidden**3, "o": width**2 * head, "mlp": hidden**3, "down": 0}
    return sum(factorisation(sizes.inputs(group)) + inverse[group] for group in groups)


def evaluation(
    sizes: Sizes, recipe: ResolvedRecipe, roles: Collection[str], *, gradients: bool = True
) -> float:
    """One evaluation of a layer's loss.

    Args:
        sizes: the sizes of the layer.
        recipe: the settings of the run.
        roles: the linears of the layer that are pruned.
        gradients: whether the gradients in R1 and R2 are computed.
    """
    rotation, hidden, head = recipe.rotation, sizes.shapes["q_proj"][1], sizes.heads.head_dim
    block = hidden // rotation.equal_blocks
    total = 0.0
    for role in roles:
        out, width = sizes.shapes[role]
        total += (4 if gradients else 2) * out * width * block  # the rotated weight, and the gradient in R1
        if role in ("v_proj", "o_proj"):  # R2, its gradient, and the way back
            total += (6 if gradients else 2) * out * width * head
    if recipe.pruning.method != "magnitude":
        for group in groups_of(roles):
            if group in ("attention", "mlp"):
                total += 2 * hidden * block**2
            if group == "o":
                total += 2 * sizes.shapes["o_proj"][1] * head**2
    return total


def optimizer_step(sizes: Sizes, recipe: ResolvedRecipe, layers: float) -> float:
    """One step of the optimizer on one R1 and on the R2 of `layers` layers."""
    rotation = recipe.rotation
    products = FAST_PRODUCTS[recipe.rotation.objective] if rotation.optimizer == "fast" else PAPER_PRODUCTS
    hidden, head = sizes.shapes["q_proj"][1], sizes.heads.head_dim
    blocks = rotation.blocks
    r1 = sum(b**3 for b in blocks) if isinstance(blocks, tuple) else hidden * (hidden // blocks) ** 2
    return products * 2.0 * (r1 + layers * sizes.heads.kv_heads * head**3)


def rotate(sizes: Sizes, recipe: ResolvedRecipe, layers: Sequence[Collection[str]], steps: int) -> float:
    """The training of one R1 in `steps` steps, with the entropy before, meanwhile and after.

    layers: the pruned linears of each layer that shares R1.
    """
    trained = [roles for roles in layers if roles]
    if not trained:
        return 0.0
    once, of_entropy = (
        sum(evaluation(sizes, recipe, roles, gradients=gradients) for roles in trained)
        for gradients in (True, False)
    )
    share = min(1.0, (recipe.rotation.layers_per_step or len(trained)) / len(trained))
    # the first and the last evaluation are of all layers, and so are the entropies
    evaluations, entropies = (steps - 1) * share + 2 if steps else 1, 2
    if recipe.rotation.objective != "entropy" and share == 1:
        entropies += len({steps * part // 4 for part in (1, 2, 3)} - {0})
    return (
        evaluations * once
        + entropies * of_entropy
        + steps * optimizer_step(sizes, recipe, len(trained) * share)
    )


def prune(
    sizes: Sizes, recipe: ResolvedRecipe, roles: Collection[str], admm_iterations: Mapping[str, int]
) -> float:
    """The pruning of one layer from its Hessians: one factorisation for each input, sweeps and solvers.

    roles: the linears of the layer that are pruned.
    admm_iterations: role → iterations of ADMM; a role that is missing had none.
    """
    if not sizes.tokens:
        return 0.0
    total, to_dense, solver = 0.0, recipe.pruning.target == "dense", recipe.pruning.solve
    sweeps = "sparsegpt" in (recipe.pruning.method, solver)
    for group in groups_of(roles):
        n, members = sizes.inputs(group), [role for role in INPUT_GROUPS[group] if role in roles]
        product = 2 * n**2 * sum(sizes.shapes[role][0] for role in members)  # the weights and a matrix [n, n]
        if sweeps or to_dense:
            total += factorisation(n)
        if sweeps:
            total += product / 2
        if to_dense:  # W C, and the two triangular factors of H⁻¹
            total += 3 * product
        if solver in ("pcg", "admm"):
            total += (1 + PCG_ITERATIONS) * product
        if solver == "admm":  # T H, and conjugate gradients for the new mask
            total += (2 + PCG_ITERATIONS) * product
            for role in members:
                count = admm_iterations.get(role, 0)
                total += count * 2 * sizes.shapes[role][0] * n**2 + (1 + count // ADMM_INTERVAL) * n**3
    return total


def recover(sizes: Sizes, epochs: int, held_out: int) -> float:
    """The training of a layer's kept weights: a backward pass takes twice the operations of a forward pass.

    epochs: passes over the sequences that are trained.
    held_out: the sequences that are not trained.
    """
    held = held_out * sizes.seqlen
    return 3 * epochs * forward(sizes, tokens=sizes.tokens - held) + (epochs + 1) * forward(
        sizes, tokens=held
    )
