"""The stored form of config.json: without drot, no program opens a checkpoint that needs drot.

Such a checkpoint is packed, or has rotations between its layers. transformers without drot would warn, drop
the rotations, draw random weights for the packed ones, and compute garbage. Three entries of config.json stop
it, and stop other engines and converters:

| entry                                    | what it stops                                                   |
|------------------------------------------|-----------------------------------------------------------------|
| `model_type` is `drot`                   | AutoConfig, AutoModel and pipeline of transformers, and each    |
|                                          | engine and converter that chooses its code by this entry        |
| `architectures` is `DrotForCausalLM`     | engines that choose their code by this entry, as vLLM does      |
| `transformers_weights` names no file of  | `LlamaForCausalLM.from_pretrained` and the other classes that   |
| safetensors                              | only warn of another `model_type`                               |

A program that reads none of these entries lacks tensors: a packed linear has no tensor `weight`, and a layer
that holds a rotation has none of its attention norm (drot/model/boundary.py).

In memory, a model has the config of its family.
"""

import functools
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from drot.core.errors import UserError
from drot.model.families import ARCHITECTURES

MODEL_TYPE = "drot"
#: key of the family's `model_type`, such as `llama`
BASE_MODEL_TYPE = "base_model_type"
#: value of `transformers_weights`. transformers prints it at the end of 'The transformers file in the config
#: seems to be incorrect: it is neither a safetensors file nor ...: '
HOW_TO_OPEN = "drot wrote this checkpoint; import drot and open it with AutoModelForCausalLM.from_pretrained"
STORED = {
    "model_type": MODEL_TYPE,
    "architectures": ["DrotForCausalLM"],
    "transformers_weights": HOW_TO_OPEN,
}


class StoredConfig(PreTrainedConfig):
    """The class that AutoConfig finds for `model_type` drot. Its `from_dict` returns the family's config."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """What `from_dict` of the family's config class returns for the entries of config.json.

        Raises UserError if the file names no family that drot supports.
        """
        family = config_dict.get(BASE_MODEL_TYPE)
        if not isinstance(family, str) or family not in ARCHITECTURES:
            raise UserError(
                f"config.json: {BASE_MODEL_TYPE} must be one of {', '.join(ARCHITECTURES)}, got {family!r}: "
                "copy config.json again, or update drot"
            )
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        entries = {k: v for k, v in config_dict.items() if k not in STORED and k != BASE_MODEL_TYPE}
        entries |= {"model_type": family, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}
        made = CONFIG_MAPPING[family].from_dict(entries, **kwargs)
        write_stored_form(made[0] if isinstance(made, tuple) else made)  # a tuple has the unused kwargs too
        return made


CONFIG_MAPPING.register(MODEL_TYPE, StoredConfig, exist_ok=True)


class _WritesStoredForm:
    """Mixin in front of a family's config class: config.json has the stored form while drot is needed.

    `_stored_class` creates the classes with this mixin at run time, so pickle cannot find them by name.
    Pickle stores the stock class instead.
    """

    quantization_config: Any

    def to_diff_dict(self) -> dict[str, Any]:
        """The entries of config.json."""
        entries: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        if (entries.get("quantization_config") or {}).get("quant_method") != MODEL_TYPE:
            return entries
        return entries | STORED | {BASE_MODEL_TYPE: entries["model_type"]}

    def __reduce__(self) -> Any:
        return _new_stored, (type(self).__bases__[1],), self.__getstate__()


def _new_stored(stock_class: Any) -> Any:
    cls = _stored_class(stock_class)
    return cls.__new__(cls)


@functools.cache
def _stored_class(stock_class: Any) -> Any:
    """The class of a config that is written in the stored form.

    It has the name of the stock class, because transformers finds the model class by the config class's name.
    """
    attributes = {"__module__": stock_class.__module__}
    return type(stock_class.__name__, (_WritesStoredForm, stock_class), attributes)


def write_stored_form(config: Any) -> None:
    """Makes `save_pretrained` write `config` in the stored form while its `quantization_config` is drot's."""
    if not isinstance(config, _WritesStoredForm):
        stock_class: Any = type(config)
        config.__class__ = _stored_class(stock_class)
