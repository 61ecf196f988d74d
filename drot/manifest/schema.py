"""Schema of the manifest, drot.json: the entries that drot reads."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from drot.config.pruning import DampingAverage
from drot.config.sparsity import Sparsity, parse_sparsity_of
from drot.core.reading import Entries

Share = Annotated[float, Field(ge=0, le=1)]


def _parses_sparsity(value: str | float) -> str | float:
    Sparsity.parse(value)
    return value


def _parses_sparsity_of(value: list[str]) -> list[str]:
    parse_sparsity_of(value)
    return value


class _Pruning(Entries):
    method: str
    sparsity: Annotated[str | float, AfterValidator(_parses_sparsity)]
    damping: float
    damping_average: DampingAverage = "mean"
    keep: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    sparsity_of: Annotated[list[str], AfterValidator(_parses_sparsity_of)] = Field(default_factory=list)
    solve: str = "none"
    target: str = "self"
    target_weight: float = 0.0

    @model_validator(mode="after")
    def _target_has_its_weight(self) -> Self:
        if self.target == "dense" and "target_weight" not in self.model_fields_set:
            raise ValueError("target_weight must stand beside target: dense")
        return self


class _Rotation(Entries):
    mode: str
    blocks: int | list[int]
    steps: int
    optimizer: str
    lr: float
    hessians: str
    objective: str
    boundary: str = ""
    down_basis: str = ""


class _Calibration(Entries):
    source: str
    seed: int


class _Recovery(Entries):
    recover: str
    recover_epochs: int
    recover_lr: float


class _Recipe(Entries):
    pruning: _Pruning
    rotation: _Rotation
    calibration: _Calibration
    recovery: _Recovery | None = None


class _Text(Entries):
    sha256: str
    shape: Annotated[list[int], Field(min_length=2, max_length=2)]


class _Seconds(Entries):
    """Seconds of the phases and of the whole run."""

    __pydantic_extra__: dict[str, float]

    total: float


Rate = Annotated[float, Field(gt=0)]
Unit = Literal["float32", "bfloat16", "float16", "float64", "bytes"]


class _Peaks(Entries):
    float32: Rate
    bfloat16: Rate
    copy_: Annotated[Rate, Field(alias="copy")]


class _Change(Entries):
    loss_before: float | None = None
    loss_after: float | None = None
    entropy_before: float | None = None
    entropy_after: float | None = None
    error_before: float | None = None
    error_after: float | None = None


class _Shared(_Change):
    loss_before: float
    loss_after: float
    entropy_before: float
    entropy_after: float
    loss_curve: list[float]


class _Linear(Entries):
    sparsity: Share
    output_error: float | None


class _Layer(Entries):
    layer: int
    linears: Annotated[dict[str, _Linear], Field(min_length=1)]
    seconds: float
    rotation: _Change = _Change()
    recovery: _Change = _Change()


class _File(Entries):
    file: str


class _FinetuneSettings(Entries):
    lr: float
    rank: int | None = None
    keep_adapter: bool = False


class _FinetuneText(_Text):
    source: str


class _HeldOut(Entries):
    perplexity_before: float
    perplexity_after: float


class _Finetune(Entries):
    """A fine-tuning. `from` is the folder of the model that it started with."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=(), populate_by_name=True)

    method: str
    settings: _FinetuneSettings
    text: _FinetuneText
    held_out: _HeldOut
    steps: int
    seconds: float
    dtype: str
    start: Annotated[str, Field(alias="from")]


class _EvaluatedText(Entries):
    sha256: str


class _Agreement(Entries):
    equal_tokens: Share


class _Evaluation(Entries):
    """Figures that `drot eval` or `drot demo` recorded; null stands for one that is not finite."""

    date: str
    dtype: str
    seqlen: int
    against: str | None
    texts: dict[str, _EvaluatedText] = Field(default_factory=dict)
    perplexity: dict[str, float | None]
    agreement: dict[str, _Agreement]
    tasks: dict[str, float | None]


class FinetunedManifest(Entries):
    """drot.json of a model that another program pruned and drot fine-tuned."""

    format_version: int
    base_model: str
    sparsity: Share
    stock_architecture: bool = True
    format: str = "dense"
    finetune: Annotated[list[_Finetune], Field(min_length=1)]
    evaluations: list[_Evaluation] = Field(default_factory=list)


class PrunedManifest(Entries):
    """drot.json of a model that drot pruned. Manifests of older versions lack the entries with defaults."""

    format_version: int
    versions: dict[str, Any]
    recipe: _Recipe
    calibration: _Text
    sparsity: Share
    seconds: _Seconds
    layers: Annotated[list[_Layer], Field(min_length=1)]
    base_model: str
    device: str
    dtype: str
    relative_logit_error: float | None
    stock_architecture: bool
    format: str = "dense"
    rotations_file: _File | None = None
    shared_rotation: _Shared | None = None
    finetune: list[_Finetune] = Field(default_factory=list)
    evaluations: list[_Evaluation] = Field(default_factory=list)
    work: dict[str, dict[Unit, float]] | None = None
    peaks: _Peaks | None = None
