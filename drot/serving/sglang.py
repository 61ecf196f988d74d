"""The plugin by which SGLang serves drot's packed checkpoints, and those whose layers hold rotations.

SGLang calls `register` in each of its processes, before it reads a checkpoint.

| what SGLang must learn                        | how                                                     |
|-----------------------------------------------|---------------------------------------------------------|
| `quant_method` drot, the packed linears       | QUANTIZATION_METHODS (sglang_linear.py)                 |
| layers that hold Q or R3                      | ModelRegistry, by a hook (sglang_transformers.py)       |
| the family's config, with its architecture    | AutoConfig.register (here)                              |

A checkpoint without rotations in its layers has a class of SGLang's own, where that was tested: it computes
q, k and v by one product, and gate and up by another.

This module is the entry point of the group `sglang.srt.plugins`, so it imports SGLang inside functions only.
"""

from typing import Any

from transformers import AutoConfig

from drot.checkpoint.quantization_config import QUANT_METHOD, drot_config_of
from drot.checkpoint.stored_config import MODEL_TYPE
from drot.core.errors import UserError
from drot.serving.engine_models import OF_TRANSFORMERS, EngineConfig
from drot.serving.requirements import warn_of_engine

#: the version with which the tests have run
TESTED = "0.5.23"
#: families without a rotation in their layers, which SGLang computes by a model of its own
OWN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: families that SGLang computes by a model of transformers. SGLang's attention there knows no bound of the
#: scores, no sinks, and values with as many channels as the keys alone.
FAMILIES_OF_TRANSFORMERS = (
    "apertus", "arcee", "cohere", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "granite", "helium",
    "hunyuan_v1_dense", "hyperclovax", "jais2", "ministral3", "olmo2", "opt", "seed_oss", "smollm3",
)  # fmt: skip
#: mixtures of experts that it computes by a model of transformers, with the experts of drot
MIXTURES = (
    "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "minimax_m2", "mixtral", "olmoe", "qwen2_moe",
    "qwen3_moe", "solar_open",
)  # fmt: skip


class SglangStoredConfig(EngineConfig):
    engine = "SGLang"
    families = (*OWN_FAMILIES, *FAMILIES_OF_TRANSFORMERS, *MIXTURES)

    @classmethod
    def architecture_of(cls, config: Any) -> str:
        """SGLang's own class, or that of sglang_transformers.py. Raises UserError for a window of attention.

        SGLang's models of transformers do not tell it of one.
        """
        held = drot_config_of(config)
        rotates = held is not None and (held.boundary or held.down_rotation)
        if config.model_type in OWN_FAMILIES and not rotates:
            return str(config.architectures[0])
        types = getattr(config, "layer_types", None)
        if "sliding_attention" in (types or ()) or (not types and getattr(config, "sliding_window", None)):
            raise UserError(
                "drot's plugin for SGLang serves no attention with a sliding window: serve this checkpoint "
                "by vLLM or `drot serve`"
            )
        return OF_TRANSFORMERS


def register() -> None:
    """Registers drot's quantisation and model with SGLang. A second call changes nothing.

    If SGLang lacks a part of the interface, one line is logged and nothing is registered. SGLang then serves
    other models as before, and refuses those of drot.
    """
    try:
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from drot.serving.sglang_linear import SglangQuantization

        # the registry imports all models of SGLang, which only the process that loads one should do
        HookRegistry.register(
            "sglang.srt.model_loader.utils.get_model_architecture", add_model, HookType.BEFORE
        )
    except Exception as error:  # SGLang would log a traceback
        warn_of_engine("SGLang", TESTED, error)
        return
    QUANTIZATION_METHODS[QUANT_METHOD] = SglangQuantization
    AutoConfig.register(MODEL_TYPE, SglangStoredConfig, exist_ok=True)


def add_model(*_: Any, **__: Any) -> None:
    """Adds drot's model to those of SGLang."""
    from sglang.srt.models.registry import ModelRegistry

    from drot.serving.sglang_transformers import DrotTransformersForCausalLM

    ModelRegistry.models[OF_TRANSFORMERS] = DrotTransformersForCausalLM
