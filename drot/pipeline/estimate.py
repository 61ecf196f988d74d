"""The main memory and the device memory that a run needs, by formulas from the shapes of the model."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from drot.config import WITHOUT_HESSIAN, ResolvedRecipe
from drot.model.decoder import DecoderModel
from drot.model.family import InputGroup
from drot.model.sizes import HeadShape

#: Fp32 copies of the largest Hessian and of its weight on the device while a layer is pruned, without and
#: with ADMM or a dense target: the 32 and 40 GB of a 70B layer (docs/hardware.md).
COPIES, COPIES_OF_SOLVERS = 6.8, 8.6
#: bytes of device memory for a weight of a layer that is recovered (docs/hardware.md)
RECOVERY_BYTES = 17
#: the memory of a training step on a layer, in copies of the layer's linears (tests/rotation/test_memory.py)
TRAINING_COPIES = 6.4


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its calibration.

    groups: the input groups that occur in some layer.
    shapes: name of a linear → its (out, in), which is the same in all layers that have the linear.
    names: for each layer, name of a linear → its full name.
    layer_weights, weights, outside: numbers in the parameters of the largest layer, of the model, and of the
        model without its layers.
    tied_head: numbers in lm_head if it is tied to the embedding; otherwise 0.
    nsamples, seqlen: sequences of calibration tokens, and tokens in a sequence.
    """

    groups: Sequence[InputGroup]
    shapes: Mapping[str, tuple[int, int]]
    names: Sequence[Mapping[str, str]]
    heads: HeadShape
    layer_weights: int
    weights: int
    outside: int
    tied_head: int
    nsamples: int
    seqlen: int

    @property
    def tokens(self) -> int:
        return self.nsamples * self.seqlen

    @property
    def hidden(self) -> int:
        return self.inputs(self.groups[0])

    def inputs(self, group: InputGroup) -> int:
        return self.shapes[group.linears[0].name][1]

    @property
    def rotates_stream(self) -> bool:
        return any(linear.output == "r1" for group in self.groups for linear in group.linears)

    @property
    def untied_head(self) -> int:
        """Numbers in lm_head if a rotation unties it; otherwise 0."""
        return self.tied_head if self.rotates_stream else 0

    @property
    def intermediate(self) -> int:
        return self.inputs(self.groups[-1])

    def groups_of(self, linears: Collection[str]) -> list[InputGroup]:
        return [group for group in self.groups if any(linear.name in linears for linear in group.linears)]


def sizes_of(model: DecoderModel, nsamples: int, seqlen: int) -> Sizes:
    """The sizes of a model, which may lie on the device `meta`."""
    head = model.head.weight
    of_layers = [sum(p.numel() for p in layer.module.parameters()) for layer in model.layers]
    weights = sum(parameter.numel() for parameter in model.model.parameters())
    return Sizes(
        groups=list(dict.fromkeys(group for layer in model.layers for group in layer.groups)),
        shapes={
            name: layer.shape_of(linear.spec)
            for layer in model.layers
            for name, linear in layer.linears.items()
        },
        names=[
            {name: linear.full_name for name, linear in of_layer.linears.items()} for of_layer in model.layers
        ],
        heads=model.heads,
        layer_weights=max(of_layers),
        weights=weights,
        outside=weights - sum(of_layers),
        tied_head=head.numel() if head is model.embedding.weight else 0,
        nsamples=nsamples,
        seqlen=seqlen,
    )


def main_memory(
    sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype, *, rotations_given: bool = False
) -> int:
    """The bytes of main memory of a run that reads the layers from files.

    They are those of a layer, or of the embedding and the head, of the hidden states of the calibration, and
    of the rotations that are not on the disk: two, all that are given, or all R2 and R3 beside one shared R1.
    A run on a CPU has the layers that it works on in memory too (`device_memory`).
    """
    layers = len(sizes.names)
    # at the beginning and at the end no layer is in memory
    numbers = max(sizes.outside + sizes.untied_head, sizes.layer_weights)
    needed = numbers * dtype.itemsize + state_bytes(sizes, recipe, dtype)
    if recipe.rotation.mode == "none":
        return needed
    rotation = rotation_bytes(sizes, recipe.rotation.down_block)
    shared = 8 * sizes.hidden**2 if recipe.rotation.mode == "shared" else 0
    kept = layers if rotations_given or shared else min(layers, 2)
    rotations = kept * rotation - (0 if rotations_given else (layers - 1) * shared)
    return needed + rotations


def state_bytes(sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype) -> int:
    """The bytes of the hidden states of the calibration, also of those in the dense model."""
    return sizes.tokens * sizes.hidden * dtype.itemsize * (2 if recipe.needs_dense_states else 1)


def device_memory(sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype) -> int:
    """About the bytes on the device at the peak: the layer, the next layer, and the pruning of the layer."""
    wide = max(sizes.inputs(group) for group in sizes.groups)
    rows = max(out for out, width in sizes.shapes.values() if width == wide)
    solves = recipe.pruning.solve == "admm" or recipe.pruning.target == "dense"
    pruning = (COPIES_OF_SOLVERS if solves else COPIES) * 4 * wide * (wide + rows)
    if not sizes.tokens:  # no Hessian
        pruning = 4 * wide * rows
    if recipe.recovery.recover == "block":
        pruning = max(pruning, RECOVERY_BYTES * sizes.layer_weights)
    return round(2 * sizes.layer_weights * dtype.itemsize + pruning)


def training_memory(sizes: Sizes, recipe: ResolvedRecipe) -> int:
    """About the bytes on the device while rotations are trained: one step, and all layers that share R1.

    With `layers_per_step` the layers lie in main memory, and one after the other is on the device.
    """
    rotation, blocks = recipe.rotation, {"r2": sizes.heads.head_dim, "r3": recipe.rotation.down_block or 1}
    weights = [sum(math.prod(sizes.shapes[name]) for name in names) for names in sizes.names]
    metrics = [0] * len(weights)
    if recipe.pruning.method not in WITHOUT_HESSIAN:
        blocks |= {"r1": sizes.hidden}
        metrics = [
            sum(sizes.inputs(group) * blocks.get(group.input or "", 1) for group in sizes.groups_of(names))
            for names in sizes.names
        ]
    kept = [sum(both) for both in zip(weights, metrics, strict=True)]
    together = rotation.mode == "shared" and not rotation.layers_per_step
    numbers = (sum if together else max)(kept) + (TRAINING_COPIES - 1) * max(weights)
    return round(numbers * getattr(torch, rotation.product_dtype).itemsize)


def rotation_bytes(sizes: Sizes, down_block: int | None) -> int:
    """The bytes of the rotation of one layer in fp64: R1, the R2 of each head of keys, and R3."""
    r1, r2 = sizes.hidden**2, sizes.heads.kv_heads * sizes.heads.head_dim**2
    return 8 * (r1 + r2 + sizes.intermediate * (down_block or 0))
