"""What vLLM is told of drot's models before it makes them."""

import logging
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.model_executor.models.config import (
    MODELS_CONFIG_MAP,
    Qwen3_5ForCausalLMConfig,
    VerifyAndUpdateConfig,
)

from drot.serving.engine_models import MIXTURE_OF_TRANSFORMERS

logger = logging.getLogger("drot")


class NoGraphOfExperts(VerifyAndUpdateConfig):
    """Turns CUDA graphs off: how many tokens an expert gets is known on the CPU alone (engine_experts.py)."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """vllm_config: a VllmConfig."""
        logger.warning("a mixture of experts runs without CUDA graphs, which cannot hold drot's experts")
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


MODELS_CONFIG_MAP |= {
    MIXTURE_OF_TRANSFORMERS: NoGraphOfExperts,
    "DrotQwen3_5ForCausalLM": Qwen3_5ForCausalLMConfig,
}
