"""The bytes of main memory and of device memory that a run needs, by formulas from the sizes of the model."""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from drot.calibration.hessian import at_once
from drot.calibration.token_weights import LOGIT_TOKENS
from drot.config import WITHOUT_HESSIAN, ResolvedRecipe
from drot.machine.ranks import ALONE, Ranks
from drot.machine.transfer import pinned_bytes
from drot.model.family import alike
from drot.model.layer import DecoderLayer
from drot.pipeline.kept_weights import TRAINED_BYTES
from drot.pipeline.sizes import Sizes

#: Fp32 copies of the largest Hessian and of its weight on the device while a layer is pruned, without and
#: with ADMM or a dense target: the 32 and 40 GB of a 70B layer (docs/hardware.md).
COPIES, COPIES_OF_SOLVERS = 6.8, 8.6
#: bytes for each weight of a linear while its kept weights are found: of a mask, and of places in a sum
SELECTION_BYTES = 9
#: the memory of a training step on a layer, in copies of the layer's linears (tests/rotation/test_memory.py)
TRAINING_COPIES = 6.4


def main_memory(
    sizes: Sizes,
    recipe: ResolvedRecipe,
    dtype: torch.dtype,
    *,
    rotations_given: bool = False,
    from_gguf: bool = False,
    ranks: Ranks = ALONE,
    pinned: bool = False,
) -> int:
    """The bytes of main memory of a run that reads the layers from files, of all ranks of a machine.

    They are those of a layer, or of the embedding and the head, of the hidden states of the calibration, of
    what `layers_per_step` keeps for the training of a shared rotation, and of the rotations that are not on
    the disk: two, or all R2 and R3 beside one shared R1. Rank 0 of several that train different layers has a
    rotation of each, and those that it still writes. A run on a CPU has the layers that it works on in memory
    too (`device_memory`).

    sizes: with the sequences of one rank. pinned: as in `state_bytes`.
    from_gguf: whether the model is a GGUF file, all of whose weights stay in memory. They are in fp32 when
        the file is read, and are cast to `dtype` one after the other.
    """
    layers = len(sizes.layers)
    # at the beginning and at the end no layer is in memory
    numbers = max(sizes.outside + sizes.untied_head, sizes.layer_weights)
    loaded = 0
    if from_gguf:
        numbers, loaded = sizes.weights + sizes.untied_head, torch.float32.itemsize * sizes.weights
    needed = numbers * dtype.itemsize + state_bytes(sizes, recipe, dtype, pinned=pinned)
    count = ranks.local_size
    if recipe.rotation.mode == "none":
        return count * max(needed, loaded)
    rotation, of_batch = (
        max(rotation_bytes(layer, recipe.rotation.down_block, pinned=each) for layer in sizes.layers)
        for each in (False, pinned)
    )
    shared = 8 * sizes.hidden**2 if recipe.rotation.mode == "shared" else 0
    kept = min(layers, layers if shared and not rotations_given else 2)
    rotations = kept * rotation
    if not rotations_given:
        rotations -= (layers - 1) * shared
        if shared and recipe.rotation.layers_per_step:
            whole = sum(objective_bytes(sizes, recipe))
            rotations += whole if ranks.size == 1 else whole + whole // ranks.size  # and its own rows
    of_batches = 0
    if ranks.size > 1 and recipe.rotation.hessians == "dense" and not (rotations_given or shared):
        of_batches = (min(layers, 2 * ranks.size) - kept) * of_batch
    return count * max(needed + rotations, loaded) + of_batches


def state_bytes(sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype, *, pinned: bool = False) -> int:
    """The bytes of the hidden states of the calibration, also of those in the dense model.

    pinned: whether they lie in main memory for a GPU.
    """
    own = sizes.tokens * sizes.state * dtype.itemsize
    parts = [own, own if recipe.needs_dense_states else 0, further_bytes(sizes, recipe, dtype)]
    return sum(map(pinned_bytes, parts)) if pinned else sum(parts)


def pass_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """The bytes that a pass through a layer keeps beside the hidden states (LayerPass).

    They are those of the inputs of the attention's last linear and of its outputs. Both take the same memory
    if they are equally wide.
    """
    attended = sizes.heads.heads * sizes.heads.head_dim
    width = sizes.hidden + (0 if attended == sizes.hidden else attended)
    return sizes.tokens * width * dtype.itemsize


def device_memory(sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype) -> int:
    """About the bytes on the device at the peak: the layer, the next layer, and the pruning of the layer."""
    solves = recipe.pruning.solve == "admm" or recipe.pruning.target == "dense"
    copies, pruning = COPIES_OF_SOLVERS if solves else COPIES, 0.0
    for layer in sizes.layers:
        for groups in alike(layer.groups):
            shapes = [layer.shape_of(linear) for linear in groups[0].linears]
            wide, rows = shapes[0][1], max(outputs for outputs, _ in shapes)
            at_a_time = min(len(groups), at_once(wide))
            hessian = at_a_time * wide if sizes.tokens else 0
            pruning = max(pruning, (copies if hessian else 1) * 4 * wide * (hessian + at_a_time * rows))
    if recipe.recovery.recover == "block":
        trained = max(training_bytes([layer], recipe, dtype) for layer in sizes.layers)
        pruning = max(pruning, trained + dtype.itemsize * sizes.layer_weights)
    if recipe.rotation.mode != "none":  # the check of a rotation: a copy in fp32, three R1 in fp64
        pruning = max(pruning, 4 * sizes.layer_weights + 24 * sizes.hidden**2)
    return round(2 * sizes.layer_weights * dtype.itemsize + pruning)


def further_bytes(sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype) -> int:
    """The bytes of the hidden states of the sequences on which all layers are trained together."""
    count = sizes.further
    if count is None:
        count = recipe.recovery.distill_nsamples * sizes.nsamples // recipe.calibration.nsamples
    return count * sizes.seqlen * sizes.state * dtype.itemsize


def training_bytes(layers: Sequence[DecoderLayer], recipe: ResolvedRecipe, dtype: torch.dtype) -> int:
    """The bytes of a training of the kept weights of layers (KeptWeights), beside the weights themselves."""
    kept, largest = 0.0, 0
    for layer in layers:
        parameters: Counter[str] = Counter()  # by their paths, with the numbers of all linears that they hold
        for linear in layer.linears.values():
            count = math.prod(layer.shape_of(linear.spec))
            kept += count * (1 - recipe.pruning.sparsity_for(linear.full_name).ratio)
            parameters[linear.spec.path] += count
        largest = max(largest, *parameters.values())
    return round(TRAINED_BYTES * kept) + (dtype.itemsize + SELECTION_BYTES) * largest


def distillation_memory(
    sizes: Sizes, recipe: ResolvedRecipe, dtype: torch.dtype, *, keeps: bool = False
) -> int:
    """About the bytes on the device while the kept weights of all layers are trained together.

    They are those of the layers, of their training, of the head, of the inputs of the first layer, of those
    of all layers in a batch, and of what one layer and LOGIT_TOKENS logits keep for the backward pass.

    keeps: whether all layers keep that, so that none is computed again.
    """
    tokens = recipe.recovery.distill_batch * sizes.seqlen
    sides = [
        sum(
            round(sizes.share(group) * sum(layer.shape_of(linear)))
            for group in layer.groups
            for linear in group.linears
        )
        for layer in sizes.layers
    ]
    of_layers = sum(sides) if keeps else max(sides)
    inputs_of_layers = (len(sizes.layers) + 1) * sizes.hidden + sizes.embedded + sizes.lent
    activations = tokens * (inputs_of_layers + 2 * of_layers) * dtype.itemsize
    logits = 6 * 4 * LOGIT_TOKENS * (sizes.head // sizes.hidden)
    weights = (sizes.weights - sizes.outside + sizes.head) * dtype.itemsize
    trained, inputs = training_bytes(sizes.layers, recipe, dtype), further_bytes(sizes, recipe, dtype)
    return weights + trained + inputs + activations + logits


def training_memory(sizes: Sizes, recipe: ResolvedRecipe, ranks: int = 1) -> int:
    """About the bytes on the device while rotations are trained: one step, and all layers that share R1.

    With `layers_per_step` the layers lie in main memory, and one after the other is on the device. Of one R1
    that several ranks train together, a rank also has copies of its rows.
    """
    rotation, of_each = recipe.rotation, objective_bytes(sizes, recipe)
    largest = max(_weights_of_layers(sizes)) * getattr(torch, rotation.product_dtype).itemsize
    count = rotation.layers_per_rotation
    if rotation.mode == "shared":
        count = 1 if rotation.layers_per_step else len(of_each)
    together = max(sum(of_each[start : start + count]) for start in range(0, len(of_each), count))
    if ranks > 1 and rotation.mode == "shared":
        together += together // ranks
    return round(together + (TRAINING_COPIES - 1) * largest)


def objective_bytes(sizes: Sizes, recipe: ResolvedRecipe) -> list[int]:
    """The bytes that the objective of each layer keeps: the weights, and the metrics of their inputs."""
    weights = _weights_of_layers(sizes)
    metrics = [0] * len(weights)
    if recipe.pruning.method not in WITHOUT_HESSIAN:
        blocks = {"r1": sizes.hidden, "r2": sizes.heads.head_dim, "r3": recipe.rotation.down_block or 1}
        metrics = [
            sum(
                layer.shape_of(group.linears[0])[1] * blocks.get(group.input or "", 1)
                for group in layer.groups
            )
            for layer in sizes.layers
        ]
    itemsize = getattr(torch, recipe.rotation.product_dtype).itemsize
    return [itemsize * sum(both) for both in zip(weights, metrics, strict=True)]


def _weights_of_layers(sizes: Sizes) -> list[int]:
    return [
        sum(math.prod(layer.shape_of(linear.spec)) for linear in layer.linears.values())
        for layer in sizes.layers
    ]


def rotation_bytes(layer: DecoderLayer, down_block: int | None, *, pinned: bool = False) -> int:
    """The bytes of the rotation of a layer in fp64: R1, the R2 of each head of keys, and R3.

    pinned: as in `state_bytes`.
    """
    r1, r2 = layer.hidden_size**2, layer.heads.kv_heads * layer.heads.head_dim**2
    parts = [8 * count for count in (r1, r2, layer.down_inputs() * (down_block or 0))]
    return sum(map(pinned_bytes, parts)) if pinned else sum(parts)
