"""The importance of a linear's weights before and after the rotation, for the manifest and for plots.

Both are taken from the same inputs and the same dense function. Before the rotation, the weight is W = Y Rᵀ
and the Hessian of its inputs R H Rᵀ, in the basis of the original model with folded norms. After it, they are
Y and H, in the rotated basis. The importance of a weight is the score of the recipe's method
(rotation/importance.py), in units of the mean score of the linear before the rotation.
"""

import functools

import torch
from torch import Tensor

from drot.calibration.hessian import InputHessian, Scalar
from drot.checkpoint.importance import HISTOGRAM_BINS, HISTOGRAM_LOG10
from drot.config import ResolvedRecipe, Sparsity
from drot.machine.ranks import ALONE
from drot.model.family import InputGroup, LinearSpec
from drot.model.rotation import LayerRotation, rotated_hessian, rotated_weight
from drot.model.sizes import HeadShape
from drot.pruning import removed_mask
from drot.rotation.importance import column_scale

#: most rows and columns of a map
MAP_SIZE = 32
#: importances that are binned at a time, and rows that are summed at a time; they limit the memory
CHUNK, ROWS = 1 << 22, 4096


class GroupImportance:
    """The importance of the weights of one input group.

    hessian: H [in, in] of the inputs of the rotated layer.
    rotation: None for a layer that is not rotated.
    output_r1: R1 [d, d] of the basis in which the linears write; None is the layer's own.
    """

    def __init__(
        self,
        group: InputGroup,
        hessian: InputHessian,
        recipe: ResolvedRecipe,
        shape: HeadShape,
        rotation: LayerRotation | None,
        output_r1: Tensor | None = None,
    ) -> None:
        self._group, self._recipe, self._shape, self._hessian_after = group, recipe, shape, hessian
        self._rotation: LayerRotation | None = None
        if rotation is not None:
            self._rotation = rotation.to(hessian.matrix.device, hessian.matrix.dtype)
            self._output_r1 = self._rotation.r1 if output_r1 is None else output_r1.to(hessian.matrix)

    @functools.cached_property
    def hessian(self) -> InputHessian:
        """H in the basis before the rotation."""
        after = self._hessian_after
        if self._rotation is None:
            return after
        inverse, ranks = self._rotation.inverse, after.ranks
        before = rotated_hessian(self._group, after.matrix, inverse, self._shape, ranks)
        if before is after.matrix:
            return after
        return InputHessian(before, after.damping, after.average, after.ranks)

    def forget(self) -> None:
        """Frees the memory of `hessian`."""
        self.__dict__.pop("hessian", None)

    @functools.cached_property
    def scale_after(self) -> Tensor | None:
        """The column_scale of the rotated inputs, for which their Hessian is factorised."""
        return self._scale(self._hessian_after)

    def _scale(self, hessian: InputHessian) -> Tensor | None:
        pruning, compat = self._recipe.pruning, self._recipe.rotation.reference_compat
        return column_scale(pruning.method, hessian, damping=pruning.damping, reference_compat=compat)

    @property
    def rotated(self) -> bool:
        return self._rotation is not None

    def unrotated(self, linear: LinearSpec, weight: Tensor) -> Tensor:
        """The rotated `weight` [out, in] in the basis before the rotation, in the dtype of the Hessian."""
        weight = weight.to(self.hessian.matrix.dtype)
        if self._rotation is None:
            return weight
        ranks, inverse = self._hessian_after.ranks, self._rotation.inverse
        if linear.output == "r2":  # which mixes rows
            ranks = ALONE
        rows = ranks.share(weight.shape[-2])
        own = rotated_weight(linear, weight, inverse, self._shape, self._output_r1.mT, rows)
        return ranks.gather_rows(own)

    def of_weight(
        self, weight: Tensor, unrotated: Tensor, sparsity: Sparsity
    ) -> tuple[dict[str, Scalar], dict[str, Tensor]]:
        """The pruned share of the importance, and the tensors of the plots.

        The share is the importance of the weights with the smallest scores, as many as `sparsity` removes of
        each group or row, divided by the importance of all weights before the rotation. So the loss of the
        objective `pruned` is the sum of out_features · share over the linears of a layer.

        Returns basis → share, and `map_<basis>` [rows, columns] fp16, the means of blocks of the matrix, with
        `histogram_<basis>` int64 [2, HISTOGRAM_BINS], the numbers of kept and of removed weights. basis:
        `before`, and `after` for a rotated layer.

        weight, unrotated: the dense weight [..., out, in] after and before the rotation. The shares and the
            tensors of a batch have a first dimension for it.
        """
        bases = {"before": (unrotated, self.hessian)}
        if self.rotated:
            bases["after"] = (weight, self._hessian_after)
        shares: dict[str, Scalar] = {}
        tensors: dict[str, Tensor] = {}
        mean = total = unrotated.new_ones((), dtype=torch.float64)
        for basis, (matrix, hessian) in bases.items():
            score = matrix.to(unrotated.dtype, copy=True).square_()
            scale = self.scale_after if hessian is self._hessian_after else self._scale(hessian)
            if scale is not None:
                score *= scale[..., None, :]
            if basis == "before":
                total = score.sum((-2, -1), dtype=torch.float64)
                mean = torch.where(total > 0, total / (score.shape[-2] * score.shape[-1]), 1)
            removed = removed_mask(score, sparsity, scope="row")
            pieces = zip(score.split(ROWS, -2), removed.split(ROWS, -2), strict=True)
            lost = torch.stack(
                [(piece * gone).sum((-2, -1), dtype=torch.float64) for piece, gone in pieces]
            ).sum(0)
            share = torch.where(total > 0, lost / total, 0)
            shares[basis] = share if share.dim() else float(share)
            score /= mean[..., None, None].to(score)
            tensors[f"map_{basis}"] = block_means(score).half()
            tensors[f"histogram_{basis}"] = histogram(score, removed)
            del score, removed, pieces  # before those of the other basis
        return shares, {name: tensor.cpu() for name, tensor in tensors.items()}


def map_bytes(shape: tuple[int, ...], *, rotated: bool) -> int:
    """The bytes of the tensors of one linear whose weight has `shape` [out, in]."""
    rows, columns = (min(size, MAP_SIZE) for size in shape)
    return (2 if rotated else 1) * (2 * rows * columns + 2 * HISTOGRAM_BINS * 8)


def block_means(score: Tensor) -> Tensor:
    """The means of score [..., out, in] over blocks: [..., min(out, MAP_SIZE), min(in, MAP_SIZE)].

    Row i lies in block floor(i · MAP_SIZE / out), so that the blocks differ by at most one row, and likewise
    for columns.
    """
    for _ in range(2):  # products with a matrix of means; index_add_ would not be deterministic on a GPU
        rows = score.shape[-2]
        size = min(rows, MAP_SIZE)
        block = torch.arange(rows, device=score.device) * size // rows
        means = torch.nn.functional.one_hot(block, size).to(score.dtype)
        score = ((means / means.sum(0)).T @ score).mT
    return score


def histogram(score: Tensor, removed: Tensor) -> Tensor:
    """The numbers of kept and of removed weights by log10(score), int64 [..., 2, HISTOGRAM_BINS]."""
    low, high = HISTOGRAM_LOG10
    batch, bins = score.shape[:-2].numel(), 2 * HISTOGRAM_BINS
    counts = torch.zeros(batch * bins, dtype=torch.int64, device=score.device)
    first = bins * torch.arange(batch, device=score.device)[:, None]
    flat = (tensor.reshape(batch, -1).split(max(1, CHUNK // batch), 1) for tensor in (score, removed))
    for part, mask in zip(*flat, strict=True):
        bin = ((part.log10() - low) / (high - low) * HISTOGRAM_BINS).clamp(0, HISTOGRAM_BINS - 1).long()
        bin += HISTOGRAM_BINS * mask + first
        counts += torch.bincount(bin.flatten(), minlength=batch * bins)
    return counts.reshape(*score.shape[:-2], 2, -1)
