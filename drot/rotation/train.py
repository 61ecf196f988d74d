"""The training loop of one layer's rotations."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drot.config import RotationConfig
from drot.errors import UserError
from drot.rotation.objective import LayerObjective
from drot.rotation.optimizers import OPTIMIZERS
from drot.rotation.retraction import orthogonality_error, reorthogonalize
from drot.surgery.rotate import LayerRotation

#: called with (step, steps, loss) now and then
OnStep = Callable[[int, int, float], None]
#: the host waits for the device only every so many steps
REPORT_EVERY = 10
#: steps over which the slope of the loss is taken
SLOPE_STEPS = 20


@dataclass(frozen=True)
class TrainingRecord:
    """What the manifest keeps of a training: loss_curve[i] and gradient_norm[i] before step i, the
    last one after all steps; best_step is the one that was kept."""

    loss_before: float
    loss_after: float
    best_step: int
    seconds: float
    orthogonality_error: float
    loss_curve: list[float] = field(repr=False)
    gradient_norm: list[float] = field(repr=False)


class _R1:
    """R1's parametrisation: which stacks of square matrices are optimised, and how they make the
    [n, b, b] that the objectives take and hand their gradients back."""

    def __init__(self, start: Tensor, blocks: int | tuple[int, ...]) -> None:
        self.size = start.shape[0] * start.shape[1]
        self.unequal = blocks if isinstance(blocks, tuple) else None
        if self.unequal and sum(self.unequal) != self.size:
            raise UserError(f"unequal blocks must add up to the hidden size {self.size}, got {self.unequal}")

    def split(self, matrix: Tensor) -> list[Tensor]:
        """[n, b, b] → the stacks that are optimised."""
        if not self.unequal:
            return [matrix]
        dense, parts, at = matrix[0], [], 0
        for size in self.unequal:
            parts.append(dense[at : at + size, at : at + size])
            at += size
        return parts

    def join(self, stacks: list[Tensor]) -> Tensor:
        """The inverse of `split`."""
        return torch.block_diag(*stacks)[None] if self.unequal else stacks[0]


class _Evaluation:
    """Loss and gradients of the summed objectives, over all of them or over some a step."""

    def __init__(
        self, objectives: list[LayerObjective], r1: _R1, stacks: int, config: RotationConfig
    ) -> None:
        self._objectives, self._r1, self._stacks = objectives, r1, stacks
        self._per_step = min(config.layers_per_step or len(objectives), len(objectives))
        self._generator = torch.Generator().manual_seed(0)
        self._waiting: list[int] = []

    def choose(self, *, everything: bool) -> list[int]:
        """Which objectives the next step looks at: all, or the next of a shuffled round."""
        if everything or self._per_step == len(self._objectives):
            return list(range(len(self._objectives)))
        while len(self._waiting) < self._per_step:
            self._waiting += torch.randperm(len(self._objectives), generator=self._generator).tolist()
        chosen, self._waiting = self._waiting[: self._per_step], self._waiting[self._per_step :]
        return sorted(set(chosen))

    def __call__(self, matrices: list[Tensor], chosen: list[int]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, scaled up to all objectives, and a gradient for each stack (None: not looked at)."""
        r1, share = self._r1.join(matrices[: self._stacks]), len(self._objectives) / len(chosen)
        loss, gradient = r1.new_zeros(()), torch.zeros_like(r1)
        r2_gradients: list[Tensor | None] = [None] * len(self._objectives)
        for index in chosen:
            objective = self._objectives[index].to(r1.device)
            value, g1, g2 = objective.value_and_grad(r1, matrices[self._stacks + index])
            loss += value * share
            gradient += g1 * share
            r2_gradients[index] = g2
        return loss, [*self._r1.split(gradient), *r2_gradients]


def _has_settled(curve: list[Tensor], config: RotationConfig) -> bool:
    """Whether `fast` on whole batches moves by less than `early_stop` a step, as a share of the loss.

    It is the spread of the last steps that counts, not the difference of two of them: a loss that
    rises for a while is on its way.
    """
    if config.optimizer != "fast" or config.layers_per_step or len(curve) <= SLOPE_STEPS:
        return False
    low, high = torch.stack(curve[-1 - SLOPE_STEPS :]).aminmax()
    return float(high - low) < config.early_stop * SLOPE_STEPS * float(low)


@torch.no_grad()
def train_rotation(
    objectives: list[LayerObjective],
    config: RotationConfig,
    on_step: OnStep = lambda step, steps, loss: None,
    device: torch.device | None = None,
) -> tuple[list[LayerRotation], TrainingRecord]:
    """Minimises the sum of the objectives over one R1 that they share and an R2 of each.

    One objective gives the paper's rotation of a layer; those of all layers give `shared`. Returns
    a LayerRotation for each objective (fp64, orthogonal to rounding) at the best step, the state
    behind the last step counted among them. With `layers_per_step` a step looks at some of the
    objectives only, which then may lie on another device than `device`; the best is chosen between
    the start and the end, where all are looked at. Raises UserError if the loss is not finite.
    """
    started = time.perf_counter()
    steps = config.resolved_steps
    device = device or objectives[0].device
    eye = objectives[0].identity()[0].to(device)
    r1 = _R1(eye, config.blocks)
    start = [*r1.split(eye), *(objective.identity()[1].to(device) for objective in objectives)]
    stacks = len(start) - len(objectives)  # those of R1 come first
    evaluate = _Evaluation(objectives, r1, stacks, config)
    optimizer = OPTIMIZERS[config.optimizer](start, lr=config.resolved_lr, steps=steps)
    best = [matrix.clone() for matrix in start]
    best_loss = torch.full((), torch.inf, dtype=eye.dtype, device=device)
    best_step = torch.zeros((), dtype=torch.long, device=device)
    curve, norms = [], []
    for step in range(steps + 1):
        chosen = evaluate.choose(everything=step in (0, steps))
        loss, gradients = evaluate(optimizer.matrices, chosen)
        if len(chosen) == len(objectives):
            better = loss < best_loss
            best_loss = torch.where(better, loss, best_loss)
            best_step = torch.where(better, step, best_step)
            best = [torch.where(better, q, b) for q, b in zip(optimizer.matrices, best, strict=True)]
        curve.append(loss)
        norms.append(torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt())
        if step % REPORT_EVERY == 0 or step == steps:
            if not torch.isfinite(loss):
                raise UserError(
                    f"the rotation's objective is {float(loss)} at step {step}: lower `lr`, "
                    'or set `product_dtype="float32"`'
                )
            on_step(step, steps, float(loss) / len(objectives))
            if _has_settled(curve, config):
                break
        if step < steps:
            optimizer.step(gradients)
    values = torch.stack(curve).tolist()
    merged = torch.block_diag(*r1.join([reorthogonalize(stack) for stack in best[:stacks]]))
    rotations = [LayerRotation(merged, reorthogonalize(r2)) for r2 in best[stacks:]]
    record = TrainingRecord(
        loss_before=values[0],
        loss_after=float(best_loss),
        best_step=int(best_step),
        seconds=time.perf_counter() - started,
        orthogonality_error=max(orthogonality_error(matrix) for matrix in best),
        loss_curve=values,
        gradient_norm=torch.stack(norms).tolist(),
    )
    return rotations, record
