"""The training loop of rotations."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drot.config import ResolvedRotation
from drot.core.errors import UserError
from drot.machine.graph import GraphedStep, capture_for
from drot.machine.ranks import ALONE, Ranks
from drot.model.rotation import LayerRotation, around_ones, orthogonality_error, reorthogonalize
from drot.rotation.objective import LayerObjective
from drot.rotation.optimizers import OPTIMIZERS, FastOptimizer

#: Progress callback of the training: (step, steps, mean loss of a layer). The last call has step = steps.
OnStep = Callable[[int, int, float], None]
#: Steps between two progress reports. Only a report makes the CPU wait for the GPU. The rotations of a report
#: are kept if their loss is the smallest so far.
REPORT_EVERY = 10
#: Number of last steps over which early stopping measures the change of the loss.
EARLY_STOP_STEPS = 20


class _R1Parameters:
    """The `count` matrices that are optimised for R1 [n, b, b]: itself, or none if R1 is fixed.

    With `keeps_ones` each block is H P H (`around_ones`), and P is optimised, of which the gradient leaves
    the first row and column as they are.
    """

    def __init__(self, start: Tensor, *, fixed: bool = False, keeps_ones: bool = False) -> None:
        self._fixed, self.keeps_ones = start if fixed else None, keeps_ones
        self.count = 0 if fixed else 1

    def split(self, r1: Tensor) -> list[Tensor]:
        return [r1][: self.count]

    def gradients(self, r1: Tensor) -> list[Tensor]:
        """The gradient in each of the matrices, from the gradient in R1."""
        found = self.split(r1)
        if self.keeps_ones:
            found = [around_ones(gradient) for gradient in found]
            for gradient in found:
                gradient[:, 0] = gradient[:, :, 0] = 0.0
        return found

    def join(self, matrices: list[Tensor]) -> Tensor:
        """R1 of the matrices. At the identity it is the inverse of `split`."""
        if self._fixed is not None:
            return self._fixed
        return around_ones(matrices[0]) if self.keeps_ones else matrices[0]


class _SummedObjective:
    """The sum of the objectives, with gradients; optionally estimated from a few objectives in each step.

    In a list of matrices those of R1 come first, and the own matrices of each objective follow, R2 and R3.

    counts: the number of own matrices of each objective.
    per_step: the number of objectives in a step; 0 for all.
    ranks: those of which each has a part of every objective (`LayerObjective.share`).
    """

    def __init__(
        self,
        objectives: list[LayerObjective],
        r1: _R1Parameters,
        counts: list[int],
        per_step: int,
        ranks: Ranks,
    ) -> None:
        self._objectives, self._r1, self._ranks = objectives, r1, ranks
        stops = list(itertools.accumulate(counts, initial=r1.count))
        self._own = [slice(*ends) for ends in itertools.pairwise(stops)]
        self._per_step = min(per_step or len(objectives), len(objectives))
        self._generator = torch.Generator().manual_seed(0)
        self._queue: list[int] = []

    @property
    def whole(self) -> bool:
        return self._per_step == len(self._objectives)

    def entropy(self, matrices: list[Tensor]) -> float:
        r1 = self._r1.join(matrices[: self._r1.count])
        pairs = zip(self._objectives, self.own(matrices), strict=True)
        own_part = sum(objective.to(r1.device).entropy(r1, *own) for objective, own in pairs)
        return self._ranks.total(own_part)

    def own(self, matrices: list[Tensor]) -> list[list[Tensor]]:
        """The own matrices of each objective."""
        return [matrices[own] for own in self._own]

    def choose(self, *, everything: bool) -> list[int]:
        """The objectives of the next step: all of them, or the next in a random order."""
        if everything or self.whole:
            return list(range(len(self._objectives)))
        while len(self._queue) < self._per_step:
            self._queue += torch.randperm(len(self._objectives), generator=self._generator).tolist()
        chosen, self._queue = self._queue[: self._per_step], self._queue[self._per_step :]
        return sorted(set(chosen))

    def __call__(
        self, matrices: list[Tensor], chosen: list[int], rounded: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss and the gradient in each matrix, None for those of an objective that is not chosen.

        The loss and the gradient in R1 are scaled from the chosen objectives to all objectives.

        rounded: `matrices` in the dtype of the objectives' products; None computes them for each objective.
        """
        count, scale = self._r1.count, len(self._objectives) / len(chosen)
        r1 = self._r1.join(matrices[:count])
        # a product with H would be rounded too
        r1_rounded = r1 if rounded is None or self._r1.keeps_ones else self._r1.join(rounded[:count])
        loss = r1_gradient = None
        own_gradients: list[Tensor | None] = [None] * (len(matrices) - count)
        for index in chosen:
            objective, own = self._objectives[index].to(r1.device), self._own[index]
            casts = None if rounded is None else [r1_rounded.to(rounded[own][0]), *rounded[own]]
            value, g1, *of_own = objective.value_and_grad(r1, *matrices[own], rounded=casts)
            if scale != 1:
                value, g1 = value * scale, g1 * scale
            loss = value if loss is None else loss + value
            r1_gradient = g1 if r1_gradient is None else r1_gradient.add_(g1)
            own_gradients[own.start - count : own.stop - count] = of_own
        assert loss is not None and r1_gradient is not None, "no objective was chosen"
        self._ranks.add_(loss, r1_gradient, *(each for each in own_gradients if each is not None))
        return loss, [*self._r1.gradients(r1_gradient), *own_gradients]


def _has_converged(curve: list[Tensor], config: ResolvedRotation) -> bool:
    """Whether early stopping applies: the loss changes by less than its share `early_stop` in a step.

    The change is the spread of the last steps, because a loss that rises and falls can return to an earlier
    value. The optimizer `paper` and `layers_per_step` do not stop early.
    """
    if config.optimizer != "fast" or config.layers_per_step or len(curve) <= EARLY_STOP_STEPS:
        return False
    low, high = torch.stack(curve[-1 - EARLY_STOP_STEPS :]).aminmax()
    return float(high - low) < config.early_stop * EARLY_STOP_STEPS * float(low)


class _Training:
    """The matrices of a training, and its steps.

    trained: the indices of the objectives that are trained; those without a pruned linear are left out.
    steps: the number of steps; 0 if no objective is trained.
    start: the matrices of R1, then the own matrices of each trained objective, at the identity.
    """

    def __init__(
        self,
        objectives: list[LayerObjective],
        config: ResolvedRotation,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self._objectives, self._device, self._ranks = objectives, device, ranks
        self.steps = 0 if all(objective.empty for objective in objectives) else config.steps
        self.trained = [i for i, objective in enumerate(objectives) if not (self.steps and objective.empty)]
        eye = objectives[0].identity()[0].to(device)
        self._r1 = _R1Parameters(eye, fixed=objectives[0].fixed_r1, keeps_ones=objectives[0].keeps_ones)
        trained = [objectives[index] for index in self.trained]
        own = [[matrix.to(device) for matrix in objective.own_identity()] for objective in trained]
        self.start = [*self._r1.split(eye), *itertools.chain(*own)]
        counts = [len(matrices) for matrices in own]
        shares = [objective.share(ranks) for objective in trained]
        self.total = _SummedObjective(shares, self._r1, counts, config.layers_per_step, ranks)
        self.optimizer = OPTIMIZERS[config.optimizer](
            self.start, lr=config.lr, steps=self.steps, objective=objectives[0].objective
        )
        self._graphed = self._graphed_step()

    def _graphed_step(self) -> GraphedStep | None:
        """Evaluation and step as one CUDA graph; None where they cannot be captured.

        Sums over ranks cannot, nor copies of objectives from main memory. The step does not hold `self`:
        Python would free such a circle, with the memory of the graph, late.
        """
        optimizer, total = self.optimizer, self.total
        copies = any(objective.device.type != self._device.type for objective in self._objectives)
        if self._ranks.size > 1 or copies:
            return None
        if not (self.steps and isinstance(optimizer, FastOptimizer) and optimizer.capturable and total.whole):
            return None
        turn, dtype = optimizer.turn, self._objectives[0].product_dtype

        def evaluate_and_turn() -> Tensor:
            # once, for the evaluation and the step
            rounded = [matrix.to(dtype) for matrix in optimizer.matrices]
            loss, gradients = total(optimizer.matrices, total.choose(everything=True), rounded)
            turn(gradients, rounded)
            return loss

        return GraphedStep(evaluate_and_turn, capture_for(self._device), optimizer.matrices)

    def step(self, step: int) -> tuple[Tensor, bool]:
        """The loss before step `step`, and whether it is that of all objectives. Then takes the step."""
        chosen = self.total.choose(everything=step in (0, self.steps))
        if self._graphed is not None and isinstance(self.optimizer, FastOptimizer) and step < self.steps:
            loss = self._graphed()
            self.optimizer.count_step()
        else:
            if step == self.steps:
                self.free_graph()
            loss, gradients = self.total(self.optimizer.matrices, chosen)
            if step < self.steps:
                self.optimizer.step(gradients)
        return loss, len(chosen) == len(self.trained)

    def free_graph(self) -> None:
        """Makes room for an evaluation, which takes as much memory as the graph has."""
        self._graphed = None

    def entropy_steps(self) -> set[int]:
        """The steps at which the entropy is measured for the record."""
        if not self.total.whole or self._objectives[0].objective == "entropy":
            return {0}
        return {self.steps * part // 4 for part in range(4)}

    def entropy(self, matrices: list[Tensor]) -> float:
        """The entropy, the mean over the layers."""
        return self.total.entropy(matrices) / len(self._objectives)

    def rotations(self, matrices: list[Tensor]) -> list[LayerRotation]:
        """The rotation of every objective from the matrices, which are orthogonal in fp64."""
        r1 = torch.block_diag(*self._r1.join(matrices[: self._r1.count]))
        trained = dict(zip(self.trained, self.total.own(matrices), strict=True))
        own = [
            trained.get(index) or [eye.to(self._device, torch.float64) for eye in objective.own_identity()]
            for index, objective in enumerate(self._objectives)
        ]
        return [LayerRotation(r1, *matrices) for matrices in own]


@torch.no_grad()
def train_rotation(
    objectives: list[LayerObjective],
    config: ResolvedRotation,
    on_step: OnStep = lambda step, steps, loss: None,
    device: torch.device | None = None,
    ranks: Ranks = ALONE,
) -> tuple[list[LayerRotation], dict[str, Any]]:
    """Minimises the sum of the objectives over one R1, which all share, and the R2 and R3 of each of them.

    The objective of one layer gives the paper's rotation of a layer. The objectives of all layers give the
    rotations of `mode="shared"`. Returns a LayerRotation, fp64 and orthogonal, for each objective at the best
    of every tenth step and the last, and the figures of the training (TrainingRecord of
    checkpoint/records.py). With `layers_per_step` the best step is the first or the last, because only there
    the loss of all objectives is computed.

    An objective without a pruned linear is left out, and its own matrices are the identity. If all objectives
    are, R1 is the identity, and no step is taken. r3 of a LayerRotation is R3 of its objective.

    Raises UserError if the loss is not finite.

    objectives: with `layers_per_step` they may be on another device than `device`.
    device: None is the device of the first objective.
    ranks: those that train the same objectives together. Each computes a part of the loss and the gradients,
        and takes the same steps.
    """
    started = time.perf_counter()
    training = _Training(objectives, config, device or objectives[0].device, ranks)
    steps, optimizer = training.steps, training.optimizer
    best, best_loss, best_step = training.start, math.inf, 0
    curve: list[Tensor] = []
    entropies: dict[int, float] = {}
    for step in range(steps + 1):
        reports = step % REPORT_EVERY == 0 or step == steps
        if step in training.entropy_steps():
            entropies[step] = training.entropy(optimizer.matrices)
        if reports:
            candidate = [matrix.clone() for matrix in optimizer.matrices]
        loss, of_all = training.step(step)
        curve.append(loss)
        if reports:
            assert ranks.same(candidate), "the ranks have trained different rotations"
            value = float(loss)
            if not math.isfinite(value):
                raise UserError(
                    f"the rotation's objective must be finite, got {value} at step {step}: lower `lr`, "
                    'or set `product_dtype="float32"`'
                )
            if of_all and value < best_loss:
                best, best_loss, best_step = candidate, value, step
            ends = step == steps or _has_converged(curve, config)
            on_step(step, step if ends else steps, value / len(objectives))
            if ends:
                break
    training.free_graph()
    exact = [reorthogonalize(matrix) for matrix in best]
    entropies[best_step] = training.entropy(exact)
    losses = torch.stack(curve).tolist()
    return training.rotations(exact), {
        "loss_before": losses[0],
        "loss_after": best_loss,
        "best_step": best_step,
        "seconds": time.perf_counter() - started,
        "orthogonality_error": max(orthogonality_error(matrix) for matrix in best),
        "loss_curve": losses,
        "entropy_curve": [list(point) for point in sorted(entropies.items())],
        "entropy_before": entropies[0],
        "entropy_after": entropies[best_step],
    }
