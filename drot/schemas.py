"""Reading of JSON files that others may have written, and their schemas: config.json, the index of the weights,
drot.json. A file is checked whole before any of its values is used."""

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from drot.config.sparsity import Sparsity, parse_sparsity_of
from drot.errors import UserError

#: largest depth of nested lists and objects; no file that drot reads has more than 8 levels
DEEPEST = 64
#: largest whole number: that of an int64
LARGEST = 2**63 - 1
#: largest number of decoder layers: tens of times that of any published model
MOST_LAYERS = 10_000
#: most characters of a value or of a library's message in a message of drot
LONGEST_QUOTE = 300


# ---- reading -----------------------------------------------------------------------------------------


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, whose numbers are finite and within 64 bits.

    Raises UserError that names the file, and the entry where there is one: for a file that is missing, not a
    file, not UTF-8 or not JSON, for anything but an object, for deep nesting, and for NaN and other numbers
    that no file should hold.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: copy the folder again") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{file} is nested too deeply: copy it again") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise UserError(f"{file} is not valid JSON ({quoted(error)}): copy it again") from None
    if not isinstance(data, dict):
        raise UserError(f"{file} must hold a JSON object, got {shortened(data)}: copy it again")
    _check_values(data, file)
    return data


def _check_values(data: dict[str, Any], file: Path) -> None:
    waiting: list[tuple[str, Any, int]] = [("", data, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{file}: {name} must be a finite number, got {value}: copy the file again")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{file}: {name} must be a number of 64 bits, got {shortened(value)}")
        if isinstance(value, dict | list) and depth == DEEPEST:
            raise UserError(f"{file} is nested more than {DEEPEST} levels deep: copy it again")
        if isinstance(value, dict):
            prefix = f"{name}." if name else ""
            waiting += [(f"{prefix}{key}", item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{name}.{index}", item, depth + 1) for index, item in enumerate(value)]


def check_schema(schema: type[BaseModel], data: Any, where: str) -> None:
    """Raises UserError that names `where`, the first wrong entry and its value, if `data` breaks the schema."""
    try:
        schema.model_validate(data)
    except ValidationError as caught:
        error = caught.errors(include_url=False)[0]
        entry = ".".join(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            raise UserError(
                f"{where} has {entry}, which this version of drot does not support: update drot"
            ) from None
        if error["type"] == "missing":
            raise UserError(f"{where} lacks {entry}: it was edited; copy it again") from None
        problem = error["msg"].removeprefix("Value error, ").replace("`", "'")
        got = shortened(error["input"])
        raise UserError(f"{where}: {entry}: {problem}, got {got}: copy the file again") from None


def shortened(value: Any) -> str:
    """`value` as Python writes it, cut off after 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # a number of thousands of digits, or deep nesting
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def quoted(error: BaseException) -> str:
    """The message of a library's exception in one line that drot's own message can quote.

    Backticks would name a field of drot (drot/errors.py). The name of the class goes before a message that
    says little without it, such as KeyError's.
    """
    text = " ".join(str(error).replace("`", "'").split())
    if not text or isinstance(error, LookupError | ArithmeticError | TypeError | AttributeError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3] + "..."


# ---- schemas -----------------------------------------------------------------------------------------


class _Entries(BaseModel):
    """Entries of a JSON object. Other entries may stand beside those that are declared."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]


def _stays_inside(name: str) -> str:
    if not re.fullmatch(r"[^/\\\0]+", name) or name in (".", ".."):
        raise ValueError("must be the name of a file in the same folder, without / and \\")
    return name


class WeightIndex(_Entries):
    """model.safetensors.index.json: tensor → the file that holds it."""

    weight_map: Annotated[dict[str, Annotated[str, AfterValidator(_stays_inside)]], Field(min_length=1)]


class _Rope(_Entries):
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    factor: Annotated[float, Field(gt=0)] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    rope_type: str | None = None


class ModelConfig(_Entries):
    """config.json of a model: the entries from which sizes and kinds of modules follow."""

    model_type: str
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] | None = None
    hidden_size: Positive | None = None
    intermediate_size: Positive | None = None
    vocab_size: Positive | None = None
    num_attention_heads: Positive | None = None
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Annotated[int, Field(ge=1)] | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)] | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    layer_types: list[str] | None = None
    tie_word_embeddings: bool | None = None
    quantization_config: dict[str, Any] | None = None


class RopeOfModel(_Entries):
    """`rope_parameters` and `rope_scaling` of the families that drot prunes."""

    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None


class QuantizationKeys(BaseModel):
    """`quantization_config` in config.json, where its `quant_method` is drot."""

    model_config = ConfigDict(strict=True, extra="forbid")

    quant_method: Literal["drot"] = "drot"
    residual_rotation: bool = False
    down_basis: Literal["own", "next"] = "own"
    packed: bool = False
    dense_linears: list[str] = []


def _parses_sparsity(value: str | float) -> str | float:
    Sparsity.parse(value)
    return value


def _parses_sparsity_of(value: list[str]) -> list[str]:
    parse_sparsity_of(value)
    return value


class _Pruning(_Entries):
    method: str
    sparsity: Annotated[str | float, AfterValidator(_parses_sparsity)]
    damping: float
    keep: list[Annotated[str, Field(min_length=1)]] = []
    sparsity_of: Annotated[list[str], AfterValidator(_parses_sparsity_of)] = []
    solve: str = "none"
    target: str = "self"
    target_weight: float = 0.0


class _Rotation(_Entries):
    mode: str
    blocks: int | list[int]
    steps: int
    optimizer: str
    lr: float
    hessians: str
    objective: str
    boundary: str = ""
    down_basis: str = ""


class _Calibration(_Entries):
    source: str
    seed: int


class _Recovery(_Entries):
    recover: str = "none"
    recover_epochs: int = 0
    recover_lr: float = 0.0


class _Recipe(_Entries):
    pruning: _Pruning
    rotation: _Rotation
    calibration: _Calibration
    recovery: _Recovery = _Recovery()


class _Text(_Entries):
    shape: Annotated[list[int], Field(min_length=2, max_length=2)]


class _Total(_Entries):
    total: float


class _Change(_Entries):
    loss_before: float | None = None
    loss_after: float | None = None
    entropy_before: float | None = None
    entropy_after: float | None = None
    error_before: float | None = None
    error_after: float | None = None


class _Shared(_Change):
    loss_before: float
    loss_after: float
    loss_curve: list[float]


class _Linear(_Entries):
    sparsity: Share
    output_error: float | None


class _Layer(_Entries):
    layer: int
    linears: Annotated[dict[str, _Linear], Field(min_length=1)]
    seconds: float
    rotation: _Change = _Change()
    recovery: _Change = _Change()


class _File(_Entries):
    file: str


class _FinetuneSettings(_Entries):
    lr: float
    rank: int | None = None
    keep_adapter: bool = False


class _FinetuneText(_Text):
    source: str


class _HeldOut(_Entries):
    perplexity_before: float | None
    perplexity_after: float | None


class _Finetune(_Entries):
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


class FinetunedManifest(_Entries):
    """drot.json of a model that another program pruned and drot fine-tuned."""

    format_version: int
    base_model: str
    sparsity: Share
    stock_architecture: bool = True
    format: str = "dense"
    finetune: Annotated[list[_Finetune], Field(min_length=1)]


class PrunedManifest(_Entries):
    """drot.json of a model that drot pruned. Manifests of older versions lack the entries with defaults."""

    format_version: int
    versions: dict[str, Any]
    recipe: _Recipe
    calibration: _Text
    sparsity: Share
    seconds: _Total
    layers: Annotated[list[_Layer], Field(min_length=1)]
    base_model: str
    device: str
    dtype: str
    relative_logit_error: float | None
    stock_architecture: bool
    format: str = "dense"
    rotations_file: _File | None = None
    shared_rotation: _Shared | None = None
    finetune: list[_Finetune] = []
