"""The rotations of a model: the matrices of a layer, how they act on weights, and the bases between layers.

W is [out, in]. The residual stream is a row vector h; rotated it is h R1. A weight changes to W R where its
input is rotated and to Rᵀ W where its outputs are (drot/model/families.py says which).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drot.config import BoundaryPlace
from drot.machine.ranks import ALONE, Ranks
from drot.model.family import InputGroup, LinearSpec
from drot.model.sizes import HeadShape


@dataclass(frozen=True)
class LayerRotation:
    """The orthogonal matrices of one layer: r1 [d, d], r2 [kv_heads, head_dim, head_dim] and, if the input of
    down_proj is rotated, r3 [ff/b, b, b].

    In a mixture r3 has the blocks of each expert, one after the other, and then those of the MLP that reads
    all tokens. Their number follows from the inputs of each down_proj, which b divides.
    """

    r1: Tensor
    r2: Tensor
    r3: Tensor | None = None

    @property
    def matrices(self) -> dict[str, Tensor]:
        """Name → matrix, of those that there are."""
        found = {"r1": self.r1, "r2": self.r2, "r3": self.r3}
        return {name: matrix for name, matrix in found.items() if matrix is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> "LayerRotation":
        return LayerRotation(**{name: function(matrix) for name, matrix in self.matrices.items()})

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "LayerRotation":
        return self.map(lambda matrix: matrix.to(device, dtype))

    @property
    def inverse(self) -> "LayerRotation":
        return self.map(lambda matrix: matrix.mT)

    def of_input(
        self, linear: LinearSpec, shape: HeadShape, width: int, experts: int | None = None
    ) -> Tensor | None:
        """The diagonal blocks [n, b, b] of the rotation of the inputs of a linear; None if nothing does.

        width: the number of its inputs.
        experts: of how many experts, from that of `linear` on; the blocks are then [experts, n, b, b] if they
            are of R3. None for one linear.
        """
        if linear.input == "r1":
            return self.r1[None]
        if linear.input == "r2":
            return self.r2.repeat_interleave(shape.group, 0)
        if linear.input != "r3" or self.r3 is None:
            return None
        count = width // self.r3.shape[-1]
        if linear.expert is None:  # behind the experts, if there are any
            return self.r3[-count:]
        start, number = linear.expert * count, experts or 1
        blocks = self.r3[start : start + number * count]
        return blocks if experts is None else blocks.unflatten(0, (number, count))

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The matrices under the names that they have in a file, `<prefix>r1` and so on."""
        return {prefix + name: matrix for name, matrix in self.matrices.items()}

    def tensors(self, prefix: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """As `named`, copies on the CPU."""
        return self.map(lambda matrix: matrix.to("cpu", dtype, copy=True).contiguous()).named(prefix)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str) -> "LayerRotation":
        """The inverse of `named`."""
        return cls(tensors[f"{prefix}r1"], tensors[f"{prefix}r2"], tensors.get(f"{prefix}r3"))


class RotationsOfLayers(Mapping[int, LayerRotation]):
    """Layer → its rotation. The last two that were asked for lie in memory, as a boundary needs those of two
    layers, and the others where they are saved.

    load: gives the saved rotation of a layer; None keeps all rotations in memory.
    layers: the layers whose rotations are saved already.
    """

    def __init__(
        self, load: Callable[[int], LayerRotation] | None = None, layers: Iterable[int] = ()
    ) -> None:
        self._load, self._layers = load, dict.fromkeys(layers)
        self._in_memory: dict[int, LayerRotation] = {}

    def keep(self, layer: int, rotation: LayerRotation) -> None:
        """Adds the rotation of a layer. It must be saved before those of two further layers are added."""
        self._layers[layer] = None
        self._in_memory.pop(layer, None)
        self._in_memory[layer] = rotation
        while self._load is not None and len(self._in_memory) > 2:
            self._in_memory.pop(next(iter(self._in_memory)))

    def __getitem__(self, layer: int) -> LayerRotation:
        if layer not in self._layers:
            raise KeyError(layer)
        if layer not in self._in_memory:
            assert self._load is not None
            self.keep(layer, self._load(layer))
        return self._in_memory[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


@dataclass(frozen=True)
class Boundary:
    """Q = R1(l)ᵀ R1(l+1) between layers l and l + 1, which have different bases (paper, section 4.3).

    At the place `inside`, Q = R1(l) leads from the stream, which has the original basis, into layer l.

    r1, next_r1: R1 [d, d] of the two bases; None is the original basis.
    """

    place: BoundaryPlace
    r1: Tensor | None
    next_r1: Tensor

    def matrix(self, ranks: Ranks = ALONE) -> Tensor:
        """Q [d, d] in fp64. Each of `ranks` computes its rows."""
        following = self.next_r1.double()
        if self.r1 is None:
            return following
        rows = ranks.share(len(following))
        return ranks.gather_rows(self.r1[:, rows].double().T @ following)

    def to(self, device: torch.device | str) -> "Boundary":
        r1 = None if self.r1 is None else self.r1.to(device)
        return Boundary(self.place, r1, self.next_r1.to(device))


@dataclass(frozen=True)
class Bases:
    """In which basis each of `layers` layers writes the residual stream, and which of them holds a matrix Q.

    The places are those of model/boundary.py; None where all layers share R1, and no layer holds a matrix.

    sharing: the number of consecutive layers that share an R1, between which there is no matrix.
    """

    place: BoundaryPlace | None
    layers: int
    sharing: int = 1

    def segment(self, index: int) -> int:
        """The number of the R1 of layer `index`, from 0 on."""
        return index // self.sharing

    def ends_segment(self, index: int) -> bool:
        """Whether layer `index` is the last that has its R1."""
        return index + 1 == self.layers or self.segment(index + 1) != self.segment(index)

    def writes_next(self, index: int) -> bool:
        """Whether layer `index` writes in the basis of the next layer."""
        return self.place == "residual" and index + 1 < self.layers and self.ends_segment(index)

    def holds(self, index: int) -> bool:
        starts = self.place == "input" and index > 0 and self.ends_segment(index - 1)
        return self.writes_next(index) or starts or self.place == "inside"

    def held(
        self, index: int, rotations: Sequence[LayerRotation] | Mapping[int, LayerRotation]
    ) -> Boundary | None:
        """The boundary that layer `index` holds, from the rotations of the two layers at the boundary."""
        if self.place is None or not self.holds(index):
            return None
        if self.place == "inside":
            return Boundary(self.place, None, rotations[index].r1)
        before = index if self.place == "residual" else index - 1
        return Boundary(self.place, rotations[before].r1, rotations[before + 1].r1)

    def merged(
        self, index: int, rotations: Sequence[LayerRotation] | Mapping[int, LayerRotation]
    ) -> Boundary | None:
        """The boundary with which layer `index` is rotated. A finished layer gets that of its input."""
        return None if self.place == "input" else self.held(index, rotations)

    def writes_in(self, index: int) -> int:
        """The layer in whose basis layer `index` writes."""
        return index + 1 if self.writes_next(index) else index


def rotate_right(matrix: Tensor, blocks: Tensor) -> Tensor:
    """matrix [out, n·b] · blockdiag(blocks [n, b, b]); for n = 1 also for a batch of matrices.

    Or matrix [experts, out, n·b] and blocks [experts, n, b, b].
    """
    if blocks.dim() > 3:
        parts_of_each = matrix.unflatten(-1, (blocks.shape[1], -1)).transpose(-3, -2)
        return (parts_of_each @ blocks).transpose(-3, -2).flatten(-2)
    if len(blocks) == 1:
        return matrix @ blocks[0]

    def parts(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (len(blocks), -1)).transpose(0, 1)

    if matrix.dtype.itemsize > 2:  # a CPU may round a product into the parts of a matrix differently
        return torch.bmm(parts(matrix), blocks).transpose(0, 1).flatten(1)
    result = matrix.new_empty(matrix.shape)
    torch.bmm(parts(matrix), blocks, out=parts(result))  # saves the copy that `flatten` makes
    return result


def rotate_left(blocks: Tensor, matrix: Tensor) -> Tensor:
    """blockdiag(blocks [n, b, b])ᵀ · matrix [n·b, in]; for n = 1 also for a batch of matrices.

    Or blocks [experts, n, b, b] and matrix [experts, n·b, in].
    """
    if blocks.dim() > 3:
        return (blocks.mT @ matrix.unflatten(-2, (blocks.shape[1], -1))).flatten(-3, -2)
    if len(blocks) == 1:
        return blocks[0].T @ matrix
    return torch.bmm(blocks.mT, matrix.unflatten(0, (len(blocks), -1))).flatten(0, 1)


def rotated_weight(
    linear: LinearSpec,
    weight: Tensor,
    rotation: LayerRotation,
    shape: HeadShape,
    output_r1: Tensor,
    rows: slice = slice(None),
) -> Tensor:
    """The rotated weight [out, in] of a linear, from its folded weight, in the dtype of the arguments.

    Or [experts, out, in] of those of several experts, of which `linear` is the first.

    output_r1: R1 [d, d] of the basis in which the linear writes, if it writes to the residual stream.
    rows: those that are computed; of a linear whose outputs R2 rotates all are.
    """
    if linear.output == "r1":
        weight = output_r1[:, rows].T @ weight
    elif linear.output != "r2":
        weight = weight[..., rows, :]
    experts = len(weight) if weight.dim() > 2 else None
    if (blocks := rotation.of_input(linear, shape, weight.shape[-1], experts)) is not None:
        weight = rotate_right(weight, blocks)
    if linear.output == "r2":
        weight = rotate_left(rotation.r2, weight)
    return weight


def rotated_hessian(
    group: InputGroup, hessian: Tensor, rotation: LayerRotation, shape: HeadShape, ranks: Ranks = ALONE
) -> Tensor:
    """RᵀHR, the Hessian [in, in] of an input group in the basis of its rotated inputs, in the dtype of H.

    Or [experts, in, in] of those of several experts, of which `group` is of the first. R is R1, blockdiag(R2)
    over the query heads, R3, or 1. Where it is 1, H itself is returned. Of an R1, each of `ranks` computes
    its rows of the result.
    """
    experts = len(hessian) if hessian.dim() > 2 else None
    if (blocks := rotation.of_input(group.linears[0], shape, hessian.shape[-1], experts)) is None:
        return hessian
    if ranks.size > 1 and len(blocks) == 1 and experts is None:
        columns = blocks[0][:, ranks.share(hessian.shape[-1])]
        # the columns of the symmetric result are its rows
        return ranks.gather_rows((blocks[0].T @ (hessian @ columns)).T)
    return rotate_left(blocks, rotate_right(hessian, blocks))


def around_ones(matrix: Tensor) -> Tensor:
    """H M H for a stack M [..., n, n], with the Householder matrix H = 1 - 2 v vᵀ that maps e₁ to 1/√n.

    If M is orthogonal and leaves e₁ as it is, the result leaves the vector of ones: x - mean(x), and so a
    LayerNorm, commutes with it. H M H of the identity is the identity.
    """
    v = torch.full(matrix.shape[-1:], -(matrix.shape[-1] ** -0.5), dtype=matrix.dtype, device=matrix.device)
    v[0] += 1.0
    v = v / torch.where((norm := v.norm()) > 0, norm, 1)
    matrix = matrix - 2 * torch.outer(v, v) @ matrix
    return matrix - 2 * (matrix @ v)[..., None] * v


def newton_schulz(x: Tensor) -> Tensor:
    """One step x (3 - xᵀx)/2 towards the orthogonal factor of x [..., n, n]; an error e in the
    singular values becomes 3/2 e². Converges where they lie in (0, √3)."""
    return 1.5 * x - 0.5 * x @ (x.mT @ x)


@torch.no_grad()
def reorthogonalize(q: Tensor) -> Tensor:
    """The orthogonal matrix nearest to an almost orthogonal q, in fp64 (Newton–Schulz).

    Two steps in q's own dtype and two in fp64: from singular values within a twentieth of 1, as steps in bf16
    leave them, the first two reach fp32's rounding, and products in fp64 are slow on most GPUs.
    """
    q = newton_schulz(newton_schulz(q))
    return newton_schulz(newton_schulz(q.double()))


def orthogonality_error(q: Tensor) -> float:
    """max |QᵀQ − I| over the stack, measured in fp64."""
    q = q.double()
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return float((q.mT @ q - eye).abs().amax())
