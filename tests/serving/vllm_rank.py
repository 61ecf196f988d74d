"""One tensor-parallel rank of vLLM on a CPU: loads checkpoints by vLLM's loaders and computes with them.

Arguments: the rank, the number of ranks, a file by which the ranks meet, the file of results, checkpoints.

The wheel of vLLM has CUDA kernels only. So the custom ops are those in PyTorch, and the attention is that of
one sequence by its formula. Everything else is vLLM's own.
"""

import os
import sys
from pathlib import Path

os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # read by the imports of vLLM

import torch
from torch.nn import functional
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.utils import can_enable_torch_compile

from drot.serving.vllm import register

#: the tokens of the sequence
TOKENS = torch.arange(3, 17)


def attention(self, query, key, value, *_, **__):
    """Causal attention of one sequence. query [tokens, heads · head_size]."""
    q, k, v = (x.unflatten(-1, (-1, self.head_size)).transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.mT * self.impl.scale
    if cap := self.impl.logits_soft_cap:
        scores = cap * torch.tanh(scores / cap)
    back = torch.arange(len(TOKENS))[:, None] - torch.arange(len(TOKENS))
    seen = (back >= 0) & (back < (self.sliding_window or len(TOKENS)))
    scores = scores.masked_fill(~seen, float("-inf"))
    if (sinks := self.impl.sinks) is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(TOKENS), 1)], -1)
    weights = scores.softmax(-1)[..., : len(TOKENS)]
    return (weights @ v).transpose(0, 1).flatten(1)


def latent_attention(self, query, latent, rotated, **_):
    """The same, where the keys and values of all heads come from a latent [tokens, rank] and `rotated`."""
    keys_and_values = self.kv_b_proj(latent)[0].unflatten(-1, (self.num_heads, -1))
    key, value = keys_and_values.split((self.qk_nope_head_dim, self.v_head_dim), -1)
    key = torch.cat([key, rotated.view(len(TOKENS), 1, -1).expand(-1, self.num_heads, -1)], -1)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    later = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).triu(1)
    weights = (q @ k.mT * self.scale).masked_fill(later, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


def delta_attention(self, hidden_states):
    """The gated delta rule, token by token (arXiv:2412.06464, equation 10). hidden_states [tokens, d]."""
    projected, gates = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
    keys = self.num_k_heads // self.tp_size * self.head_k_dim
    values = self.num_v_heads // self.tp_size * self.head_v_dim
    mixed, z = projected.split([2 * keys + values, values], -1)
    weight = self.conv1d.weight
    padded = functional.pad(mixed.T, (weight.shape[-1] - 1, 0))
    mixed = functional.silu(functional.conv1d(padded, weight, groups=len(weight))).T
    q, k, v = mixed.split([keys, keys, values], -1)
    q, k = (functional.normalize(x.unflatten(-1, (-1, self.head_k_dim)), dim=-1) for x in (q, k))
    q, k = (x.repeat_interleave(self.num_v_heads // self.num_k_heads, 1) for x in (q, k))
    v, z = (x.unflatten(-1, (-1, self.head_v_dim)) for x in (v, z))
    beta, a = gates.chunk(2, -1)
    decay = torch.exp(-self.A_log.exp() * functional.softplus(a + self.dt_bias))
    state, outputs = torch.zeros(v.shape[1], self.head_k_dim, self.head_v_dim), []
    for token in range(len(TOKENS)):
        state = state * decay[token, :, None, None]
        error = v[token] - torch.einsum("hkv,hk->hv", state, k[token])
        state = state + torch.einsum("hk,hv->hkv", k[token], beta[token, :, None].sigmoid() * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]) * self.head_k_dim**-0.5)
    return self.out_proj(self.norm(torch.stack(outputs), z).flatten(-2))[0]


def computed(engine):
    """What a rank has loaded and computes: tensors, the products of layer 1 of vLLM's own classes, logits."""
    loaded = get_model(vllm_config=engine)
    positions = torch.arange(len(TOKENS))
    found = {
        "architecture": type(loaded).__name__,
        "quantization": engine.model_config.quantization,
        "tensors": {name: tensor.clone() for name, tensor in loaded.state_dict().items()},
        "products": {},
    }
    with set_forward_context(None, engine, num_tokens=len(TOKENS)):
        found["logits"] = loaded.compute_logits(loaded(TOKENS, positions))
        if isinstance(loaded, TransformersForCausalLM):
            if engine.parallel_config.tensor_parallel_size > 1:
                return found
            torch.compiler.reset()  # else it counts the other models as compilations of this one
            traced = loaded.model
            if can_enable_torch_compile(engine):
                traced = torch.compile(loaded.model, backend="eager", fullgraph=True)
            outputs = [
                model(input_ids=TOKENS[None], position_ids=positions[None], use_cache=False).last_hidden_state
                for model in (loaded.model, traced)
            ]
            found["traced"] = torch.equal(*outputs)
            if "MoE" in type(loaded).__name__:
                draft = get_model(vllm_config=engine, prefix="draft_model")
                for parameter in draft.parameters():
                    parameter.zero_()
                found["beside a draft"] = loaded.compute_logits(loaded(TOKENS, positions))
            return found
    layer = loaded.model.layers[1]
    for name, linear in (("qkv", layer.self_attn.qkv_proj), ("down", layer.mlp.down_proj)):
        x = torch.randn(5, linear.input_size_per_partition, generator=torch.Generator().manual_seed(0))
        found["products"][name] = (x, linear.quant_method.apply(linear, x, None))
    with set_forward_context(None, engine, num_tokens=len(TOKENS)):
        x = loaded.embed_input_ids(TOKENS)
        inputs = dict(positions=positions, hidden_states=x, residual=x)
        eager = layer(**inputs)
        traced = torch.compile(layer, backend="eager", fullgraph=True)(**inputs)
        found["traced"] = all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
    return found


@torch.no_grad()
def main(rank, ranks, meeting, results, *models):
    register()
    Attention.forward, MLAAttention.forward = attention, latent_attention
    QwenGatedDeltaNetAttention.forward = delta_attention
    torch.accelerator.empty_cache = lambda: None  # vLLM calls it after loading, and it needs a GPU
    found = {}
    for model in models:
        try:
            engine = EngineArgs(
                model=model,
                dtype="float32",
                tensor_parallel_size=ranks,
                distributed_executor_backend="mp" if ranks > 1 else None,
                enforce_eager=True,
                skip_tokenizer_init=True,
                max_model_len=64,
                compilation_config={"custom_ops": ["none"]},
            ).create_engine_config()
            with set_current_vllm_config(engine):
                if not torch.distributed.is_initialized():
                    init_distributed_environment(ranks, rank, f"file://{meeting}", rank, "gloo")
                    initialize_model_parallel(ranks)
                found[Path(model).name] = computed(engine)
        except ValueError as error:
            found[Path(model).name] = str(error)
    torch.save(found, results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
