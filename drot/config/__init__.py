"""The recipe of a run as frozen dataclasses: the only home of its defaults.

The command line takes its options from these classes. Each class checks its values when an object is built.
`resolve` chooses what a recipe leaves open; the pipeline takes its ResolvedRecipe only, and the manifest
stores it. Whether the values fit a model is checked in drot/pipeline/validation.py.
"""

from drot.config.calibration import SEQLEN, CalibrationConfig, default_seqlen
from drot.config.finetune import FINETUNE_LR, FinetuneConfig
from drot.config.pruning import (
    DAMPING,
    PUBLISHED_DAMPING,
    WITHOUT_HESSIAN,
    Method,
    PruningConfig,
    RecoveryConfig,
)
from drot.config.recipe import ONE_SHOT, QUALITIES, Recipe, WeightFormat
from drot.config.resolve import ResolvedPruning, ResolvedRecipe, ResolvedRotation, resolve
from drot.config.rotation import (
    FAST_ENTROPY_LR,
    OPTIMIZER_DEFAULTS,
    BoundaryPlace,
    RotationConfig,
    RotationMode,
)
from drot.config.sparsity import Sparsity, matches
