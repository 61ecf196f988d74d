"""The stored form of config.json: without drot, no program opens a checkpoint that needs drot.

Such a checkpoint is packed, or its layers hold rotations. transformers without drot would warn, drop
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
that holds a rotation has none of one of its norms (drot/model/boundary.py).

In memory, a model has the config of its family: AutoConfig returns it (StoredConfig), and `save_pretrained`
of drot's models writes the stored form (drot/checkpoint/hf_model.py).
"""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from drot.core.errors import UserError
from drot.model.families import FAMILIES
from drot.model.multimodal import MULTIMODAL, UNREGISTERED, register

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

        Raises UserError if the file names no family that drot supports, and if transformers lacks the family.
        """
        entries = restored(config_dict | {"model_type": MODEL_TYPE})
        if entries["model_type"] not in CONFIG_MAPPING:
            raise UserError(
                f"transformers {transformers.__version__} has no model of type {entries['model_type']!r}: "
                "install a newer transformers"
            )
        found = CONFIG_MAPPING[entries["model_type"]].from_dict(entries, **kwargs)
        config = found[0] if isinstance(found, tuple) else found  # with return_unused_kwargs
        register(config)
        keep_bound_of_scores(config)
        return found


def restored(stored: dict[str, Any]) -> dict[str, Any]:
    """The entries of a config.json, of the stored form as those of its family.

    Raises UserError if the stored form names no family that drot supports.
    """
    if stored["model_type"] != MODEL_TYPE:
        return stored
    family = stored.get(BASE_MODEL_TYPE)
    if not isinstance(family, str) or family not in FAMILIES | MULTIMODAL:
        raise UserError(
            f"config.json: {BASE_MODEL_TYPE} must be one of {', '.join(FAMILIES | MULTIMODAL)}, got "
            f"{family!r}: copy config.json again, or update drot"
        )
    from transformers.models.auto import modeling_auto as auto

    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if family in MULTIMODAL:
        names = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    entries = {k: v for k, v in stored.items() if k not in STORED and k != BASE_MODEL_TYPE}
    return entries | {"model_type": family, "architectures": [(names | UNREGISTERED)[family]]}


def write_stored_form(file: Path) -> None:
    """Rewrites `file`, a config.json that transformers wrote for a model of a family, in the stored form."""
    entries = json.loads(file.read_text(encoding="utf-8"))
    if entries["model_type"] != MODEL_TYPE:
        entries |= STORED | {BASE_MODEL_TYPE: entries["model_type"]}
        file.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def keep_bound_of_scores(config: Any) -> None:
    """Chooses an attention that bounds its scores, if the model bounds them.

    transformers before 5.21 takes PyTorch's attention for Gemma 2 and VaultGemma, and leaves the bound out.
    """
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        config._attn_implementation = "eager"


AutoConfig.register(MODEL_TYPE, StoredConfig, exist_ok=True)
