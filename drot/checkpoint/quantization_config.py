"""`quantization_config` in config.json: whether a checkpoint is packed, and which rotations its layers hold.

Its keys are defined here and nowhere else. A checkpoint with dense weights whose layers hold no rotations has
no `quantization_config`, so every inference engine opens it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from transformers.utils.quantization_config import QuantizationConfigMixin

from drot.checkpoint.manifest import Manifest, find_manifest
from drot.checkpoint.quantised import is_readable
from drot.checkpoint.source import model_folder
from drot.config import BoundaryPlace, WeightFormat
from drot.core.errors import UserError
from drot.core.reading import check_schema
from drot.model.boundary import down_rotations, rotation_place
from drot.model.decoder import DecoderModel
from drot.model.families import FAMILIES
from drot.model.rotation import Bases
from drot.sparse.linear import is_packed
from drot.sparse.packed import dense_linears, expect_packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUANT_METHOD = "drot"
#: the dtypes in safetensors files of the weights of a checkpoint that drot wrote
STORED_DTYPES = ("BF16", "F16", "F32")
#: `quant_method` of other programs → the name by which users know it
OTHERS = {"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "mxfp4": "MXFP4"}


class DrotKeys(BaseModel):
    """The keys of a `quantization_config` whose `quant_method` is drot.

    boundary: what the rotations between the layers act on (drot/model/boundary.py). Without rotations, the
        file has no such key.
    layers_per_rotation: the number of consecutive layers that share a basis. If each has its own, the file
        has no such key.
    down_rotation: the size of the blocks of R3 in every layer. Without R3, the file has no such key.
    packed: whether the linears of the decoder layers are packed.
    dense_linears: names of linears that are not packed, such as `layers.0.mlp.down_proj`. The file has no
        such key if there are none.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    quant_method: Literal["drot"] = "drot"
    boundary: BoundaryPlace | None = None
    layers_per_rotation: Annotated[int, Field(ge=2)] | None = None
    down_rotation: Annotated[int, Field(ge=2)] | None = None
    packed: bool = False
    dense_linears: list[str] = Field(default_factory=list)


class DrotConfig(QuantizationConfigMixin):
    """`quantization_config` of a model that needs drot. Its attributes are those of `DrotKeys`.

    Raises UserError for any other key or value, because a later version of drot may have written it.
    """

    boundary: BoundaryPlace | None
    layers_per_rotation: int | None
    down_rotation: int | None
    packed: bool
    dense_linears: list[str]

    def __init__(self, **keys: Any) -> None:
        self.__dict__.update(check_schema(DrotKeys, keys, "config.json: quantization_config"))
        if self.dense_linears and not self.packed:
            raise UserError(
                "config.json: dense_linears needs packed: true; got packed: false: copy the file again"
            )

    def bases(self, layers: int) -> Bases:
        """Which of `layers` layers hold a rotation."""
        return Bases(self.boundary, layers, self.layers_per_rotation or 1)

    def to_dict(self) -> dict[str, Any]:
        """The keys of the file."""
        given = {key: getattr(self, key) for key in DrotKeys.model_fields}
        return {key: value for key, value in given.items() if value}


def quantization_config_of(config: Any) -> dict[str, Any]:
    """`quantization_config` of a model's `config` as a dict; {} if there is none."""
    entry = getattr(config, "quantization_config", None) or {}
    return entry if isinstance(entry, dict) else dict(entry.to_dict())


def quantised_by(config: Any) -> str | None:
    """The method by which another program has quantised a model with `config`; None if it is not."""
    entry = quantization_config_of(config)
    if not entry or (method := entry.get("quant_method")) == QUANT_METHOD:
        return None
    if method is None and any(str(key).startswith("load_in_") for key in entry):
        return "bitsandbytes"  # before it wrote its name
    return OTHERS.get(str(method), str(method))


def reads_quantised(config: Any) -> bool:
    """Whether drot makes the quantised weights of a model with `config` dense while it reads its files."""
    return is_readable(quantization_config_of(config)) and config.model_type in FAMILIES


def refuse_quantised(config: Any) -> None:
    """Raises UserError for a model that another program has quantised."""
    if method := quantised_by(config):
        instead = "the model that it was made from, in 16 or 32 bits"
        if reads_quantised(config):
            instead = "its folder, or its name on the hub, from which drot reads dense weights"
        raise UserError(f"this model is quantised ({method}): name {instead}")


def drot_config_of(config: Any) -> DrotConfig | None:
    """What the layers of a checkpoint with `config` hold; None if it opens without drot."""
    entry = quantization_config_of(config)
    return DrotConfig(**entry) if entry.get("quant_method") == QUANT_METHOD else None


def expect_stored(model: "PreTrainedModel", held: DrotConfig) -> None:
    """Gives an empty stock model, in place, the modules that a checkpoint holds: rotations, packed linears.

    Raises UserError for what does not fit the model.
    """
    expect_rotations(model, held)
    if held.packed:
        expect_packed(model, held.dense_linears)


def expect_rotations(model: Any, held: DrotConfig) -> None:
    """As `expect_stored`, without the packed linears."""
    decoder = DecoderModel(model)
    bases = held.bases(len(decoder.layers))
    for layer in decoder.layers:
        if held.boundary is not None and bases.holds(layer.index):
            layer.expect_boundary(held.boundary)
        if held.down_rotation is not None:
            layer.expect_down_rotation(held.down_rotation)


def drot_config_of_modules(model: "PreTrainedModel") -> DrotConfig | None:
    """The `quantization_config` for the modules that `model` has now; None if it opens without drot."""
    layers = DecoderModel(model).layers
    r3 = down_rotations(layers[0].module)
    places = {layer.index: place for layer in layers if (place := rotation_place(layer.module))}
    first = min(places, default=0)  # that holds a rotation
    sharing = {"input": first, "residual": first + 1}.get(places.get(first, ""), 1)
    held: dict[str, Any] = {
        "boundary": places.get(first),
        "layers_per_rotation": sharing if sharing > 1 else None,
        "down_rotation": r3[0].weight.shape[-1] if r3 else None,
    }
    if not is_packed(model):
        return DrotConfig(**held) if any(held.values()) else None
    linears = [linear for layer in layers for linear in layer.linears.values()]
    dense = [linear.full_name for linear in linears if linear.is_dense]
    return DrotConfig(**held, packed=True, dense_linears=dense)


def format_of(model: "PreTrainedModel") -> tuple[WeightFormat, bool]:
    """The manifest's entries `format` and `stock_architecture`: whether the model opens without drot."""
    return "packed" if is_packed(model) else "dense", drot_config_of_modules(model) is None


def dense_linears_of(path: Path | str, config: Any) -> list[str]:
    """The linears that the checkpoint `path`, or of this name on the hub, leaves dense when it is packed.

    The manifest names them.

    It leaves none where the manifest names one sparsity for all linears, and without a manifest. Raises
    UserError if no linear is 2:4.
    """
    manifest = find_manifest(model_folder(path))
    if not isinstance(manifest, Manifest):  # pruned by another program, if at all
        return []
    pruning = manifest.recipe.pruning
    return dense_linears(config, pruning) if pruning.mixed else []
