"""Qwen3.5 in vLLM, whose module imports what reads images, torchvision too. The other families spare it."""

from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

from drot.serving.vllm_models import VllmDrotModel


class DrotQwen3_5ForCausalLM(VllmDrotModel, Qwen3_5ForCausalLM):
    pass
