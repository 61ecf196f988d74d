"""What vLLM is told of drot's models before it makes them."""

import logging
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.model_executor.models.config import (
    MODELS_CONFIG_MAP,
    Qwen3_5ForCausalLMConfig,
    VerifyAndUpdateConfig,
)

from drot.serving.engine_models import MIXTURE_OF_TRANSFORMERS, graphs_hold_experts

logger = logging.getLogger("drot")


class GraphsOfExperts(VerifyAndUpdateConfig):
    """Turns CUDA graphs off for experts that they cannot hold."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """vllm_config: a VllmConfig."""
        model = vllm_config.model_config
        if not graphs_hold_experts(model.hf_config, model.dtype):
            logger.warning(
                "this mixture runs without CUDA graphs, which hold packed experts in 16 bits alone"
            )
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


MODELS_CONFIG_MAP |= {
    MIXTURE_OF_TRANSFORMERS: GraphsOfExperts,
    "DrotQwen3_5ForCausalLM": Qwen3_5ForCausalLMConfig,
}
