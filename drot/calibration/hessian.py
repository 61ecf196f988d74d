"""The Hessian H = (2/n) Σ x xᵀ of a linear's reconstruction error, and the Cholesky factor of its inverse."""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from drot.calibration.cholesky import cholesky_, invert_lower_
from drot.core.errors import UserError
from drot.machine.devices import is_gpu
from drot.machine.finite import check_finite
from drot.machine.products import add_product, product
from drot.machine.ranks import ALONE, Ranks
from drot.model.inputs import RoutedInputs

#: most bytes of the Hessians of a batch of experts; pruning the batch takes some ten times as many
BATCH_BYTES = 1 << 28
#: a number, or one for each matrix of a batch, fp64 [batch]
Scalar = float | Tensor

#: Device type → columns of a panel in `lower_panels`. A product with few columns leaves most of a large GPU
#: idle: 2048 is an estimate from the tiles of 128 by 256 and the 132 multiprocessors of an H100.
PANEL_COLUMNS = {"cpu": 256, "cuda": 2048}

#: The largest damping that is tried, in means of diag H. With it a positive semi-definite H [in, in] has a
#: condition number of at most in + 1, which fp32 can factorise, so a failure has another cause than too
#: little damping.
MAX_DAMPING = 1.0
#: elements that `_reverse_` moves at once
REVERSED = 1 << 24
#: The damping that is tried after a damping of 0 failed.
FIRST_DAMPING = 1e-3


def lower_panels(size: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """The blocks on or below the diagonal of a symmetric matrix [size, size], as panels of rows.

    Yields rows start:stop and columns 0:stop. With k panels, products for the panels alone take
    (k + 1) / (2 k) of the products for the whole matrix.
    """
    width = PANEL_COLUMNS.get(device.type, PANEL_COLUMNS["cpu"])
    for start in range(0, size, width):
        stop = min(start + width, size)
        yield slice(start, stop), slice(0, stop)


def at_once(size: int) -> int:
    """How many experts are computed at once, whose Hessians are [size, size]."""
    return max(1, BATCH_BYTES // (4 * size * size))


class HessianAccumulator:
    """Accumulates H = (2/n) Σ x xᵀ [in, in] in fp32 over batches, with n the number of sequences.

    Only the panels on or below the diagonal are accumulated (`lower_panels`). On a GPU the products take bf16
    and fp16 inputs as they are, and add in fp32.

    The scale is that of SparseGPT's code. It affects only `reference_compat`, which adds a term in the scale
    of H to the inverse.

    ranks: those that add the other sequences.
    count: the number of experts, each with a Hessian of its own: H is then [count, in, in]. None is no
        expert.
    """

    def __init__(
        self, size: int, device: torch.device | str, ranks: Ranks = ALONE, count: int | None = None
    ) -> None:
        shape = (size, size) if count is None else (count, size, size)
        self._sum = torch.zeros(shape, dtype=torch.float32, device=device)
        self._ranks = ranks
        #: the tokens of each expert
        self.tokens = torch.zeros(count or 0, dtype=torch.int64, device=device)

    def add(self, x: Tensor, root: Tensor | None = None) -> None:
        """Adds inputs x [..., in], any float dtype. Some modules have no dimension of sequences.

        root: √w [tokens, 1] of the weights w of all tokens of x; None weights all by 1.
        """
        rows = product_factor(x.detach(), root)
        for panel, columns in lower_panels(rows.shape[1], self._sum.device):
            add_product(self._sum[panel, columns], rows[:, panel].T, rows[:, columns])

    def add_experts(self, parts: Iterable[RoutedInputs], root: Tensor | None = None) -> None:
        """Adds the inputs of experts. root: as in `add`, of the tokens that were routed."""
        for places, tokens, x, routed in parts:
            self.tokens.index_add_(0, places, tokens)
            of_tokens = None if root is None else root[routed].view(-1, 1)
            rows = product_factor(x.detach(), of_tokens).view_as(x)
            for panel, columns in lower_panels(rows.shape[-1], self._sum.device):
                products = product(rows[..., panel].mT, rows[..., columns], torch.float32)
                self._sum[..., panel, columns].index_add_(0, places, products)

    def hessian(self, sequences: int) -> Tensor:
        """H, fp32. It uses the accumulator's memory, so `add` must not be called afterwards.

        sequences: those of this rank whose tokens were added.
        """
        self._ranks.add_(self._sum)
        for panel, _ in lower_panels(self._sum.shape[-1], self._sum.device):
            left = slice(0, panel.start)
            self._sum[..., left, panel] = self._sum[..., panel, left].mT
        return self._sum.mul_(2.0 / max(self._ranks.total(sequences), 1))


def product_factor(x: Tensor, root: Tensor | None = None) -> Tensor:
    """Inputs x [..., in] as rows [tokens, in] for `add_product`: fp32, or bf16 and fp16 on a GPU.

    root: fp32 [tokens, 1], by which the rows are multiplied; None for 1.
    """
    rows = x.reshape(-1, x.shape[-1])
    dtype = rows.dtype if is_gpu(rows.device) and rows.dtype.itemsize == 2 else torch.float32
    return (rows if root is None else rows * root).to(dtype)


def energy(weight: Tensor, hessian: Tensor, ranks: Ranks = ALONE) -> Scalar:
    """tr(W H Wᵀ) = ‖X Wᵀ‖² for H = XᵀX, without damping. The arguments are those of `energy_of_rows`.

    ranks: those that hold the other rows of W.
    """
    return sum_of_rows(energy_of_rows(weight, hessian), ranks)


def sum_of_rows(rows: Tensor, ranks: Ranks) -> Scalar:
    """The sum of a figure of each row, fp64 [..., out], over all ranks: a float, or [batch] for a batch."""
    total = rows.sum(-1)
    if not total.dim():
        return ranks.total(float(total))
    ranks.add_(total)
    return total


def energy_of_rows(weight: Tensor, hessian: Tensor) -> Tensor:
    """w H wᵀ of each row w, fp64 [..., out].

    The product W H takes the blocks of H on or above the diagonal only: the blocks below add the same again.

    weight: W [..., out, in], any float dtype. hessian: H [..., in, in], fp32 or fp64, symmetric.
    """
    weight = weight.to(hessian.dtype)
    # row by row: the order of a sum over the whole matrix would depend on the number of threads
    rows = torch.zeros(weight.shape[:-1], dtype=torch.float64, device=weight.device)
    for panel, _ in lower_panels(weight.shape[-1], hessian.device):
        left = slice(0, panel.start)
        product = weight[..., panel] @ hessian[..., panel, panel]
        add_product(product, weight[..., left], hessian[..., left, panel], alpha=2)
        rows += product.mul_(weight[..., panel]).sum(-1, dtype=torch.float64)
    return rows


def diagonal_of(matrix: Tensor) -> Tensor:
    """The diagonals [..., n] of matrices [..., n, n], as a view."""
    return matrix.diagonal(dim1=-2, dim2=-1)


def fix_dead_columns(hessian: Tensor) -> None:
    """Sets H_jj = 1 in place for dead columns j, whose input is always 0."""
    diagonal = diagonal_of(hessian)
    diagonal.masked_fill_(diagonal == 0, 1.0)


def damping_unit(diagonal: Tensor, average: str) -> Tensor:
    """What a damping of 1 adds to the diagonal of H [...].

    diagonal: diag H [..., in], any float dtype, 0 for dead columns.
    average: `mean` is SparseGPT's mean over all columns, with 1 for dead columns. `median` is the median of
        the live columns, which a few very large ones do not change; 1 if all are dead.
    """
    dead = diagonal == 0
    mean = diagonal.masked_fill(dead, 1.0).mean(-1)
    if average == "mean":
        return mean
    median = diagonal.masked_fill(dead, math.nan).nanmedian(-1).values
    return torch.where(dead.all(-1), mean, median)


@dataclass(frozen=True)
class HessianFactor:
    """The Cholesky factor of the inverse of a damped Hessian. H_jj is 1 for dead columns j.

    hinv: U [..., in, in], upper triangular with diag(U) > 0, (H + λ·unit·I)⁻¹ = UᵀU, fp32 or fp64.
    damping: λ, or [batch] in fp64.
    unit: the `damping_unit` [...].
    dead_columns: bool [..., in], True for columns whose input is always 0.
    """

    hinv: Tensor
    damping: Scalar
    unit: Tensor
    dead_columns: Tensor

    @property
    def added(self) -> Tensor:
        """λ·unit [...], which was added to the diagonal of H."""
        return self.unit * as_scalar(self.damping, self.unit)

    @property
    def inverse_diagonal(self) -> Tensor:
        panels = lower_panels(self.hinv.shape[-1], self.hinv.device)  # squares of all columns take memory
        return torch.cat([self.hinv[..., panel].square().sum(-2) for panel, _ in panels], -1)


def as_scalar(scalar: Scalar, like: Tensor) -> Scalar:
    """A scalar with which a tensor can be multiplied."""
    return scalar.to(like) if isinstance(scalar, Tensor) else scalar


def factorize(hessian: Tensor, damping: float, average: str = "mean", ranks: Ranks = ALONE) -> HessianFactor:
    """The factor of a Hessian, or of each of a batch.

    U = J L⁻¹ J, where J reverses the order of the columns and J H J = L Lᵀ. So one factorisation and one
    triangular inverse suffice. Factorising a computed H⁻¹ instead could fail, because of its rounding.

    Raises UserError for values that are not finite, and if the factorisation fails with MAX_DAMPING means.

    hessian: H [..., in, in], symmetric, any float dtype; not changed. The factor is fp32, or fp64 for fp64.
    damping: the first λ. While the factorisation fails, λ is multiplied by 10, up to MAX_DAMPING means.
    ranks: those that have the same H, and share the work.
    """
    check_finite(hessian, "hessian")
    dtype = torch.promote_types(hessian.dtype, torch.float32)
    diagonal = diagonal_of(hessian)
    dead_columns = diagonal == 0
    unit = damping_unit(diagonal.to(dtype), average)
    tried = torch.full_like(unit, damping, dtype=torch.float64)
    while True:
        damped = hessian.to(dtype).flip(-2, -1).contiguous()
        fix_dead_columns(damped)
        diagonal_of(damped).add_((unit * tried.to(dtype))[..., None])
        found = cholesky_(damped, ranks)
        if found.any():
            invert_lower_(damped, ranks)
            found &= damped.amin((-2, -1)).isfinite() & damped.amax((-2, -1)).isfinite()
            if found.all():
                _reverse_(damped)
                return HessianFactor(damped, tried if tried.dim() else float(tried), unit, dead_columns)
        largest = MAX_DAMPING * (damping_unit(diagonal.to(dtype), "mean") / unit).double()
        if (failed := ~found & (tried >= largest)).any():
            raise UserError(
                "the Hessian must be symmetric and positive semi-definite; got one of shape "
                f"{list(hessian.shape[-2:])} that has no Cholesky factor even with a damping of "
                f"{float(tried[failed][0]):g}: "
                'use more calibration samples, or `method="wanda"`'
            )
        more = torch.where(tried > 0, torch.minimum(10 * tried, largest), FIRST_DAMPING)
        tried = torch.where(found, tried, more)


def _reverse_(matrix: Tensor) -> None:
    """J M J for contiguous matrices M [..., n, n], in place: a second one would double the peak of memory."""
    flat = matrix.view(*matrix.shape[:-2], -1)
    size = flat.shape[-1]
    for start in range(0, size // 2, REVERSED):
        stop = min(start + REVERSED, size // 2)
        low, high = flat[..., start:stop], flat[..., size - stop : size - start]
        kept = low.flip(-1)
        low.copy_(high.flip(-1))
        high.copy_(kept)


class InputHessian:
    """The Hessian H [..., in, in] of an input, and its factor, which `factorize` computes at most once.

    The arguments are those of `factorize`.
    """

    def __init__(self, matrix: Tensor, damping: float, average: str = "mean", ranks: Ranks = ALONE) -> None:
        self.matrix, self.damping, self.average, self.ranks = matrix, damping, average, ranks

    @functools.cached_property
    def factor(self) -> HessianFactor:
        return factorize(self.matrix, self.damping, self.average, self.ranks)

    def forget_factor(self) -> None:
        """Frees the memory of the factor, which is as large as that of H."""
        self.__dict__.pop("factor", None)
