"""How the rotations are trained."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import ArgsKwargs

from drot.config.settings import settings
from drot.core.checks import shortened
from drot.core.errors import UserError

RotationMode = Literal["none", "layer", "shared"]
Objective = Literal["entropy", "pruned"]
Optimizer = Literal["fast", "paper"]
HessianSource = Literal["sequential", "dense"]
#: where the rotation into the basis of a layer acts (drot/model/boundary.py)
BoundaryPlace = Literal["input", "residual", "inside"]
ProductDtype = Literal["float32", "bfloat16"]
OutputWeighting = Literal["gradient", "equal"]

#: largest number of training steps, of which the learning rates and losses are kept: 500 times the paper's
MOST_STEPS = 1_000_000
#: Optimizer → default steps and learning rate. `paper` has the values of the paper (section 4). The values
#: of `fast` were chosen by measurement (benchmarks/README.md).
OPTIMIZER_DEFAULTS: dict[str, tuple[int, float]] = {"fast": (200, 0.3), "paper": (2000, 0.01)}
#: The default learning rate of `fast` for the entropy, where it bounds the angles of a step.
FAST_ENTROPY_LR = 0.7
#: Optimizer → largest learning rate. The rate of `fast` is an angle, and π is half a turn. The rate of
#: `paper` is the step of an entry of A, whose entries are at most 1 at the start: far above 1, a step keeps
#: nothing of A.
LARGEST_LR = {"fast": math.pi, "paper": 100.0}
#: Mode → training steps of the quality `fast` with the optimizer `fast`; with `layers_per_rotation` above 1
#: those of shared. benchmarks/README.md has what more steps give. A step takes less where layers share an R1.
FAST_STEPS = {"layer": 50, "shared": 100}
#: The default of `training_tokens`. With more the model is not better (benchmarks/README.md).
TRAINING_TOKENS = 32
#: The size of the blocks of R3 that `auto` takes, and the smallest below it for which R3 is worth its time.
#: benchmarks/README.md has what other sizes give.
DOWN_BLOCK, SMALLEST_DOWN_BLOCK = 64, 16


def _down_rotation(value: Any) -> Any:
    """The value of `down_rotation`: the digits of a command line as a number."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if value in ("auto", "none") or (type(value) is int and value >= 2):
        return value
    raise UserError(
        "`down_rotation` must be auto, none, or the size of a block, a whole number of at least 2; got "
        f"{shortened(value)}"
    )


#: The points between a model that every engine loads and the best one: name → the fields that it sets.
#: docs/choose.md says what each costs and gives.
POINTS: dict[str, dict[str, Any]] = {
    "stock": {"mode": "shared", "down_rotation": "none"},
    "light": {"mode": "shared", "down_rotation": DOWN_BLOCK},
    "full": {"mode": "layer", "down_rotation": "auto"},
}


def with_point(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` of a RotationConfig, with those that a point sets in place of its name in `mode`.

    A `down_rotation` in `fields` stays as it is. Raises UserError if it makes the point another one.
    """
    point = fields.get("mode")
    if not isinstance(point, str) or point not in POINTS:
        return dict(fields)
    own, given = POINTS[point]["down_rotation"], fields.get("down_rotation", "auto")
    if given != "auto" and (own == "none") != (given == "none"):
        which = "has no R3" if own == "none" else "has R3"
        raise UserError(f"`mode` {point} {which}, got `down_rotation` {given}: leave one or the other out")
    return {**fields, **POINTS[point], **({} if given == "auto" else {"down_rotation": given})}


def point_of(config: "RotationConfig") -> str | None:
    """The name of the point in POINTS that a configuration is; None if it is none of them."""
    if config.blocks != 1 or config.layers_per_rotation != 1 or config.mode == "none":
        return None
    if config.mode == "shared":
        return "stock" if config.down_rotation in ("auto", "none") else "light"
    return None if config.down_rotation == "none" else "full"


DownRotation = Annotated[Literal["auto", "none"] | int, BeforeValidator(_down_rotation)]


@settings
class RotationConfig:
    """How the orthogonal matrices R1, R2 and R3 are trained (paper, section 3.3).

    The loss, the gradients and their sums are computed in fp32 at least, whatever `product_dtype` is.
    """

    mode: RotationMode = "layer"
    """Rotations of the residual stream. layer: one R1 for each layer (the paper). shared: one for the whole
    model, which loads without drot if it is saved dense; in families with a norm behind attention and MLP no
    R1, as nothing could undo it. none: no rotations.
    """
    blocks: int = Field(default=1, ge=1)
    """The number of equal diagonal blocks of R1 (appendix E); 1 makes R1 dense."""
    layers_per_rotation: int = Field(default=1, ge=1)
    """With `mode` layer: the number of consecutive layers that share an R1. While it runs, the model
    multiplies by a matrix only between layers with different R1. A number above 1 needs `hessians` dense.
    """
    down_rotation: DownRotation = "auto"
    """The size of the diagonal blocks of R3, which rotates the input of down_proj while the model runs. It
    must divide the intermediate size, in a mixture that of every MLP and expert. none: no R3. auto: 64, or
    the largest divisor below it, with one R1 a layer; none with `mode` shared, `optimizer` paper and
    `reference_compat`.
    """
    objective: Literal["auto"] | Objective = "auto"
    """What the training minimises. pruned: the importance of the weights to remove. entropy: the paper's,
    which prunes better with `reference_compat` if `method` is sparsegpt. auto: pruned.
    """
    output_weights: Literal["auto"] | OutputWeighting = "auto"
    """How the outputs of the linears count in the objective pruned. gradient: by how much the loss of the
    dense model depends on them, which needs `token_weights` gradient. equal: all linears alike, each by its
    number of outputs. auto: gradient with `token_weights` gradient.
    """
    optimizer: Optimizer = "fast"
    """Optimizer of the training. fast: steps in so(n), spectral for the objective pruned and with Adam's
    direction for the entropy. paper: Adam through QR.
    """
    steps: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """Training steps for each layer. Default: 200 for fast, 2000 for paper; with the quality fast 50, and
    100 where layers share a rotation.
    """
    lr: float | None = Field(default=None, gt=0)
    """Learning rate; of fast the largest angle of a step in radians. Default: 0.3 for fast, 0.01 for paper;
    0.7 for fast with `objective` entropy.
    """
    early_stop: float = Field(default=1e-5, ge=0)
    """The optimizer fast ends the training when a step changes the loss by less than this share. 0: it takes
    all steps.
    """
    training_tokens: int | None = Field(default=None, ge=0)
    """Calibration tokens for each channel of the hidden state with which the rotations are trained: the first
    sequences. 0: all tokens, which pruning always reads. Default: 32; all with `optimizer` paper and
    `reference_compat`.
    """
    hessians: Literal["auto"] | HessianSource = "auto"
    """The layer inputs from which the training computes its Hessians. sequential: inputs that went through
    the pruned layers before. dense: inputs in the dense model, so that layers train independently of each
    other. auto: dense with `boundary` residual, `mode` shared or layers that share an R1, otherwise
    sequential.
    """
    boundary: Literal["auto"] | BoundaryPlace = "auto"
    """Where the rotation between two layers acts. input: on the input of the later layer. residual: beside
    the MLP of the earlier layer, where a packed model computes it together with down_proj, which is then
    trained with the later layer; needs `hessians` dense or `rotations`. inside: on the inputs of the
    attention and of the MLP, in families with a norm behind them, which take no other place. auto: inside in
    these families; residual with `format` packed and one rotation a layer, unless `hessians` is sequential;
    otherwise input.
    """
    layers_per_step: int = Field(default=0, ge=0)
    """With `mode` shared: the number of layers in the loss of one step. The other layers are offloaded to
    main memory. 0: all layers.
    """
    product_dtype: Literal["auto"] | ProductDtype = "auto"
    """Dtype of the matrix products of the training. auto is bfloat16 on a GPU, and float32 on a CPU."""
    reference_compat: bool = False
    """Compute SparseGPT's score as the paper's code does, which adds the damping twice."""

    @model_validator(mode="before")
    @classmethod
    def _takes_a_point(cls, given: ArgsKwargs) -> ArgsKwargs:
        return ArgsKwargs((), with_point(given.kwargs or {}))

    @model_validator(mode="after")
    def _rate_of_the_optimizer(self) -> Self:
        largest = LARGEST_LR[self.optimizer]
        if self.lr is not None and self.lr > largest:
            raise UserError(f"`lr` must be a finite number above 0 and at most {largest:g}; got {self.lr!r}")
        return self

    @property
    def down_block(self) -> int | None:
        """The size of the blocks of R3; None without R3, and where it is not resolved."""
        return self.down_rotation if isinstance(self.down_rotation, int) else None
