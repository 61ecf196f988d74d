"""The kernels of a decoder layer while a model runs: dense, 2:4, and 2:4 with rotations. No GPU is needed.

The layers of `drot bench --shape` run on the device `meta` as on a GPU, and a mode sees every kernel with its
shapes. inference.py makes times of them. KV cache, embedding and head are left out.
"""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from counting import FREE, PRODUCTS, aten, drot_ops, flash_attention, operations_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drot.evaluation.variants import ROTATED, layer_variants
from drot.model import block_rotation
from drot.model.boundary import remove_boundary_rotation
from drot.model.decoder import DecoderModel
from drot.sparse.fused import unfuse_rotation

#: ROTATED without R1; and with R1 as a product of its own
LIGHT, APART = "2:4 + blocks", "2:4 + rotation, not fused"
#: the most tokens of the skinny kernel where nothing else competes, kSkinnyOnlyTokens
FEW_TOKENS = 16


@dataclass(frozen=True)
class Kernel:
    """kind: `dense` product, `packed` product, `blocks` of R3, or `other`. bytes: what it reads and writes.
    operations: those of a dense product. rows: of the packed weight."""

    kind: str
    bytes: int
    operations: float = 0.0
    rows: int = 0


class Kernels(TorchDispatchMode):
    """Collects the kernels that start while `within`."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.found = False, list[Kernel]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return True  # the positions are those of one sequence
        kwargs, name = kwargs or {}, func.overloadpacket
        result = func(*args, **kwargs)
        if self.within and name is drot_ops.sparse24_linear:
            self.found += _packed(*args, **kwargs, y=result)
        elif self.within and not func.is_view and name not in FREE:
            read, size = _tensors([args, kwargs]), sum(t.nbytes for t in _tensors([args, kwargs, result]))
            kind = "blocks" if name is drot_ops.swiglu_rotate else "dense" if name in PRODUCTS else "other"
            self.found.append(Kernel(kind, size, operations_of(name, read, args)[1]))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return list({id(t): t for t in tree_leaves(tree) if isinstance(t, Tensor)}.values())


def _packed(
    x: Tensor, values: Tensor, positions: Tensor, bias: Any = None, residual: Any = None,
    rotation: Any = None, compressed: Any = None, *, y: Tensor,
) -> list[Kernel]:  # fmt: skip
    """Those of sparse24_linear on a GPU. For many tokens what is added is written into y first.

    No linear of SHAPES has so few rows that blocks share its columns, which takes a second kernel.
    """
    rows, added = len(values), sum(t.nbytes for t in (bias, residual, rotation) if t is not None)
    size, work = sum(t.nbytes for t in (x, values, positions, y)), 2.0 * x.numel() * rows
    turned = 0.0 if rotation is None else 2.0 * residual.numel() * rows
    if y.numel() // rows <= FEW_TOKENS or not added:
        return [Kernel("packed", size + added, work + turned, rows)]
    first = Kernel("other" if rotation is None else "dense", added + y.nbytes, turned)
    return [first, Kernel("packed", size + y.nbytes, work, rows)]


def kernels_of(model: Any, tokens: int) -> list[Kernel]:
    """The kernels of the one layer of a model on `meta`, for one sequence."""
    (layer,), mode = DecoderModel(model).layer_modules, Kernels()
    before = layer.register_forward_pre_hook(lambda *_: setattr(mode, "within", True))
    after = layer.register_forward_hook(lambda *_: setattr(mode, "within", False))
    hidden = torch.empty(1, tokens, model.config.hidden_size, dtype=model.dtype, device="meta")
    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", flash_attention),
        mock.patch.object(block_rotation, "has_kernels", return_value=True),
        torch.no_grad(),
        mode,
    ):
        model.base_model(inputs_embeds=hidden, use_cache=False)
    before.remove()
    after.remove()
    return mode.found


def layer_kernels(config: Any, *tokens: int) -> dict[str, dict[int, list[Kernel]]]:
    """Variant → number of tokens → the kernels of a layer in the dimensions of `config`."""
    models = layer_variants(config, dtype=torch.bfloat16, device=torch.device("meta"))

    def of(model: Any) -> dict[int, list[Kernel]]:
        return {number: kernels_of(model, number) for number in tokens}

    found = {variant: of(model) for variant, model in models.items()}
    (layer,) = DecoderModel(models[ROTATED]).layers
    unfuse_rotation(layer)
    found[APART] = of(models[ROTATED])
    remove_boundary_rotation(layer.module)
    return found | {LIGHT: of(models[ROTATED])}


def products(kernels: list[Kernel]) -> list[Kernel]:
    """The kernels that read weights or rotations."""
    return [kernel for kernel in kernels if kernel.kind != "other"]
