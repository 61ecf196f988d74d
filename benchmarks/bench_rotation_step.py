"""One training step of a decoder layer's rotations: drot's analytic gradient against autograd.

The peer `reference` is the paper's formulation, written here from its equations: QR of A inside the autograd
graph, the full product Rᵀ M R for every linear with Hessian M, R2 as a dense block-diagonal matrix, p log p
by rows and by columns in separate passes, and Adam on A. `paper` computes the same step with drot's gradient;
`fast` has drot's own optimizer.

FlopCounterMode of torch counts the floating-point operations of one evaluation. It counts matrix products
but not QR. The error of the gradient is measured against fp64.
"""

import torch
from _harness import arguments, interleaved, report
from torch.utils.flop_counter import FlopCounterMode

from drot.config import Sparsity
from drot.model.families import LLAMA
from drot.model.sizes import HeadShape
from drot.rotation.importance import Metric
from drot.rotation.objective import LayerObjective
from drot.rotation.optimizers import FastOptimizer, PaperOptimizer

RIGHT = {"q_proj": "attention", "k_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp"}


class Problem:
    """A decoder layer with the proportions of LLaMA-3, random weights and Hessians, and Wanda's scores."""

    def __init__(
        self,
        d: int,
        device: str,
        heads: int | None = None,
        ff: int | None = None,
        kv_heads: int | None = None,
    ) -> None:
        head_dim = d // heads if heads else 64 if d < 4096 else 128
        heads = heads or d // head_dim
        self.d, self.ff = d, ff or int(3.5 * d)
        self.shape = HeadShape(heads=heads, kv_heads=kv_heads or max(1, heads // 4), head_dim=head_dim)
        q, kv = heads * head_dim, self.shape.kv_heads * head_dim
        sizes = {
            "q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q),
            "gate_proj": (self.ff, d), "up_proj": (self.ff, d), "down_proj": (d, self.ff),
        }  # fmt: skip
        self.weights = {
            role: torch.randn(*size, device=device) / size[1] ** 0.5 for role, size in sizes.items()
        }
        self.hessians = {
            group: self._hessian(n, device) for group, n in (("attention", d), ("o", q), ("mlp", d))
        }

    @staticmethod
    def _hessian(n: int, device: str) -> torch.Tensor:
        x = torch.randn(2 * n, n, device=device) * torch.linspace(0.2, 3, n, device=device)
        return x.T @ x / n

    def cast(self, dtype: torch.dtype) -> "Problem":
        other = object.__new__(Problem)
        other.__dict__ = dict(self.__dict__)
        other.weights = {role: weight.to(dtype) for role, weight in self.weights.items()}
        other.hessians = {group: h.to(dtype) for group, h in self.hessians.items()}
        return other

    def objective(self, kind: str, dtype: torch.dtype) -> LayerObjective:
        h = self.shape.head_dim
        blocks = torch.stack(
            [self.hessians["o"][i * h : (i + 1) * h, i * h : (i + 1) * h] for i in range(self.shape.heads)]
        )
        metrics = {
            "attention": Metric(self.hessians["attention"], False),
            "mlp": Metric(self.hessians["mlp"], False),
            "o": Metric(blocks, False),
            "down": Metric(None, False),
        }
        return LayerObjective(
            self.weights, metrics, LLAMA.groups, self.shape,
            objective=kind, sparsity=Sparsity.parse("2:4"), product_dtype=dtype,
        )  # fmt: skip

    # ---- the reference formulation ----

    def reference_loss(self, r1: torch.Tensor, r2: torch.Tensor) -> torch.Tensor:
        """Σ H(P) over all groups, as in equations 5 and 9 and appendix A (Wanda)."""
        v_block = torch.block_diag(*r2)
        o_block = torch.block_diag(*r2.repeat_interleave(self.shape.group, 0))

        def salience(weight: torch.Tensor, right: torch.Tensor | None, group: str | None) -> torch.Tensor:
            if right is None:
                return weight**2
            return weight**2 * (right.T @ self.hessians[group] @ right).diagonal().abs()

        def entropy(s: torch.Tensor) -> torch.Tensor:
            p = s / s.sum(1, keepdim=True)
            return -torch.xlogy(p, p.clamp_min(torch.finfo(p.dtype).tiny)).sum()

        w = self.weights
        loss = entropy(salience(r1.T @ w["down_proj"], None, None).T)
        for role, group in RIGHT.items():
            loss = loss + entropy(salience(w[role] @ r1, r1, group))
        for s in (
            salience(v_block.T @ w["v_proj"] @ r1, r1, "attention"),
            salience(r1.T @ w["o_proj"] @ o_block, o_block, "o"),
        ):
            loss = loss + entropy(s) + entropy(s.T)
        return loss


def reference_step(problem: Problem, lr: float = 0.01):
    """A step of `reference`. As in the paper's code, QR is in fp32 and all else in the dtype of `problem`."""
    dtype = problem.weights["q_proj"].dtype
    a = [matrix.clone().requires_grad_() for matrix in problem.objective("entropy", torch.float32).identity()]
    a[0] = a[0].detach()[0].requires_grad_()
    adam = torch.optim.Adam(a, lr=lr)

    def step() -> None:
        adam.zero_grad()
        problem.reference_loss(*(torch.linalg.qr(matrix)[0].to(dtype) for matrix in a)).backward()
        torch.nn.utils.clip_grad_norm_(a, 1.0)
        adam.step()

    return step


def analytic_step(objective: LayerObjective, optimizer_class, lr: float = 0.01):
    """A training step with drot's gradient."""
    optimizer = optimizer_class(
        list(objective.identity()), lr=lr, steps=100_000, objective=objective.objective
    )

    def step() -> None:
        _, g1, g2 = objective.value_and_grad(*optimizer.matrices)
        optimizer.step([g1, g2])

    return step


def products_alone(problem: Problem, objective: LayerObjective):
    """The large matrix products of any exact step: the rotated weight Y and the gradient of every linear, and
    M R for every distinct M. Their time is a lower bound for the step."""
    r1 = objective.identity()[0][0].to(objective.product_dtype)
    left = [problem.weights["o_proj"], problem.weights["down_proj"]]
    right = [problem.weights[role] for role in (*RIGHT, "v_proj")]

    def step() -> None:
        for weight in right:
            weight.T @ (weight @ r1)
        for weight in left:
            weight @ (r1.T @ weight).T
        objective.r1_metric.matrix[0] @ r1  # the matrices M of both inputs, one below the other

    return step


def flops(function) -> int:
    """Floating-point operations of the matrix products in one call of `function`."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def gradient_error(problem: Problem) -> float:
    """‖g − g64‖ / ‖g64‖ for R1 at a random rotation: g from drot in fp32, g64 from autograd in fp64."""
    double = problem.cast(torch.float64)
    r1 = torch.linalg.qr(torch.randn_like(double.hessians["mlp"]))[0].requires_grad_()
    h = problem.shape.head_dim
    r2 = torch.linalg.qr(torch.randn(problem.shape.kv_heads, h, h, dtype=r1.dtype, device=r1.device))[0]
    double.reference_loss(r1, r2).backward()
    with torch.no_grad():
        _, g1, _ = problem.objective("entropy", torch.float32).value_and_grad(r1.float()[None], r2.float())
    return float((g1[0].double() - r1.grad).norm() / r1.grad.norm())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="hidden sizes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cuda = torch.device(options.device).type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    for d in options.sizes or ([4096] if cuda else [512, 1024]):
        torch.manual_seed(0)
        problem = Problem(d, options.device, ff=14336 if d == 4096 else 28672 if d == 8192 else None)
        working = problem.cast(dtype)
        functions = {
            "reference": reference_step(working),
            "paper": analytic_step(working.objective("entropy", dtype), PaperOptimizer),
            "fast": analytic_step(working.objective("entropy", dtype), FastOptimizer),
            "products alone": products_alone(working, working.objective("entropy", dtype)),
            "fast, pruned importance": analytic_step(working.objective("pruned", dtype), FastOptimizer),
        }
        eye = problem.objective("entropy", torch.float32).identity()
        objective = problem.objective("entropy", torch.float32)
        analytic = flops(lambda: objective.value_and_grad(*eye))  # noqa: B023
        start = [eye[0][0].clone().requires_grad_(), eye[1].clone().requires_grad_()]
        reference = flops(lambda: problem.reference_loss(*start).backward())  # noqa: B023
        timings = interleaved(functions, device=options.device, repeats=options.repeats, warmup=2)
        report(
            "rotation_step", f"d={d} ff={problem.ff} entropy {dtype}", timings, peer="reference",
            target="paper", at_least=6 if cuda else 4, device=options.device, save=options.csv,
        )  # fmt: skip
        floor = timings["reference"].median / timings["products alone"].median
        print(f"  the products alone are {floor:.2f} x reference, the limit of an exact step on this machine")
        ratio = analytic / reference
        print(f"  matrix FLOPs {analytic / 1e9:.2f} G against {reference / 1e9:.2f} G: {ratio:.3f}")
        if d <= 1024:
            print(f"  gradient error in fp32 against fp64 autograd: {gradient_error(problem):.1e}")


if __name__ == "__main__":
    main()
