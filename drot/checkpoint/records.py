"""The sections of the manifest, drot.json: what was asked, what was done, what came out, with what.

An entry without a default is always written. An entry with a default is left out where it has this value.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter, ValidationInfo
from pydantic_core import to_json

from drot.config import FinetuneConfig, ResolvedRecipe
from drot.core.reading import Entries

Share = Annotated[float, Field(ge=0, le=1)]
#: points [step, value] of a curve
Curve = list[Annotated[list[int | float], Field(min_length=2, max_length=2)]]
#: name of a package → its version; None for a package that was not installed
Versions = dict[str, str | None]
#: what the bytes of a result depend on beyond recipe and versions: `machine()` of machine/environment.py
Machine = dict[str, Any]
#: where the hidden states of the calibration lie; on a CPU never on the device
PlaceOfStates = Literal["device", "main memory", "file"]
#: a figure that is None where it was not finite
Finite = float | None


def _from_sections(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, Mapping):
        return value
    return ResolvedRecipe.from_dict(value, format=info.data.get("format", "dense"))


#: the settings of the run; `format` stands in the entry of this name, which comes first
StoredRecipe = Annotated[
    ResolvedRecipe, BeforeValidator(_from_sections), PlainSerializer(ResolvedRecipe.to_dict)
]


def _from_fields(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    # a strict dataclass takes fields from JSON, and instances alone from Python
    return TypeAdapter(FinetuneConfig).validate_json(to_json(value))


#: the settings of a fine-tuning
StoredSettings = Annotated[FinetuneConfig, BeforeValidator(_from_fields), PlainSerializer(dataclasses.asdict)]


# ---- what was done -----------------------------------------------------------------------------------


class TokensRecord(Entries):
    """Token ids. sha256: their hash (`calibration_hash`). shape: [sequences, tokens of a sequence]."""

    sha256: str
    shape: Annotated[list[int], Field(min_length=2, max_length=2)]


class TrainingRecord(Entries):
    """The training of a rotation. The entropy is a mean over the layers.

    loss_before, loss_after: the loss at R = I and at the best step; the sum over the layers that share R1.
    best_step: the step whose rotations were kept: the best of every tenth step and the last.
    seconds: duration.
    orthogonality_error: max |QᵀQ - 1| of the best matrices, before they were made orthogonal in fp64.
    loss_curve: value i belongs to the rotations after i steps.
    entropy_curve: entropy by step, at R = I and of the rotations that were kept. Unless the entropy is the
        objective, and without `layers_per_step`, also after each quarter of the steps but the last.
    nsamples: the calibration sequences of the training.
    """

    loss_before: float
    loss_after: float
    best_step: int
    seconds: float
    orthogonality_error: float
    loss_curve: Annotated[list[float], Field(min_length=1)]
    entropy_curve: Curve
    entropy_before: float
    entropy_after: float
    nsamples: int


class RotationRecord(TrainingRecord):
    """The training of one layer's rotation.

    damping: input group → damping of its Hessian.
    invariance_error: relative error of the rotated layer's output on one sequence; None where only the whole
        model was checked.
    """

    damping: dict[str, float]
    invariance_error: float | None = None


class SharedRotationRecord(TrainingRecord):
    """The training of one R1 for all layers. damping: of each layer, as in RotationRecord."""

    damping: list[dict[str, float]]


class OneShotFigures(Entries):
    """Pruning by the method alone, without a solver, in one basis; None for a basis without figures.

    removed_importance: the pruned share of the importance (pipeline/importance.py).
    output_error: relative error of the outputs.
    """

    removed_importance: float | None = None
    output_error: float | None = None


class OneShotRecord(Entries):
    """One-shot pruning `before` the rotation and, in a rotated layer, `after` it. Empty without text."""

    before: OneShotFigures = OneShotFigures()
    after: OneShotFigures = OneShotFigures()


class LinearRecord(Entries):
    """The pruning of one linear.

    sparsity: the share of zeros.
    output_error: relative error of the outputs on the calibration inputs; None without such inputs.
    damping: damping of the inverted Hessian; None for a method that inverts no Hessian.
    admm_iterations: None for a linear that stays dense.
    tokens: of a linear of an expert, the calibration tokens from which its Hessian was computed.
    """

    sparsity: Share
    output_error: float | None
    damping: float | None
    one_shot: OneShotRecord = OneShotRecord()
    admm_iterations: int | None = None
    tokens: int | None = None


class RecoveryRecord(Entries):
    """The recovery of one layer. An error is a mean of ‖y - t‖² / ‖t‖² over tokens.

    error_before, error_after: the error on the held-out sequences.
    best_epoch: the number of epochs after which the weights were kept; 0 keeps the weights as pruned.
    """

    error_before: float
    error_after: float
    best_epoch: int


class DistillationRecord(Entries):
    """The training of the kept weights of all layers together, towards the dense model, after the pruning.

    The errors of the layers and of their linears are those before it.

    kl_before, kl_after: mean KL(dense ‖ pruned) of the next token on held-out sequences, in nats; None if the
        training was left out, or if it is not finite.
    passes: how often the training read its sequences.
    trained: whether the trained weights were kept. They are unless that KL rises by more than 5 %.
    left_out: why there was no training.
    """

    kl_before: float | None = None
    kl_after: float | None = None
    passes: int = 0
    trained: bool = False
    left_out: str | None = None


class LayerRecord(Entries):
    """One decoder layer. rotation: None if no rotation was trained for this layer alone."""

    layer: int
    rotation: RotationRecord | None = None
    linears: Annotated[dict[str, LinearRecord], Field(min_length=1)]
    recovery: RecoveryRecord | None = None
    seconds: float


class RotationsFileRecord(Entries):
    """The file of rotations that a run used. trained_with: the record in that file."""

    file: str
    sha256: str
    trained_with: dict[str, Any]


# ---- what came out -----------------------------------------------------------------------------------


class EvaluatedText(Entries):
    """tokens: the tokens of the text. split: None for a file."""

    split: str | None
    tokens: int
    windows: int
    sha256: str


class KLRecord(Entries):
    """KL(dense ‖ pruned) of the next token's distribution, in nats."""

    mean: Finite
    p99: Finite


class PositionRecord(Entries):
    """Agreement at the positions `first` … `last` of a window, which begin with 0."""

    first: int
    last: int
    equal_tokens: Share
    kl: Finite


class AgreementRecord(Entries):
    """Agreement with the dense model. equal_tokens: share of equal most likely next tokens."""

    equal_tokens: Share
    kl: KLRecord
    positions: list[PositionRecord]
    dense_perplexity: float
    perplexity_difference: float


class TaskRecord(Entries):
    """How a task was measured. fewshot: examples in the prompt."""

    metric: str
    fewshot: int
    stderr: Finite


class Baselines(Entries):
    """Text → perplexity of the dense model, and of models that are pruned without a rotation.

    not_rotated: by the method alone. solver: with the solver, the target and the recovery of the run too;
        empty if there are none, or if it was not measured.
    """

    dense: dict[str, float]
    not_rotated: dict[str, float]
    solver: dict[str, float] = Field(default_factory=dict)


class EvaluationRecord(Entries):
    """What `drot eval`, `drot compare` or `drot demo` measured.

    perplexity, agreement and texts: by name of the text.
    """

    date: str
    versions: Versions
    seqlen: int
    dtype: str
    machine: str
    streamed: bool
    texts: dict[str, EvaluatedText]
    perplexity: dict[str, Finite]
    against: str | None
    agreement: dict[str, AgreementRecord]
    tasks: dict[str, Finite]
    task_details: dict[str, TaskRecord]
    averages: dict[str, Finite]
    baselines: Baselines | None = None


class HeldOut(TokensRecord):
    """The sequences that were not trained on, and what the model loses on them."""

    loss_before: float
    loss_after: float
    perplexity_before: float
    perplexity_after: float


class FinetuneRecord(Entries):
    """A fine-tuning.

    start: the folder of the model that it started with, `from` in the file.
    settings: with the values that were used for `lr`, `warmup_steps` and `seqlen`.
    text: the sequences that were trained on.
    """

    model_config = ConfigDict(populate_by_name=True)

    start: Annotated[str, Field(alias="from")]
    settings: StoredSettings
    text: TokensRecord
    steps: int
    processes: int
    loss_curve: Curve
    held_out: HeldOut
    dtype: str
    device: str
    machine: Machine
    versions: Versions
    seconds: float


# ---- with what ---------------------------------------------------------------------------------------


class Seconds(Entries):
    """Seconds of the whole run and, as further entries, of its phases."""

    __pydantic_extra__: dict[str, float]

    total: float

    @property
    def phases(self) -> dict[str, float]:
        """Phase → seconds."""
        return dict(self.__pydantic_extra__)


class MemoryPeak(Entries):
    """Bytes: the largest resident memory of the process until the end of a phase; torch's on one GPU."""

    process: int
    gpu: int | None = None
