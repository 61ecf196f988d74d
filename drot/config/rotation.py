"""How the rotations are trained."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from drot.core.checks import above_zero, at_least, is_a, one_of, whole_number

RotationMode = Literal["none", "layer", "shared"]
Objective = Literal["auto", "entropy", "pruned"]
Optimizer = Literal["fast", "paper"]
HessianSource = Literal["auto", "sequential", "dense"]
#: where the rotation between two layers acts (drot/model/boundary.py)
BoundaryPlace = Literal["input", "residual"]
Boundary = Literal["auto", "input", "residual"]
ProductDtype = Literal["auto", "float32", "bfloat16"]

#: largest number of training steps, of which the learning rates and losses are kept: 500 times the paper's
MOST_STEPS = 1_000_000
#: Optimizer → default steps and learning rate. `paper` has the values of the paper (section 4). The values
#: of `fast` were chosen by measurement (benchmarks/README.md).
OPTIMIZER_DEFAULTS: dict[str, tuple[int, float]] = {"fast": (100, 0.3), "paper": (2000, 0.01)}
#: The default learning rate of `fast` for the entropy, where it bounds the angles of a step.
FAST_ENTROPY_LR = 0.7
#: Optimizer → largest learning rate. The rate of `fast` is an angle, and π is half a turn. The rate of
#: `paper` is the step of an entry of A, whose entries are at most 1 at the start: far above 1, a step keeps
#: nothing of A.
LARGEST_LR = {"fast": math.pi, "paper": 100.0}

#: The default of `training_tokens`. With more the model is not better (benchmarks/README.md).
TRAINING_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class RotationConfig:
    """How the orthogonal matrices R1 and R2 are trained (paper, section 3.3).

    Args:
        mode: `layer` trains one R1 for each layer, as the paper does. `shared` trains one R1 for the whole
            model, and the result is a stock checkpoint. `none` rotates nothing.
        blocks: the number of equal diagonal blocks of R1 (appendix E); 1 makes R1 dense. A tuple gives the
            sizes of unequal blocks, which must add up to the hidden size.
        objective: `entropy` is the paper's. `pruned` is the importance of the weights that the mask removes.
            `auto` is `pruned`.
        optimizer: `paper` is Adam on A with R = qr(A). `fast` takes steps in so(n): spectral steps for
            `pruned`, Adam's direction for `entropy`. Its rate is the largest angle of the first step in
            radians.
        steps: training steps; None is the optimizer's value in OPTIMIZER_DEFAULTS.
        lr: learning rate; None is the optimizer's value in OPTIMIZER_DEFAULTS, but FAST_ENTROPY_LR for
            `fast` with the entropy. LARGEST_LR has its limit.
        early_stop: `fast` stops when the loss changes by less than this share of itself a step; 0 never
            stops early.
        training_tokens: calibration tokens for each channel of the hidden state with which the rotations are
            trained: the first sequences. 0 is all tokens. None is TRAINING_TOKENS, but all tokens for a run
            that reproduces the paper. The pruning always takes the Hessians of all tokens.
        hessians: `sequential` computes a layer's Hessians after the layers before it were pruned. `dense`
            computes all Hessians in one pass of the dense model, so that layers train independently;
            `mode="shared"` always does so. `auto` is `dense` where `boundary` resolves to `residual` and the
            rotations are trained, and `sequential` elsewhere.
        boundary: where the rotation between layers l and l + 1 acts. `input`, as in the paper: on the input
            of layer l + 1, and down_proj of layer l takes R1(l). `residual`: on the residual of layer l,
            beside its MLP, and down_proj of layer l takes R1(l + 1). down_proj is then trained with layer
            l + 1, whose training figures include it. `auto` is `residual` for a packed model with
            `mode="layer"`, where the rotation is part of the product of down_proj, unless `hessians` is
            `sequential` and the rotations are trained. It is `input` elsewhere, which costs no perplexity.
        layers_per_step: with `mode="shared"`, the number of layers in the loss of one step; the other
            layers are offloaded to main memory. None is all layers.
        product_dtype: dtype of the matrix products. `auto` is `bfloat16` on a GPU and `float32` on a CPU
            (devices.product_dtype). The loss, the gradients and their sums are computed in fp32 at least.
        reference_compat: computes the SparseGPT scores as the paper's code does, which adds the damping a
            second time, to the inverse.
    """

    mode: RotationMode = "layer"
    blocks: int | tuple[int, ...] = 1
    objective: Objective = "auto"
    optimizer: Optimizer = "fast"
    steps: int | None = None
    lr: float | None = None
    early_stop: float = 1e-5
    training_tokens: int | None = None
    hessians: HessianSource = "auto"
    boundary: Boundary = "auto"
    layers_per_step: int | None = None
    product_dtype: ProductDtype = "auto"
    reference_compat: bool = False

    def __post_init__(self) -> None:
        one_of("mode", self.mode, RotationMode)
        one_of("objective", self.objective, Objective)
        one_of("optimizer", self.optimizer, Optimizer)
        one_of("hessians", self.hessians, HessianSource)
        one_of("boundary", self.boundary, Boundary)
        one_of("product_dtype", self.product_dtype, ProductDtype)
        if isinstance(self.blocks, list):
            object.__setattr__(self, "blocks", tuple(self.blocks))
        for size in self.blocks if isinstance(self.blocks, tuple) else (self.blocks,):
            whole_number("blocks", size, 1)
        if self.steps is not None:
            whole_number("steps", self.steps, 0, MOST_STEPS)
        at_least("early_stop", self.early_stop, 0)
        if self.training_tokens is not None:
            whole_number("training_tokens", self.training_tokens, 0)
        if self.layers_per_step is not None:
            whole_number("layers_per_step", self.layers_per_step, 1)
        if self.lr is not None:
            above_zero("lr", self.lr, LARGEST_LR[self.optimizer])
        is_a("reference_compat", self.reference_compat, bool)

    @property
    def equal_blocks(self) -> int:
        """The number of equal blocks; 1 for unequal blocks, which are trained inside a dense matrix."""
        return self.blocks if isinstance(self.blocks, int) else 1

    @property
    def resolved_hessians(self) -> str:
        """`hessians`, or `dense` with `mode="shared"`; for `auto`, the value of a model saved dense."""
        if self.mode == "shared":
            return "dense"
        if self.hessians == "auto":
            return "dense" if self.boundary == "residual" else "sequential"
        return self.hessians

    @property
    def resolved_boundary(self) -> BoundaryPlace:
        """`boundary`; for `auto`, the value of a model saved dense."""
        return "residual" if self.boundary == "residual" else "input"

    def for_format(self, format: str, *, rotations_given: bool = False) -> "RotationConfig":
        """The same settings, with `auto` of `boundary` and `hessians` resolved.

        format: format of the weights in the result, `dense` or `packed`.
        rotations_given: whether the rotations are loaded from a file instead of trained.
        """
        boundary, hessians = self.boundary, self.hessians
        if boundary == "auto":
            known = rotations_given or hessians != "sequential"  # the R1 of the next layer, before pruning
            fused = format == "packed" and self.mode == "layer" and known
            boundary = "residual" if fused else "input"
        if hessians == "auto":
            needed = boundary == "residual" and self.mode == "layer" and not rotations_given
            hessians = "dense" if needed or self.mode == "shared" else "sequential"
        return dataclasses.replace(self, boundary=boundary, hessians=hessians)

    @property
    def resolved_steps(self) -> int:
        """`steps`, or its default."""
        return OPTIMIZER_DEFAULTS[self.optimizer][0] if self.steps is None else self.steps

    @property
    def resolved_lr(self) -> float:
        """`lr`, or its default."""
        if self.lr is not None:
            return self.lr
        if self.optimizer == "fast" and self.objective == "entropy":
            return FAST_ENTROPY_LR
        return OPTIMIZER_DEFAULTS[self.optimizer][1]
