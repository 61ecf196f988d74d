"""The objective and its analytic gradient against autograd through the paper's equations in fp64.

The reference follows appendix A literally: the full RᵀMR, a block-diagonal R2 and p log p.
"""

import pytest
import torch

from drot.config import Sparsity
from drot.machine.ranks import Ranks
from drot.model.families import LLAMA
from drot.model.sizes import HeadShape
from drot.rotation.importance import diagonal_blocks, layer_metrics
from drot.rotation.objective import LayerObjective

D, FF, SHAPE = 24, 40, HeadShape(heads=6, kv_heads=2, head_dim=8)
LINEARS = [linear.name for linear in LLAMA.linears]
DAMPING = 0.01


def make_layer(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

    q, kv = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    sizes = dict(
        q_proj=(q, D), k_proj=(kv, D), v_proj=(kv, D), o_proj=(D, q),
        gate_proj=(FF, D), up_proj=(FF, D), down_proj=(D, FF),
    )  # fmt: skip
    weights = {name: normal(*size) for name, size in sizes.items()}
    inputs = {"attention": D, "o": q, "mlp": D, "down": FF}
    hessians = {}
    for group, n in inputs.items():
        x = normal(3 * n, n) * torch.linspace(0.2, 3, n).to(dtype)
        hessians[group] = x.T @ x / n
    return weights, hessians


def random_rotations(seed=1):
    g = torch.Generator().manual_seed(seed)
    r1 = torch.linalg.qr(torch.randn(D, D, generator=g, dtype=torch.float64))[0]
    h = SHAPE.head_dim
    r2 = torch.linalg.qr(torch.randn(SHAPE.kv_heads, h, h, generator=g, dtype=torch.float64))[0]
    return r1, r2


def random_r3(blocks, size, seed=4):
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(blocks, size, size, generator=g, dtype=torch.float64))[0]


def scores(weights, hessians, r1, r2, method, compat, r3=None):
    """Name → scores S [out, in] of the rotated weights, as in appendix A; r3 rotates the input of down."""
    block_v = torch.block_diag(*r2)
    block_o = torch.block_diag(*[r2[i // SHAPE.group] for i in range(SHAPE.heads)])
    block_down = torch.eye(FF, dtype=r1.dtype) if r3 is None else torch.block_diag(*r3)
    sides = dict(
        q_proj=(None, r1, "attention"), k_proj=(None, r1, "attention"), v_proj=(block_v, r1, "attention"),
        o_proj=(r1, block_o, "o"), gate_proj=(None, r1, "mlp"), up_proj=(None, r1, "mlp"),
        down_proj=(r1, block_down, "down"),
    )  # fmt: skip
    out = {}
    for name, (left, right, group) in sides.items():
        y = weights[name] @ right
        if left is not None:
            y = left.T @ y
        if method == "magnitude":
            column_scale = torch.ones(y.shape[1], dtype=y.dtype)
        elif method == "wanda":
            column_scale = (right.T @ hessians[group] @ right).diagonal()
        else:
            h = hessians[group]
            damp = DAMPING * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
            inverse = torch.linalg.inv(h + damp)
            if compat:
                inverse = inverse + damp
            column_scale = 1 / (right.T @ inverse @ right).diagonal()
        out[name] = y**2 * column_scale
    return out


def entropy_reference(weights, hessians, r1, r2, method, compat, names=LINEARS, r3=None):
    def rows(s):
        p = s / s.sum(1, keepdim=True)
        return -(p * p.log()).sum()

    total = 0
    for name, s in scores(weights, hessians, r1, r2, method, compat, r3).items():
        if name not in names:
            continue
        if name != "down_proj" or r3 is not None:
            total = total + rows(s)
        if name in ("v_proj", "o_proj", "down_proj"):
            total = total + rows(s.T)
    return total


def pruned_reference(weights, hessians, r1, r2, method, compat, sparsity, names=LINEARS, r3=None):
    eye2 = torch.eye(SHAPE.head_dim, dtype=r1.dtype).repeat(SHAPE.kv_heads, 1, 1)
    start = scores(weights, hessians, torch.eye(D, dtype=r1.dtype), eye2, method, compat)
    total = 0
    for name, s in scores(weights, hessians, r1, r2, method, compat, r3).items():
        if name not in names:
            continue
        if sparsity.structured:
            removed = s.reshape(s.shape[0], -1, sparsity.m).sort(-1).values[..., : sparsity.m - sparsity.n]
        else:
            removed = s.sort(-1).values[:, : int(s.shape[1] * sparsity.ratio)]
        total = total + s.shape[0] * removed.sum() / start[name].sum()
    return total


CASES = [
    (method, objective, sparsity, compat)
    for method in ("magnitude", "wanda", "sparsegpt")
    for objective, sparsity in (("entropy", "2:4"), ("pruned", "2:4"), ("pruned", "1:8"), ("pruned", "0.5"))
    for compat in ((False, True) if method == "sparsegpt" else (False,))
]


def build(weights, hessians, method, objective, sparsity, compat, **options):
    metrics, _ = layer_metrics(
        method,
        {group: h.clone() for group, h in hessians.items()},
        LLAMA.groups,
        SHAPE,
        damping=DAMPING,
        reference_compat=compat,
        unrotated=objective == "pruned",
        down_block=options.get("down_block"),
        dtype=weights["q_proj"].dtype,
    )
    patterns = (
        {name: Sparsity.parse(text) for name, text in sparsity.items()}
        if isinstance(sparsity, dict)
        else Sparsity.parse(sparsity)
    )
    return LayerObjective(
        weights, metrics, LLAMA.groups, SHAPE, objective=objective, sparsity=patterns, **options
    )


def reference(layer, r1, r2, method, objective, sparsity, compat, names=LINEARS, r3=None):
    """The loss of the linears `names` of a layer."""
    if objective == "entropy":
        return entropy_reference(*layer, r1, r2, method, compat, names, r3)
    return pruned_reference(*layer, r1, r2, method, compat, Sparsity.parse(sparsity), names, r3)


def assert_is(expected, leaves, loss, *gradients):
    """The loss and its gradients are those of the reference `expected`, by autograd in `leaves`."""
    expected.backward()
    assert torch.allclose(loss, expected.detach(), rtol=1e-11)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        wanted = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert torch.allclose(gradient, wanted, rtol=0, atol=1e-10 * float(wanted.abs().max()))


@pytest.mark.parametrize(("method", "objective", "sparsity", "compat"), CASES)
def test_value_and_gradient_in_fp64(method, objective, sparsity, compat):
    layer, (r1, r2) = make_layer(), random_rotations()
    problem = build(*layer, method, objective, sparsity, compat, product_dtype=torch.float64)
    loss, g1, g2 = problem.value_and_grad(r1[None], r2)
    leaves = [each.requires_grad_() for each in (r1, r2)]
    expected = reference(layer, r1, r2, method, objective, sparsity, compat)
    assert_is(expected, leaves, loss, g1[0], g2)


@pytest.mark.parametrize("missing", [(), ("gate_proj", "down_proj")])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_weights_of_outputs_in_fp64(method, missing):
    """The removed importance of a row counts by the weight of its output, or by the mean of those with which
    a rotation mixes it. A linear without weights counts for each output as the others do on average."""
    (weights, hessians), (r1, r2) = make_layer(), random_rotations()
    generator = torch.Generator().manual_seed(5)
    outputs = {
        name: torch.rand(len(weight), generator=generator, dtype=torch.float64) * 3
        for name, weight in weights.items()
        if name not in missing
    }
    problem = build(
        weights, hessians, method, "pruned", "2:4", False, product_dtype=torch.float64, outputs=outputs
    )
    loss, g1, g2 = problem.value_and_grad(r1[None], r2)
    mixed = {name: each.clone() for name, each in outputs.items()}
    for name in {"o_proj", "down_proj"} & outputs.keys():
        mixed[name][:] = outputs[name].mean()
    for head in range(SHAPE.kv_heads):
        rows = slice(head * SHAPE.head_dim, (head + 1) * SHAPE.head_dim)
        mixed["v_proj"][rows] = outputs["v_proj"][rows].mean()
    eye2 = torch.eye(SHAPE.head_dim, dtype=r1.dtype).repeat(SHAPE.kv_heads, 1, 1)
    start = scores(weights, hessians, torch.eye(D, dtype=r1.dtype), eye2, method, False)
    usual = sum(float((start[name].sum(1) * each).sum()) for name, each in mixed.items())
    usual /= sum(len(each) for each in mixed.values())
    leaves = [each.requires_grad_() for each in (r1, r2)]
    expected = 0
    for name, s in scores(weights, hessians, r1, r2, method, False).items():
        removed = s.reshape(len(s), -1, 4).sort(-1).values[..., :2].sum((-1, -2))
        expected = expected + (
            (removed * mixed[name]).sum()
            if name in mixed
            else usual * len(s) * removed.sum() / start[name].sum()
        )
    assert_is(expected, leaves, loss, g1[0], g2)


@pytest.mark.parametrize("count", [0, 2])  # the tests of R3 have one
@pytest.mark.parametrize(("method", "objective", "sparsity", "compat"), CASES[::2])
def test_any_number_of_left_rotated_in_fp64(method, objective, sparsity, compat, count):
    """With boundary rotations on the residual: none, the down_proj of the layer before, or both."""
    layers = [make_layer(seed) for seed in (0, 3)]
    r1, r2 = random_rotations()
    problem, previous = (
        build(*layer, method, objective, sparsity, compat, product_dtype=torch.float64) for layer in layers
    )
    problem.left_rotated = [*previous.left_rotated, *problem.left_rotated][:count]
    loss, g1, g2 = problem.value_and_grad(r1[None], r2)
    leaves = [each.requires_grad_() for each in (r1, r2)]
    parts = [
        (layers[0], set(LINEARS) - {"down_proj"}),
        (layers[1], {"down_proj"}),
        (layers[0], {"down_proj"}),
    ]
    expected = sum(
        reference(layer, r1, r2, method, objective, sparsity, compat, names)
        for layer, names in parts[: count + 1]
    )
    assert_is(expected, leaves, loss, g1[0], g2)


@pytest.mark.parametrize(("size", "count"), [(8, 1), (FF, 2)])
@pytest.mark.parametrize(("method", "objective", "sparsity", "compat"), CASES)
def test_r3_in_fp64(method, objective, sparsity, compat, size, count):
    """R3 in blocks of 8 and in one, on the down_proj of the layer before, and of both."""
    layers = [make_layer(seed) for seed in (0, 3)]
    r1, r2 = random_rotations()
    problem, previous = (
        build(*layer, method, objective, sparsity, compat, product_dtype=torch.float64, down_block=size)
        for layer in layers
    )
    problem.left_rotated = [*previous.left_rotated, *problem.left_rotated][:count]
    r3 = [random_r3(FF // size, size, seed) for seed in range(count)]
    loss, g1, g2, g3 = problem.value_and_grad(r1[None], r2, torch.cat(r3))
    assert [each.shape for each in (g1, g2, g3)] == [each.shape for each in problem.identity()]
    leaves = [each.requires_grad_() for each in (r1, r2, *r3)]
    parts = [
        (layers[0], set(LINEARS) - {"down_proj"}, None),
        *((layers[1 - i], {"down_proj"}, blocks) for i, blocks in enumerate(r3)),
    ]
    expected = sum(
        reference(layer, r1, r2, method, objective, sparsity, compat, names, blocks)
        for layer, names, blocks in parts
    )
    assert_is(expected, leaves, loss, g1[0], g2, *g3.chunk(count))


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_r3_of_one_is_no_r3(method):
    """Without a turn, the pruned importance is that of the objective without R3."""
    weights, hessians = make_layer()
    with_r3, without = (
        build(weights, hessians, method, "pruned", "2:4", False, product_dtype=torch.float64, down_block=size)
        for size in (8, None)
    )
    values = [float(problem.value(*problem.identity())) for problem in (with_r3, without)]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert with_r3.value_and_grad(*with_r3.identity())[3].shape == (FF // 8, 8, 8)


@pytest.mark.parametrize("objective", ["entropy", "pruned"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_gradient_error_by_product_dtype(objective, dtype, tolerance):
    """‖g − g64‖ / ‖g64‖. In bf16 a few scores that are almost equal change their order."""
    layer, (r1, r2) = make_layer(dtype=torch.float32), random_rotations()
    double = [{name: tensor.double() for name, tensor in each.items()} for each in layer]
    r1.requires_grad_()
    expected = reference(double, r1, r2, "wanda", objective, "2:4", False)
    expected.backward()
    problem = build(*layer, "wanda", objective, "2:4", False, product_dtype=dtype)
    loss, g1, _ = problem.value_and_grad(r1.detach().float()[None], r2.float())
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected.detach()), rel=tolerance)
    assert float((g1[0].double() - r1.grad).norm() / r1.grad.norm()) < tolerance


def test_entropy_is_the_papers_entropy_for_either_objective():
    weights, hessians = make_layer()
    objective = build(weights, hessians, "wanda", "pruned", "2:4", False, product_dtype=torch.float64)
    eye2 = torch.eye(8, dtype=torch.float64).repeat(2, 1, 1)
    eye1 = torch.eye(D, dtype=torch.float64)
    expected = entropy_reference(weights, hessians, eye1, eye2, "wanda", False)
    assert abs(objective.entropy(*objective.identity()) / float(expected) - 1) < 1e-12
    assert objective.objective == "pruned"


@pytest.mark.parametrize("objective", ["entropy", "pruned"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_equal_blocks_are_the_diagonal_of_the_dense_gradient(method, objective):
    """Four blocks of R1 against the dense reference at the block-diagonal matrix of the blocks."""
    layer, (_, r2) = make_layer(), random_rotations()
    blocks = random_r3(4, 6, seed=5)
    problem = build(*layer, method, objective, "2:4", False, product_dtype=torch.float64, blocks=4)
    loss, g1, g2 = problem.value_and_grad(blocks, r2)
    leaves = [each.requires_grad_() for each in (blocks, r2)]
    expected = reference(layer, torch.block_diag(*blocks), r2, method, objective, "2:4", False)
    assert_is(expected, leaves, loss, g1, g2)


@pytest.mark.parametrize("down_block", [None, 8])
def test_an_objective_moves_with_all_its_tensors(down_block):
    weights, hessians = make_layer()
    options = dict(product_dtype=torch.float64, down_block=down_block)
    problem = build(weights, hessians, "wanda", "pruned", "2:4", False, **options)
    moved = problem.to(torch.device("meta"))
    found = moved.value_and_grad(*moved.identity())  # tensors on two devices are an error
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert problem.to(problem.device) is problem and problem.device.type == "cpu"


#: name → sparsity; a name without an entry is not pruned
MIXED = [
    dict(q_proj="2:4", v_proj="0.5", o_proj="1:4", gate_proj="4:8", down_proj="2:8"),
    dict(k_proj="0.25", up_proj="2:4"),
    dict(o_proj="2:4"),
    dict(down_proj="0.5"),
]


@pytest.mark.parametrize("sparsity", MIXED, ids=lambda sparsity: "-".join(sparsity))
@pytest.mark.parametrize("objective", ["entropy", "pruned"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_every_linear_has_its_own_sparsity_in_fp64(method, objective, sparsity):
    """Loss and gradient against autograd; a linear that is not pruned adds nothing to either."""
    weights, hessians = make_layer()
    r1, r2 = random_rotations()
    problem = build(weights, hessians, method, objective, sparsity, False, product_dtype=torch.float64)
    loss, g1, g2 = problem.value_and_grad(r1[None], r2)
    leaves = [each.requires_grad_() for each in (r1, r2)]
    layer = weights, hessians
    expected = sum(
        reference(layer, r1, r2, method, objective, text, False, {name}) for name, text in sparsity.items()
    )
    assert_is(expected, leaves, loss, g1[0], g2)
    entropy = entropy_reference(
        weights,
        hessians,
        torch.eye(D).double(),
        torch.eye(8).double().repeat(2, 1, 1),
        method,
        False,
        sparsity,
    )
    assert problem.entropy(*problem.identity()) == pytest.approx(float(entropy), rel=1e-12)


@pytest.mark.parametrize("objective", ["entropy", "pruned"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_gradient_against_finite_differences(method, objective):
    """(L(R + εD) - L(R - εD)) / 2ε against the inner product of the gradient and D, for random D."""
    weights, hessians = make_layer()
    problem = build(weights, hessians, method, objective, MIXED[0], False, product_dtype=torch.float64)
    r1, r2 = random_rotations()
    _, g1, g2 = problem.value_and_grad(r1[None], r2)
    generator, step = torch.Generator().manual_seed(2), 1e-6
    for _ in range(4):
        d1, d2 = (torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in (r1, r2))
        losses = [problem.value((r1 + sign * step * d1)[None], r2 + sign * step * d2) for sign in (1, -1)]
        difference = float(losses[0] - losses[1]) / (2 * step)
        assert difference == pytest.approx(float((g1[0] * d1).sum() + (g2 * d2).sum()), rel=1e-5)


@pytest.mark.parametrize("objective", ["entropy", "pruned"])
def test_rotations_that_the_caller_has_rounded(objective):
    weights, hessians = make_layer(dtype=torch.float32)
    problem = build(weights, hessians, "sparsegpt", objective, "2:4", False, product_dtype=torch.bfloat16)
    r1, r2 = (r.float() for r in random_rotations())
    rounded = r1[None].bfloat16(), r2.bfloat16()
    found, expected = (
        problem.value_and_grad(r1[None], r2, rounded=rounded),
        problem.value_and_grad(r1[None], r2),
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    other = problem.value_and_grad(r1[None], r2, rounded=(rounded[0].flip(-1), rounded[1]))
    assert not torch.equal(other[1], expected[1])  # they are used


def test_an_objective_without_pruned_linears():
    weights, hessians = make_layer()
    problem = build(weights, hessians, "wanda", "pruned", {}, False, product_dtype=torch.float64)
    assert problem.empty
    r1, r2 = random_rotations()
    loss, g1, g2 = problem.value_and_grad(r1[None], r2)
    assert (float(loss), float(g1.abs().max()), float(g2.abs().max())) == (0, 0, 0)
    assert problem.entropy(*problem.identity()) == 0


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize(
    ("objective", "sparsity", "down_block", "blocks"),
    [
        ("pruned", "2:4", 8, 1),
        ("entropy", "2:4", 8, 1),
        ("pruned", "0.5", None, 1),
        ("entropy", "2:4", None, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_parts_of_the_ranks_add_up(objective, sparsity, down_block, blocks, dtype, size):
    """Loss, gradients and entropy are sums over the ranks. In bf16 the metrics are factors."""
    layer = make_layer()
    options = dict(product_dtype=dtype, down_block=down_block, blocks=blocks)
    whole = build(*layer, "sparsegpt", objective, sparsity, False, **options)
    r1, r2 = random_rotations()
    matrices = [diagonal_blocks(r1, blocks) if blocks == 1 else whole.identity()[0], r2]
    matrices += [random_r3(FF // down_block, down_block)] if down_block else []
    matrices = [matrix.to(whole.loss_dtype).contiguous() for matrix in matrices]
    loss, *gradients = whole.value_and_grad(*matrices)
    parts = [whole.share(Ranks(rank, size)) for rank in range(size)]
    sums = [sum(found) for found in zip(*(part.value_and_grad(*matrices) for part in parts), strict=True)]
    tolerance = 1e-10 if dtype == torch.float64 else 4e-3  # of bf16
    for found, expected in zip(sums, (loss, *gradients), strict=True):
        assert torch.dist(found, expected) <= tolerance * expected.norm()
    entropy = sum(part.entropy(*matrices) for part in parts)
    assert entropy == pytest.approx(whole.entropy(*matrices), rel=tolerance)
    assert sum(float(part.value(*matrices)) > 0 for part in parts) == size  # every rank has a part
