"""The paper's optimiser against autograd, and the properties of the training loop."""

import pytest
import torch
from test_objective import LINEARS, SHAPE, D, build, entropy_reference, make_layer

from drot.config import Recipe, resolve
from drot.core.errors import UserError
from drot.model.rotation import reorthogonalize
from drot.rotation.optimizers import FastOptimizer, PaperOptimizer
from drot.rotation.train import train_rotation


def objective(kind="entropy", sparsity="2:4", method="wanda", seed=0, **options):
    weights, hessians = make_layer(seed)
    return build(weights, hessians, method, kind, sparsity, False, product_dtype=torch.float64, **options)


def config(**changes):
    return resolve(Recipe().replace(**({"steps": 30, "lr": 0.02} | changes))).rotation


def test_paper_optimizer_is_adam_through_qr():
    """Five steps against autograd through torch.linalg.qr, clipping to norm 1 and torch's Adam."""
    weights, hessians = make_layer()
    problem = objective()
    ours = PaperOptimizer(list(problem.identity()), lr=0.01, steps=5, objective="entropy")
    a = [matrix.clone().requires_grad_() for matrix in problem.identity()]
    adam = torch.optim.Adam(a, lr=0.01)
    for _ in range(5):
        _, g1, g2 = problem.value_and_grad(*ours.matrices)
        ours.step([g1, g2])
        adam.zero_grad()
        q1, q2 = (torch.linalg.qr(matrix)[0] for matrix in a)
        entropy_reference(weights, hessians, q1[0], q2, "wanda", False).backward()
        torch.nn.utils.clip_grad_norm_(a, 1.0)
        adam.step()
    for matrix, got in zip(a, ours.matrices, strict=True):
        q, r = torch.linalg.qr(matrix.detach())
        expected = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # torch leaves the signs open
        assert torch.allclose(got, expected, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["paper", "fast"])
@pytest.mark.parametrize(("kind", "sparsity"), [("entropy", "2:4"), ("pruned", "2:4"), ("pruned", "0.5")])
def test_training_lowers_the_objective_on_orthogonal_matrices(optimizer, kind, sparsity):
    problem = objective(kind, sparsity)
    (rotation,), record = train_rotation([problem], config(optimizer=optimizer))
    before, after = problem.value(*problem.identity()), problem.value(rotation.r1[None], rotation.r2)
    assert float(after) < 0.97 * float(before)
    assert record["loss_before"] == pytest.approx(float(before), rel=1e-9)
    assert record["loss_after"] == pytest.approx(float(after), rel=1e-6)
    assert torch.allclose(rotation.r1.T @ rotation.r1, torch.eye(D, dtype=torch.float64), atol=1e-12)
    for r2 in rotation.r2:
        assert torch.allclose(r2.T @ r2, torch.eye(SHAPE.head_dim, dtype=torch.float64), atol=1e-12)
    assert len(record["loss_curve"]) == 31


@pytest.mark.parametrize("optimizer", ["paper", "fast"])
@pytest.mark.parametrize("kind", ["entropy", "pruned"])
def test_r3_is_trained_together_with_r1_and_r2(optimizer, kind):
    """Two layers share R1; each has its own R2 and R3, but for a down_proj that stays dense."""
    problems = [
        objective(kind, seed=seed, down_block=8, sparsity=sparsity)
        for seed, sparsity in ((0, "2:4"), (3, dict.fromkeys(LINEARS[:-1], "2:4")), (5, "2:4"))
    ]
    rotations, record = train_rotation(problems, config(optimizer=optimizer))
    assert rotations[1].r3 is None
    total = 0.0
    for problem, rotation in zip(problems, rotations, strict=True):
        r1, *own = rotation.matrices.values()
        total += float(problem.value(r1[None], *own))
        for matrix in own:
            assert torch.allclose(matrix.mT @ matrix, torch.eye(8, dtype=torch.float64), atol=1e-12)
    assert record["loss_after"] == pytest.approx(total, rel=1e-6)
    first, last = rotations[0].r3, rotations[2].r3
    assert not torch.allclose(first, torch.eye(8, dtype=torch.float64), atol=1e-2)
    assert not torch.allclose(first, last, atol=1e-2)


def test_the_entropy_is_recorded_by_step():
    """At each quarter of 8 steps, against the paper's equation for the matrices that the steps give.

    With the entropy as objective, at the first and the best step.
    """
    weights, hessians = make_layer()
    problem = objective("pruned")
    _, record = train_rotation([problem], config(optimizer="fast", steps=8))
    steps = FastOptimizer(list(problem.identity()), lr=config().lr, steps=8, objective="pruned")
    expected = []
    for step in range(9):
        if step % 2 == 0:
            r1, r2 = steps.matrices
            expected.append(float(entropy_reference(weights, hessians, r1[0], r2, "wanda", False)))
        if step < 8:
            _, *gradients = problem.value_and_grad(*steps.matrices)
            steps.step(gradients)
    assert [step for step, _ in record["entropy_curve"]] == [0, 2, 4, 6, record["best_step"]]
    values = [value for _, value in record["entropy_curve"]]
    assert values == pytest.approx(expected, rel=1e-9)
    assert [record["entropy_before"], record["entropy_after"]] == [values[0], values[-1]]
    assert len({round(value, 6) for value in expected}) == 5
    _, record = train_rotation([objective("entropy")], config(optimizer="fast"))
    curve = [[0, record["loss_before"]], [record["best_step"], record["loss_after"]]]
    assert torch.allclose(torch.tensor(record["entropy_curve"]), torch.tensor(curve))


class ScriptedObjective:
    """An objective with given losses, which records the R1 of each call."""

    empty, fixed_r1, keeps_ones, objective = False, False, False, "entropy"

    def __init__(self, losses):
        self.losses, self.calls, self.device = losses, [], torch.device("cpu")

    def to(self, device):
        return self

    def share(self, ranks):
        return self

    def identity(self):
        return torch.eye(6, dtype=torch.float64)[None], torch.eye(2, dtype=torch.float64)[None]

    def own_identity(self):
        return self.identity()[1:]

    def entropy(self, r1, r2):
        return 1.0

    def value_and_grad(self, r1, r2, rounded=None):
        generator = torch.Generator().manual_seed(len(self.calls))
        self.calls.append(r1.clone())
        loss = torch.tensor(self.losses[len(self.calls) - 1], dtype=torch.float64)
        return loss, torch.randn(1, 6, 6, generator=generator, dtype=torch.float64), torch.zeros_like(r2)


@pytest.mark.parametrize(
    ("reported", "best"), [([5, 3, 1, 4, 2], 20), ([5, 3, 4, 2, 1], 35), ([1, 2, 3, 4, 5], 0)]
)
def test_the_best_reported_step_is_kept_and_may_be_the_last(reported, best):
    losses = [0.5] * 36  # the losses between two reports are not compared
    losses[:31:10], losses[35] = reported[:4], reported[4]
    problem = ScriptedObjective([float(loss) for loss in losses])
    (rotation,), record = train_rotation([problem], config(steps=35))
    assert record["best_step"] == best
    assert record["loss_after"] == 1
    assert record["loss_curve"] == losses
    assert torch.allclose(rotation.r1, problem.calls[best][0], atol=1e-12)
    assert not torch.allclose(problem.calls[1], problem.calls[2], atol=1e-3)


def test_no_steps_is_the_identity():
    (rotation,), record = train_rotation([objective()], config(steps=0))
    assert torch.equal(rotation.r1, torch.eye(D, dtype=torch.float64))
    assert record["loss_before"] == record["loss_after"]


def test_blocks_stay_blocks():
    (dense,), dense_record = train_rotation([objective()], config())
    (rotation,), record = train_rotation([objective(blocks=4)], config(blocks=4))
    inside = torch.block_diag(*[torch.ones(6, 6)] * 4).bool()
    assert rotation.r1[~inside].abs().max() == 0
    assert dense.r1[~inside].abs().max() > 1e-3
    assert torch.allclose(rotation.r1.T @ rotation.r1, torch.eye(D, dtype=torch.float64), atol=1e-12)
    assert dense_record["loss_after"] < record["loss_after"] < record["loss_before"]


def test_shared_rotation_minimises_the_sum():
    problems = [objective(seed=0), objective(seed=7)]
    rotations, record = train_rotation(problems, config())
    assert torch.equal(rotations[0].r1, rotations[1].r1)
    assert not torch.equal(rotations[0].r2, rotations[1].r2)
    total = sum(float(p.value(r.r1[None], r.r2)) for p, r in zip(problems, rotations, strict=True))
    assert total == pytest.approx(record["loss_after"], rel=1e-6)
    assert record["loss_after"] < record["loss_before"]


def test_fast_stops_when_the_loss_has_converged_and_paper_does_not():
    flat = [10.0] + [5.0] * 100
    seen = []
    _, record = train_rotation(
        [ScriptedObjective(flat)], config(steps=100), lambda *event: seen.append(event)
    )
    assert len(record["loss_curve"]) == 31  # the first report after 20 steps without a change
    assert seen == [(0, 100, 10.0), (10, 100, 5.0), (20, 100, 5.0), (30, 30, 5.0)]
    for losses, changes in (
        (flat, {"optimizer": "paper"}),
        (flat, {"early_stop": 0.0}),
        ([10.0 - 0.05 * step for step in range(101)], {}),  # falling
        ([10.0 + 0.05 * step for step in range(101)], {"early_stop": 0.0}),  # rising
        (
            [7.0 + (step - 50) % 10 for step in range(101)],
            {},
        ),  # as high as 20 steps ago
    ):
        _, record = train_rotation([ScriptedObjective(losses)], config(steps=100, **changes))
        assert len(record["loss_curve"]) == 101


def test_mini_batches_of_layers_reach_nearly_the_same_loss():
    problems = [objective(seed=seed) for seed in range(4)]
    _, whole = train_rotation(problems, config(steps=60))
    rotations, record = train_rotation(problems, config(steps=60, layers_per_step=1))
    total = sum(float(p.value(r.r1[None], r.r2)) for p, r in zip(problems, rotations, strict=True))
    assert total == pytest.approx(record["loss_after"], rel=1e-6)
    assert record["best_step"] == 60
    gain, whole_gain = (r["loss_before"] - r["loss_after"] for r in (record, whole))
    assert gain > 0.5 * whole_gain


def test_mini_batches_choose_every_layer_in_turn(monkeypatch):
    called = []
    problems = [objective(seed=seed) for seed in range(4)]
    for number, problem in enumerate(problems):
        original = problem.value_and_grad

        def recorded(r1, r2, rounded=None, number=number, original=original):
            called.append(number)
            return original(r1, r2, rounded=rounded)

        problem.value_and_grad = recorded
    train_rotation(problems, config(steps=5, layers_per_step=2))
    assert called[:4] == called[-4:] == [0, 1, 2, 3]  # the first and the last step take all layers
    assert len(called) == 4 + 4 * 2 + 4
    assert sorted(called[4:8]) == sorted(called[8:12]) == [0, 1, 2, 3]


def test_a_loss_that_is_not_finite_stops_with_advice(monkeypatch):
    problem = objective()
    nan = torch.tensor(torch.nan, dtype=torch.float64)
    monkeypatch.setattr(type(problem), "value_and_grad", lambda self, r1, r2, rounded: (nan, r1, r2))
    with pytest.raises(UserError, match="got nan at step 0: lower `lr`"):
        train_rotation([problem], config())


def test_reorthogonalize_gives_a_near_orthogonal_matrix():
    q = torch.linalg.qr(torch.randn(3, 16, 16, dtype=torch.float64))[0]
    noisy = (q + 1e-4 * torch.randn_like(q)).float()
    nearest = reorthogonalize(noisy)
    assert torch.allclose(nearest.mT @ nearest, torch.eye(16, dtype=torch.float64), atol=1e-12)
    assert (nearest - q).abs().max() < 1e-3
