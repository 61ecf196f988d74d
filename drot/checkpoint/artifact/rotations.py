"""The rotations of a checkpoint, computed from the checkpoint and the dense model that it was made from.

They are not exact: the checkpoint holds them rounded to its dtype, and R2 in pruned weights only. The
artifact lists by how much each weight differs from its prediction, so other rotations change its size alone.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from drot.model.block_rotation import DOWN_ROTATION
from drot.model.boundary import ROTATION_MODULE
from drot.model.decoder import DecoderModel
from drot.model.layer import DecoderLayer
from drot.model.rotation import Bases, LayerRotation, reorthogonalize

#: times that R2 is fitted to the kept weights; the removed weights are those of the fit before
FITS = 10
#: rows of the embedding that are in fp64 at the same time
ROWS = 4096


@torch.no_grad()
def rotations_in(
    read: Callable[[str], Tensor], decoder: DecoderModel, bases: Bases, *, r3: bool
) -> Iterator[LayerRotation]:
    """The rotation of each layer, fp64, one after the other.

    read: name of a tensor of the rotated model → the checkpoint's tensor, dense.
    decoder: the dense model.
    bases: which layers of the checkpoint hold a rotation.
    r3: whether the layers hold an R3.
    """
    family, place = decoder.family, bases.place
    if family.rotates_stream:
        with decoder.in_memory(family.embedding):
            rotated = read(family.in_files(f"{family.embedding}.weight"))
            pairs = zip(decoder.embedding.weight.split(ROWS), rotated.split(ROWS), strict=True)
            r1 = _nearest(sum(a.double().T @ b.double() for a, b in pairs))
        del rotated
    else:
        r1 = torch.eye(decoder.hidden_size, dtype=torch.float64)
    for layer in decoder.loaded_layers():
        prefix = f"{family.in_files(family.layers)}.{layer.index}"
        step = read(f"{prefix}.{ROTATION_MODULE}.weight").double().T if bases.holds(layer.index) else None
        if step is not None and place == "inside":
            r1 = reorthogonalize(step)
        elif step is not None and place == "input":
            r1 = reorthogonalize(r1 @ step)
        blocks = read(f"{prefix}.{family.mlp}.{DOWN_ROTATION}.weight").double() if r3 else None
        r2 = _r2(layer, r1, read, prefix)
        yield LayerRotation(r1, r2, None if blocks is None else reorthogonalize(blocks))
        if step is not None and place == "residual":
            r1 = reorthogonalize(r1 @ step)


def _r2(dense: DecoderLayer, r1: Tensor, read: Callable[[str], Tensor], prefix: str) -> Tensor:
    """R2 [kv_heads, head_dim, head_dim] of a layer, from v_proj and o_proj before and after its rotation.

    read: as in `rotations_in`. prefix: of the names of the layer's tensors.
    """
    heads = dense.heads
    layer = dense.copy(dtype=torch.float64)
    none = torch.eye(heads.head_dim, dtype=torch.float64).expand(heads.kv_heads, -1, -1)
    layer.rotate(LayerRotation(r1, none))
    before, after = [], []  # for each linear [kv_heads, head_dim, n], so that after = R2ᵀ before
    for linear in layer.linears.values():
        spec = linear.spec
        if "r2" in (spec.input, spec.output):
            pruned = read(f"{prefix}.{dense.family.name_in_files(f'{spec.path}.weight')}").double()
            weights = [linear.weight, pruned if spec.part is None else pruned[linear.rows]]
            if spec.input == "r2":  # the heads of queries share the R2 of their KV head
                weights = [w.T.unflatten(0, (heads.kv_heads, heads.group, -1)) for w in weights]
                weights = [w.transpose(1, 2).flatten(2) for w in weights]
            else:
                weights = [w.unflatten(0, (heads.kv_heads, -1)) for w in weights]
            before.append(weights[0])
            after.append(weights[1])
    if not before:  # a family without R2
        return none.clone()
    plain, pruned = torch.cat(before, 2), torch.cat(after, 2)
    kept = pruned != 0
    r2 = _nearest(plain @ pruned.mT)
    for _ in range(FITS):
        r2 = _nearest(plain @ torch.where(kept, pruned, r2.mT @ plain).mT)
    return r2


def _nearest(matrix: Tensor) -> Tensor:
    """The orthogonal matrix [..., n, n] nearest to `matrix`."""
    u, _, vh = torch.linalg.svd(matrix)
    return u @ vh
