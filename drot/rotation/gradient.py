"""The sums of a layer's loss and gradients over its linears, and the factors of a gradient."""

import functools

import torch
from torch import Tensor

from drot.machine.products import add_product, product


class Sums:
    """The sums over the linears of the loss and, `with_gradients`, of its gradients in R1, R2 and R3."""

    def __init__(self, dtype: torch.dtype, *, with_gradients: bool = True) -> None:
        self.dtype, self.with_gradients = dtype, with_gradients
        self.losses: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}

    def loss(self) -> Tensor:
        if self.losses[0].device.type == "cpu":  # in a fixed order, which a sum of a stack does not promise
            return functools.reduce(torch.add, self.losses)
        return torch.stack(self.losses).sum()

    def add(self, name: str, factors: tuple[Tensor, Tensor]) -> None:
        """Adds the product of two factors to the gradient `name`, in the dtype of the sums."""
        if name in self.gradients:
            add_product(self.gradients[name], *factors)
        else:
            self.gradients[name] = product(*factors, self.dtype)


def right_factors(matrix: Tensor, dy: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The factors of d loss/d B [count, b, b] for Y [out, n] = matrix · blockdiag(B)."""
    parts, dparts = (tensor.unflatten(1, (count, -1)).transpose(0, 1) for tensor in (matrix, dy))
    return parts.mT, dparts


def left_factors(matrix: Tensor, dy: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The factors of d loss/d B [count, b, b] for Y [n, in] = blockdiag(B)ᵀ · matrix."""
    parts, dparts = (tensor.unflatten(0, (count, -1)) for tensor in (matrix, dy))
    return parts, dparts.mT
