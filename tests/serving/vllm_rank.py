"""One tensor-parallel rank of vLLM on a CPU: loads a checkpoint by vLLM's loaders and computes with it.

Arguments: the checkpoint, the rank, the number of ranks, a file by which they meet, and the file of results.

The wheel of vLLM has CUDA kernels only, without which vLLM's attention does not run on a CPU. Here the
attention of one sequence is PyTorch's. Everything else is vLLM's own.
"""

import sys

import torch
from torch.nn import functional
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model

from drot.serving.vllm import register

#: the tokens of the sequence
TOKENS = torch.arange(3, 17)


def attention(self, query, key, value, *_, **__):
    """Causal attention of one sequence. query [tokens, heads · head_size]."""
    q, k, v = (x.unflatten(-1, (-1, self.head_size)).transpose(0, 1) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=self.impl.scale, enable_gqa=True
    )
    return out.transpose(0, 1).flatten(1)


def main(model, rank, ranks, meeting, results):
    register()
    Attention.forward = attention
    torch.accelerator.empty_cache = lambda: None  # it needs a GPU, and vLLM calls it after loading
    engine = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else None,
        skip_tokenizer_init=True,
        max_model_len=64,
        compilation_config={"custom_ops": ["none"]},  # those in PyTorch: the kernels are for CUDA
    ).create_engine_config()
    with set_current_vllm_config(engine):
        init_distributed_environment(ranks, rank, f"file://{meeting}", rank, "gloo")
        initialize_model_parallel(ranks)
        loaded = get_model(vllm_config=engine)
        with torch.no_grad(), set_forward_context(None, engine, num_tokens=len(TOKENS)):
            hidden = loaded(TOKENS, torch.arange(len(TOKENS)))
            logits = loaded.compute_logits(hidden)
    methods = {
        name: type(module.quant_method).__name__
        for name, module in loaded.named_modules()
        if hasattr(module, "quant_method")
    }
    found = {
        "architecture": type(loaded).__name__,
        "quantization": engine.model_config.quantization,
        "methods": methods,
        "tensors": {name: tensor.clone() for name, tensor in loaded.state_dict().items()},
        "logits": logits,
    }
    torch.save(found, results)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
