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


def split_blocks(matrix: Tensor, blocks: int) -> Tensor:
    """The diagonal blocks [blocks, n/blocks, n/blocks] of a matrix [n, n]."""
    size = matrix.shape[0] // blocks
    return torch.stack([matrix[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(blocks)])


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
    steps, blocks = config.resolved_steps, config.blocks
    eye, _ = objectives[0].identity()
    if eye.shape[0] % blocks:
        raise UserError(f"block:{blocks} must divide the hidden size {eye.shape[0]}")
    start = [split_blocks(eye, blocks), *(objective.identity()[1] for objective in objectives)]
    optimizer = OPTIMIZERS[config.optimizer](start, lr=config.resolved_lr, steps=steps)
    best = [matrix.clone() for matrix in start]
    best_loss = torch.full((), torch.inf, dtype=eye.dtype, device=eye.device)
    curve, norms = [], []
    for step in range(steps + 1):
        r1 = torch.block_diag(*optimizer.matrices[0])
        loss, gradient, r2_gradients = torch.zeros_like(best_loss), torch.zeros_like(eye), []
        for objective, r2 in zip(objectives, optimizer.matrices[1:], strict=True):
            value, g1, g2 = objective.value_and_grad(r1, r2)
            loss += value
            gradient += g1
            r2_gradients.append(g2)
        gradients = [split_blocks(gradient, blocks), *r2_gradients]
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best = [torch.where(better, q, b) for q, b in zip(optimizer.matrices, best, strict=True)]
        curve.append(loss)
        norms.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
        if step % REPORT_EVERY == 0 or step == steps:
            current = float(loss)
            if not torch.isfinite(loss):
                raise UserError(
                    f"the rotation's objective is {current} at step {step}: lower --lr, "
                    "or --product-dtype float32"
                )
            on_step(step, steps, current / len(objectives))
        if step < steps:
            optimizer.step(gradients)
    values = torch.stack(curve).tolist()
    r1 = torch.block_diag(*(polish(block) for block in best[0]))
    rotations = [LayerRotation(r1, polish(r2)) for r2 in best[1:]]
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
