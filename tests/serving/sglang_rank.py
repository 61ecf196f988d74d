"""One tensor-parallel rank of SGLang on a CPU: loads checkpoints by SGLang's loaders and computes with them.

Arguments: the rank, the number of ranks, a file by which the ranks meet, the file of results, checkpoints.

Without a GPU SGLang has no kernel for attention. So the attention of one sequence is PyTorch's. The rest is
SGLang's own, by its formulas in PyTorch.
"""

import sys
from pathlib import Path

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import base as rotary
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_loader import get_model
from sglang.srt.models import transformers as of_transformers
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch.nn import functional

#: the tokens of the sequence
TOKENS = torch.arange(3, 17)


def attention(self, query, key, value, *_, **__):
    """Causal attention of one sequence. query [tokens, heads · head_dim]."""
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True
    )
    return out.transpose(0, 1).flatten(1)


def prefill():
    """The batch of one request with the prompt TOKENS."""
    size = len(TOKENS)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=TOKENS,
        req_pool_indices=torch.zeros(1, dtype=torch.long),
        seq_lens=torch.tensor([size]),
        out_cache_loc=torch.arange(size),
        seq_lens_sum=size,
    )
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor([size]), [size]
    batch.capture_hidden_mode, batch.return_logprob = CaptureHiddenMode.NULL, False
    return batch


def computed(config):
    """What a rank has loaded and computes: the products of all linears, the logits of the last token."""
    loaded = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    products = {}
    for name, linear in loaded.named_modules():
        if isinstance(linear, LinearBase):
            size = getattr(linear, "input_size_per_partition", linear.input_size)
            x = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
            products[name] = (x, linear.quant_method.apply(linear, x, None))
    return {
        "architecture": type(loaded).__name__,
        "quantization": config.quantization,
        "names": [name for name, _ in loaded.named_parameters()],
        "products": products,
        "rotations": {name: t.data for name, t in loaded.named_parameters() if "rotation" in name},
        "logits": loaded(TOKENS, torch.arange(len(TOKENS)), prefill()).next_token_logits[0],
    }


@torch.no_grad()
def main(rank, ranks, meeting, results, *models):
    load_plugins()
    RadixAttention.forward = attention
    rotary._is_cpu = True  # otherwise it imports a kernel of vLLM
    of_transformers.get_device = lambda: "cpu"  # otherwise it looks for a GPU
    found = {}
    for model in models:
        arguments = ServerArgs(
            model_path=model, tp_size=ranks, device="cpu", dtype="float32", skip_tokenizer_init=True
        )
        try:
            publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank))
            if not torch.distributed.is_initialized():
                init_distributed_environment(ranks, rank, f"file://{meeting}", rank, "gloo")
                initialize_model_parallel("gloo")
                initialize_dp_attention(arguments)
            found[Path(model).name] = computed(ModelConfig.from_server_args(arguments))
        except ValueError as error:
            found[Path(model).name] = str(error)
    torch.save(found, results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
