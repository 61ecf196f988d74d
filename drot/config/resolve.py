"""From the recipe that a user wishes to the recipe of a run, in which every setting has its value."""

import math
from typing import Any, Literal, cast

from drot.config.calibration import CalibrationConfig, default_seqlen
from drot.config.pruning import (
    DAMPING,
    PUBLISHED_DAMPING,
    WITHOUT_HESSIAN,
    DampingAverage,
    PruningConfig,
    RecoveryConfig,
    Solver,
    Target,
    TokenWeighting,
)
from drot.config.recipe import DISTILL_TEXT, ONE_SHOT, QUALITIES, Recipe, WeightFormat
from drot.config.rotation import (
    DOWN_BLOCK,
    FAST_ENTROPY_LR,
    OPTIMIZER_DEFAULTS,
    SMALLEST_DOWN_BLOCK,
    TRAINING_TOKENS,
    BoundaryPlace,
    DownRotation,
    HessianSource,
    Objective,
    OutputWeighting,
    ProductDtype,
    RotationConfig,
)
from drot.config.settings import settings, values_of
from drot.core.errors import UserError

#: `source` in the recipe of a run that was given token ids in place of a text
GIVEN_TOKENS = "tensor"


@settings
class ResolvedRotation(RotationConfig):
    """How the rotations of a run are trained. A run of an older version had no R3."""

    down_rotation: DownRotation = "none"
    objective: Objective
    output_weights: OutputWeighting = "equal"
    steps: int
    lr: float
    training_tokens: int
    hessians: HessianSource
    boundary: BoundaryPlace
    product_dtype: ProductDtype


@settings
class ResolvedPruning(PruningConfig):
    """How a run prunes. `block_size` is a common multiple of every m in n:m."""

    damping: float
    damping_average: DampingAverage
    solve: Solver
    target: Target
    token_weights: TokenWeighting = "equal"


@settings
class ResolvedRecovery(RecoveryConfig):
    """How a run trains kept weights. distill_nsamples: 0 if the layers are not trained together."""

    distill_nsamples: int = 0


@settings
class ResolvedCalibration(CalibrationConfig):
    """The calibration text of a run."""

    seqlen: int


@settings
class ResolvedRecipe(Recipe):
    """The settings of one run on one model and machine: values only, no `auto` and no None.

    It is a recipe, so `drot.prune` runs it again. format: the format of the weights in the result.
    """

    rotation: ResolvedRotation
    pruning: ResolvedPruning
    recovery: ResolvedRecovery
    calibration: ResolvedCalibration
    format: WeightFormat

    @property
    def reads_calibration(self) -> bool:
        """Whether the run reads calibration text.

        Magnitude pruning of a model that is not rotated needs the weights alone. It reads a text that is not
        the default, for the figure `output_error`.
        """
        weights_alone = (
            self.rotation.mode == "none"
            and self.pruning.method in WITHOUT_HESSIAN
            and (self.pruning.solve, self.pruning.target) == ("none", "self")
            and (self.recovery.recover, self.recovery.distill_epochs) == ("none", 0)
        )
        return not weights_alone or self.calibration.source != CalibrationConfig().source

    @property
    def needs_dense_states(self) -> bool:
        """Whether the run passes the calibration tokens through the dense model too."""
        return self.pruning.target == "dense" or self.recovery.recover == "block"

    def training_nsamples(self, nsamples: int, seqlen: int, hidden_size: int) -> int:
        """How many of the calibration sequences train the rotations (`training_tokens`)."""
        if not self.rotation.training_tokens:
            return nsamples
        return min(nsamples, -(-self.rotation.training_tokens * hidden_size // seqlen))


def resolve(
    recipe: Recipe,
    *,
    positions: int | None = None,
    device: str = "cpu",
    format: str = "dense",
    rotations_given: bool = False,
    down_width: int | None = None,
    rotates_stream: bool = True,
    tokens: tuple[int, int] | None = None,
    distillation: int = 0,
) -> ResolvedRecipe:
    """The recipe of a run. A recipe that is resolved already stays as it is, but for `format` and `tokens`.

    The defaults that no argument changes are those of a dense result on a CPU, of a model of any length.

    Args:
        recipe: the settings that the user wishes.
        positions: the most tokens that the model reads in one sequence; None if there is no limit.
        device: the type of the device on which rotations are trained, `cpu` or `cuda`.
        format: the format of the weights in the result.
        rotations_given: whether the rotations are loaded from a file instead of trained.
        down_width: the number of inputs of down_proj, or the largest that divides those of all in a mixture,
            for the size of the blocks of R3; 0 if no down_proj is pruned, None if it is not known.
        rotates_stream: whether R1 can rotate the residual stream of the model (Family.rotates_stream).
        tokens: nsamples and seqlen of token ids that replace the calibration text; None for a text.
        distillation: of such a run, the sequences of token ids for the training of all layers together, which
            is left out without them.
    """
    rotation = recipe.rotation
    published = is_published(rotation.mode, rotation.optimizer, rotation.reference_compat)
    calibration: dict[str, Any] = {"seqlen": recipe.calibration.seqlen or default_seqlen(positions)}
    if tokens is not None:
        calibration = {"source": GIVEN_TOKENS, "nsamples": tokens[0], "seqlen": tokens[1]}
    pruning = _pruning(recipe.pruning, published)
    return ResolvedRecipe(
        rotation=_rotation(
            rotation, published, device, format, rotations_given, down_width, rotates_stream, pruning
        ),
        pruning=pruning,
        recovery=_recovery(recipe.recovery, recipe.calibration.nsamples, distillation if tokens else None),
        calibration=ResolvedCalibration(**values_of(recipe.calibration) | calibration),
        format=cast(WeightFormat, format),
    )


def is_published(mode: str, optimizer: str, reference_compat: bool) -> bool:
    """Whether the defaults are those of published methods: of pruning alone, or of the paper's rotation."""
    return mode == "none" or optimizer == "paper" or reference_compat


def _down_rotation(wishes: RotationConfig, published: bool, width: int | None) -> int | Literal["none"]:
    if wishes.mode == "none" or wishes.down_rotation == "none":
        return "none"
    if isinstance(wishes.down_rotation, int):
        return wishes.down_rotation
    if published or wishes.mode == "shared":
        return "none"
    if width is None:
        return DOWN_BLOCK
    size = max((size for size in range(1, min(width, DOWN_BLOCK) + 1) if width % size == 0), default=1)
    return size if size >= SMALLEST_DOWN_BLOCK else "none"


def _rotation(
    wishes: RotationConfig,
    published: bool,
    device: str,
    format: str,
    rotations_given: bool,
    down_width: int | None,
    rotates_stream: bool,
    pruning: ResolvedPruning,
) -> ResolvedRotation:
    steps, lr = OPTIMIZER_DEFAULTS[wishes.optimizer]
    if wishes.optimizer == "fast" and wishes.objective == "entropy":
        lr = FAST_ENTROPY_LR
    boundary, hessians = wishes.boundary, wishes.hessians
    if boundary == "auto" and not rotates_stream:
        boundary = "inside" if wishes.mode == "layer" else "input"
    elif boundary == "auto":
        known = rotations_given or hessians != "sequential"  # the R1 of the next layer, before pruning
        boundary = "residual" if format == "packed" and wishes.mode == "layer" and known else "input"
    if hessians == "auto":
        needed = (boundary == "residual" or wishes.layers_per_rotation > 1) and wishes.mode == "layer"
        needed = needed and not rotations_given
        hessians = "dense" if needed else "sequential"
    trains_on_a_gpu = device != "cpu" and wishes.mode != "none"
    weighs = pruning.token_weights == "gradient"
    takes_weights = wishes.mode != "none" and wishes.objective != "entropy"
    if takes_weights and wishes.output_weights == "gradient" and not (weighs or rotations_given):
        raise UserError("`output_weights` gradient needs `token_weights` gradient; got equal")
    values: dict[str, Any] = {
        "objective": "pruned",
        "output_weights": "gradient" if takes_weights and weighs else "equal",
        "steps": steps,
        "lr": lr,
        "training_tokens": 0 if published else TRAINING_TOKENS,
        "product_dtype": "bfloat16" if trains_on_a_gpu else "float32",
    }
    chosen = {
        "boundary": boundary,
        "hessians": "dense" if wishes.mode == "shared" else hessians,
        "down_rotation": _down_rotation(wishes, published, down_width),
    }
    return ResolvedRotation(**values_of(wishes) | _unset(wishes, values) | chosen)


def _pruning(wishes: PruningConfig, published: bool) -> ResolvedPruning:
    quality = ONE_SHOT if published else QUALITIES["balanced"]
    values: dict[str, Any] = {
        "damping": PUBLISHED_DAMPING if published else DAMPING,
        "damping_average": "mean" if published else "median",
        "solve": quality["solve"],
        "target": quality["target"],
    }
    solves = (quality["solve"] if wishes.solve == "auto" else wishes.solve) in ("pcg", "admm")
    values["token_weights"] = "gradient" if solves else "equal"
    # a block that splits a group of m columns would prune the group twice
    multiple = math.lcm(*(sparsity.m for sparsity in wishes.sparsities if sparsity.structured))
    block_size = max(wishes.block_size // multiple, 1) * multiple
    return ResolvedPruning(**values_of(wishes) | _unset(wishes, values) | {"block_size": block_size})


def _recovery(wishes: RecoveryConfig, nsamples: int, given: int | None) -> ResolvedRecovery:
    """given: the sequences of token ids for the training of all layers; None draws them from a text.

    Of fewer sequences than `distill_nsamples`, given or drawn, each pass reads the sequences repeatedly.
    """
    wanted = wishes.distill_nsamples or 0
    drawn = (wanted or DISTILL_TEXT * nsamples) if given is None else given and max(given, wanted)
    epochs = wishes.distill_epochs if drawn else 0
    chosen = {"distill_epochs": epochs, "distill_nsamples": drawn if epochs else 0}
    return ResolvedRecovery(**values_of(wishes) | chosen)


def _unset(wishes: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The entries of `values` whose fields the user has left open, as None or `auto`."""
    return {name: value for name, value in values.items() if getattr(wishes, name) in (None, "auto")}
