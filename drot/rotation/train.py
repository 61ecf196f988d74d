"""The training loop of one layer's rotations."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drot.config import RotationConfig
from drot.errors import UserError
from drot.rotation.objective import LayerObjective
from drot.rotation.orthogonal import OPTIMIZERS, orthogonality_error, polish
from drot.surgery.rotate import LayerRotation

#: called with (step, steps, loss) now and then
OnStep = Callable[[int, int, float], None]
#: the host waits for the device only every so many steps
REPORT_EVERY = 10


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


@torch.no_grad()
def train_rotation(
    objectives: list[LayerObjective],
    config: RotationConfig,
    on_step: OnStep = lambda step, steps, loss: None,
) -> tuple[list[LayerRotation], TrainingRecord]:
    """Minimises the sum of the objectives over one R1 that they share and an R2 of each.

    One objective gives the paper's rotation of a layer; those of all layers give `shared`. Returns
    a LayerRotation for each objective (fp64, orthogonal to rounding) at the best step, the state
    behind the last step counted among them. Raises UserError if the loss is not finite.
    """
    started = time.perf_counter()
    steps = config.resolved_steps
    eye = objectives[0].identity()[0]
    r1 = _R1(eye, config.blocks)
    start = [*r1.split(eye), *(objective.identity()[1] for objective in objectives)]
    heads = len(start) - len(objectives)  # the stacks of R1 come first
    optimizer = OPTIMIZERS[config.optimizer](start, lr=config.resolved_lr, steps=steps)
    best = [matrix.clone() for matrix in start]
    best_loss = torch.full((), torch.inf, dtype=eye.dtype, device=eye.device)
    curve, norms = [], []
    for step in range(steps + 1):
        current = r1.join(optimizer.matrices[:heads])
        loss, gradient, r2_gradients = torch.zeros_like(best_loss), torch.zeros_like(eye), []
        for objective, r2 in zip(objectives, optimizer.matrices[heads:], strict=True):
            value, g1, g2 = objective.value_and_grad(current, r2)
            loss += value
            gradient += g1
            r2_gradients.append(g2)
        gradients = [*r1.split(gradient), *r2_gradients]
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best = [torch.where(better, q, b) for q, b in zip(optimizer.matrices, best, strict=True)]
        curve.append(loss)
        norms.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
        if step % REPORT_EVERY == 0 or step == steps:
            if not torch.isfinite(loss):
                raise UserError(
                    f"the rotation's objective is {float(loss)} at step {step}: lower --lr, "
                    "or --product-dtype float32"
                )
            on_step(step, steps, float(loss) / len(objectives))
        if step < steps:
            optimizer.step(gradients)
    values = torch.stack(curve).tolist()
    merged = torch.block_diag(*r1.join([polish(stack) for stack in best[:heads]]))
    rotations = [LayerRotation(merged, polish(r2)) for r2 in best[heads:]]
    record = TrainingRecord(
        loss_before=values[0],
        loss_after=min(values),
        best_step=values.index(min(values)),
        seconds=time.perf_counter() - started,
        orthogonality_error=max(orthogonality_error(matrix) for matrix in best),
        loss_curve=values,
        gradient_norm=torch.stack(norms).tolist(),
    )
    return rotations, record
