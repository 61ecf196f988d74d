"""The plugin by which vLLM serves drot's checkpoints. vLLM calls `register` in each of its processes.

| what vLLM must learn                          | how                                           |
|-----------------------------------------------|-----------------------------------------------|
| `quant_method` drot, the packed linears       | register_quantization_config (vllm_linear.py) |
| layers that hold Q or R3, in vLLM's models    | ModelRegistry (vllm_models.py)                |
| the same in models of transformers            | ModelRegistry (vllm_transformers.py)          |
| no CUDA graph of experts that it cannot hold  | MODELS_CONFIG_MAP (vllm_configs.py)           |
| the family's config, with these architectures | AutoConfig.register (here)                    |

Without the plugin, vLLM refuses such a checkpoint: no class of vLLM or transformers has its `model_type`. The
architectures have names that vLLM does not use, so that a vLLM without the plugin cannot take one of its own
classes either.

This module is the entry point of the group `vllm.general_plugins`, so it imports vLLM inside `register` only.
"""

from typing import Any

from transformers import AutoConfig

from drot.checkpoint.stored_config import MODEL_TYPE
from drot.model.sizes import experts_of
from drot.serving.engine_models import MIXTURE_OF_TRANSFORMERS, OF_TRANSFORMERS, EngineConfig
from drot.serving.requirements import warn_of_engine

#: the version with which the tests have run
TESTED = "0.32.0"
#: `model_type` of a family that vLLM computes by a model of its own → its architecture
SERVED_FAMILIES = {
    "llama": "DrotLlamaForCausalLM",
    "mistral": "DrotMistralForCausalLM",
    "ernie4_5": "DrotErnie4_5ForCausalLM",
    "phi3": "DrotPhi3ForCausalLM",
    "qwen2": "DrotQwen2ForCausalLM",
    "qwen3": "DrotQwen3ForCausalLM",
    "qwen3_5_text": "DrotQwen3_5ForCausalLM",
}
#: families that vLLM computes by a model of transformers
FAMILIES_OF_TRANSFORMERS = (
    "apertus", "arcee", "cohere", "cohere2", "cwm", "exaone4", "gemma", "gemma2", "gemma3_text",
    "gemma4_text", "gemma4_unified_text", "glm", "glm4", "granite", "granite_swa", "helium",
    "hunyuan_v1_dense", "hyperclovax", "jais2", "minicpm3", "ministral", "ministral3", "olmo2", "olmo3",
    "opt", "seed_oss", "smollm3", "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip
#: mixtures of experts that it computes by a model of transformers; gemma4_text has models of both kinds
MIXTURES = (
    "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "mellum", "minimax_m2",
    "mistral4", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open",
)  # fmt: skip


class VllmStoredConfig(EngineConfig):
    engine = "vLLM"
    families = (*SERVED_FAMILIES, *FAMILIES_OF_TRANSFORMERS, *MIXTURES)

    @classmethod
    def architecture_of(cls, config: Any) -> str:
        """The class of vllm_models.py or vllm_transformers.py."""
        of_transformers = MIXTURE_OF_TRANSFORMERS if experts_of(config) else OF_TRANSFORMERS
        return SERVED_FAMILIES.get(config.model_type, of_transformers)


def register() -> None:
    """Registers drot's quantisation and architectures with vLLM. A second call changes nothing.

    If vLLM lacks a part of the interface, one line is logged and nothing is registered. vLLM then serves
    other models as before, and refuses those of drot.
    """
    try:
        from vllm import ModelRegistry

        # the imports register the quantisation and the configs
        import drot.serving.vllm_configs
        import drot.serving.vllm_linear
        import drot.serving.vllm_transformers  # noqa: F401

        classes = dict.fromkeys(SERVED_FAMILIES.values(), "drot.serving.vllm_models")
        classes |= dict.fromkeys((OF_TRANSFORMERS, MIXTURE_OF_TRANSFORMERS), "drot.serving.vllm_transformers")
        classes[SERVED_FAMILIES["qwen3_5_text"]] = "drot.serving.vllm_qwen3_5"
        for architecture, module in classes.items():
            if architecture not in ModelRegistry.get_supported_archs():
                ModelRegistry.register_model(architecture, f"{module}:{architecture}")
    except Exception as error:  # it would end vLLM, also for the models of others
        warn_of_engine("vLLM", TESTED, error)
        return
    AutoConfig.register(MODEL_TYPE, VllmStoredConfig, exist_ok=True)
