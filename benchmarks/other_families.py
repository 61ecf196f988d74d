"""How much of the 2:4 gap the rotations close in a SmolLM3, a GLM-4, a Mixtral, a Cohere 2 or a Qwen3.5.

    python benchmarks/other_families.py --minutes 8
    python benchmarks/other_families.py --minutes 8 --family mixtral

The model has the weights of the demo's LLaMA. The norms of the GLM-4 behind the blocks start at the root mean
square that the LLaMA's blocks write. Each of the 4 experts of the Mixtral starts as the LLaMA's MLP with
noise of a fifth of its size. The Cohere 2 has one LayerNorm in front of attention and MLP: the weights of the
LLaMA's two norms lie in its linears. In the Qwen3.5 each fourth layer has the attention of the LLaMA. The
linear attention of the others starts with its q, k, v and o. Each fourth layer of the SmolLM3 has no RoPE.
The whole model is then trained on the demo's calibration text and on the standard library. It is pruned to
2:4 by SparseGPT in one shot, without rotation and at the points of --rotation that the family has. The share
of the gap is that of the loss on the held-out text of the demo.
"""

import argparse
import copy
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import drot
from drot.config import QUALITIES, Recipe
from drot.evaluation.perplexity import perplexity
from drot.model.decoder import DecoderModel
from drot.reporting.demo import CALIBRATION, HELD_OUT, MODEL

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_tiny_llama import read, standard_library

SEQLEN, BATCH, LEARNING_RATE = 256, 4, 5e-4
POINTS: dict[str, dict[str, Any]] = {
    "stock": {"mode": "shared", "down_rotation": "none"},
    "light": {"mode": "shared", "down_rotation": 64},
    "full": {"mode": "layer"},
}
#: the experts of the Mixtral, and the noise in them as a share of the root mean square of a weight
EXPERTS, NOISE = 4, 0.2


@torch.no_grad()
def glm4(ids: torch.Tensor) -> Any:
    """A GLM-4 with the weights of the demo's LLaMA. ids: token ids [n] on which its outputs are measured."""
    llama = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    rope = dict(llama.config.rope_parameters) | {"partial_rotary_factor": 1.0}
    model = empty("glm4", llama.config, rope_parameters=rope, attention_bias=False)
    sizes: dict[int, float] = {}

    def measure(module: Any, args: Any, output: torch.Tensor) -> None:
        sizes[id(module)] = float(output.square().mean().sqrt())

    for layer, dense in zip(DecoderModel(model).layers, DecoderModel(llama).layers, strict=True):
        for name, linear in layer.linears.items():
            linear.weight.copy_(dense.linears[name].weight)
        for norm, of_dense in zip(layer.norms, dense.norms, strict=True):
            norm.weight.copy_(of_dense.weight)
        for name in ("o_proj", "down_proj"):
            dense.linears[name].module.register_forward_hook(measure)
    llama(ids[None, :2048])
    for layer, dense in zip(DecoderModel(model).layers, DecoderModel(llama).layers, strict=True):
        for norm, name in zip(layer.post_norms, ("o_proj", "down_proj"), strict=True):
            norm.weight.fill_(sizes[id(dense.linears[name].module)])
    copy_ends(model, llama)
    return model


@torch.no_grad()
def mixtral(ids: torch.Tensor) -> Any:
    """A Mixtral whose experts are the MLP of the demo's LLaMA with noise. ids: not used."""
    llama = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = empty("mixtral", llama.config, num_local_experts=EXPERTS)
    for layer, dense in zip(DecoderModel(model).layers, DecoderModel(llama).layers, strict=True):
        for name, linear in layer.linears.items():
            weight = dense.linears[name.rpartition(".")[2]].weight
            noise = NOISE * weight.square().mean().sqrt() * torch.randn_like(weight)
            linear.weight.copy_(weight if linear.spec.expert is None else weight + noise)
        for norm, of_dense in zip(layer.norms, dense.norms, strict=True):
            norm.weight.copy_(of_dense.weight)
    copy_ends(model, llama)
    return model


@torch.no_grad()
def cohere2(ids: torch.Tensor) -> Any:
    """A Cohere 2 with the weights of the demo's LLaMA. ids: not used."""
    llama = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = empty("cohere2", llama.config, logit_scale=1.0, sliding_window=128, tie_word_embeddings=True)
    for layer, dense in zip(DecoderModel(model).layers, DecoderModel(llama).layers, strict=True):
        for group in dense.groups:
            for spec in group.linears:
                weight = dense.linears[spec.name].weight
                if group.norm is not None:
                    weight = weight * dense.module.get_submodule(group.norm).weight
                if spec.name in ("q_proj", "k_proj"):  # RoPE turns neighbours here, halves of a head there
                    halves = weight.unflatten(0, (-1, 2, llama.config.head_dim // 2))
                    weight = halves.transpose(1, 2).flatten(0, 2)
                layer.linears[spec.name].weight.copy_(weight)
    copy_ends(model, llama)
    return model


@torch.no_grad()
def qwen3_5(ids: torch.Tensor) -> Any:
    """A Qwen3.5 with the weights of the demo's LLaMA. ids: not used."""
    llama = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    own, rope = llama.config, dict(llama.config.rope_parameters) | {"partial_rotary_factor": 1.0}
    heads = {f"linear_num_{each}_heads": own.num_attention_heads for each in ("key", "value")}
    sizes = {f"linear_{each}_head_dim": own.head_dim for each in ("key", "value")}
    model = empty("qwen3_5_text", own, rope_parameters=rope, tie_word_embeddings=True, **heads, **sizes)
    groups = own.num_attention_heads // own.num_key_value_heads
    for layer, dense in zip(DecoderModel(model).layers, DecoderModel(llama).layers, strict=True):
        weights = {name: linear.weight for name, linear in dense.linears.items()}
        for norm, of_dense in zip(layer.norms, dense.norms, strict=True):
            norm.weight.copy_(of_dense.weight - 1)
        if layer.family.linear_attention:
            q, k, v = (
                weights.pop(f"{one}_proj").unflatten(0, (-1, own.head_dim)).repeat_interleave(times, 0)
                for one, times in (("q", 1), ("k", groups), ("v", groups))
            )
            weights |= {"in_proj_qkv": torch.cat([q, k, v]).flatten(0, 1), "out_proj": weights.pop("o_proj")}
            convolution = layer.module.linear_attn.conv1d.weight  # each channel starts as its own token
            convolution.mul_(0.1)[..., -1] += 1
        else:  # a head's queries, and below them its gate, which starts open by half
            q = weights["q_proj"].unflatten(0, (-1, own.head_dim))
            weights["q_proj"] = torch.cat([q, torch.zeros_like(q)], 1).flatten(0, 1)
            weights["o_proj"] = 2 * weights["o_proj"]
        for name, weight in weights.items():
            layer.linears[name].weight.copy_(weight)
    copy_ends(model, llama)
    model.model.norm.weight.sub_(1)
    return model


@torch.no_grad()
def smollm3(ids: torch.Tensor) -> Any:
    """A SmolLM3 with the weights of the demo's LLaMA. ids: not used."""
    llama = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = empty("smollm3", llama.config, tie_word_embeddings=True)
    assert sum(not rope for rope in model.config.no_rope_layers) == model.config.num_hidden_layers // 4
    for layer, dense in zip(DecoderModel(model).layers, DecoderModel(llama).layers, strict=True):
        layer.module.load_state_dict(dense.module.state_dict())
    copy_ends(model, llama)
    return model


def empty(model_type: str, own: Any, **others: Any) -> Any:
    """A model of another type with the sizes of the config `own` of a LLaMA."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    )
    sizes = {name: getattr(own, name) for name in names}
    head_dim = own.hidden_size // own.num_attention_heads
    others = {"rope_parameters": dict(own.rope_parameters), **others}
    config = AutoConfig.for_model(model_type, **sizes, head_dim=head_dim, pad_token_id=None, **others)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def copy_ends(model: Any, llama: Any) -> None:
    model.model.embed_tokens.weight.copy_(llama.model.embed_tokens.weight)
    model.lm_head.weight.copy_(llama.lm_head.weight)
    model.model.norm.weight.copy_(llama.model.norm.weight)


MODELS = {"smollm3": smollm3, "glm4": glm4, "mixtral": mixtral, "cohere2": cohere2, "qwen3_5": qwen3_5}


def train(model: Any, ids: torch.Tensor, seconds: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    started, step = time.monotonic(), 0
    while (share := (time.monotonic() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            rise = min(1.0, (step + 1) / 20)
            group["lr"] = LEARNING_RATE * rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
        starts = [random.randrange(len(ids) - SEQLEN) for _ in range(BATCH)]
        batch = torch.stack([ids[start : start + SEQLEN] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {share:.0%} of the time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--family", choices=MODELS, default="glm4")
    parser.add_argument("--quality", choices=("one-shot", *QUALITIES), default="one-shot")
    parser.add_argument("--model", type=Path, help="a folder for the trained model, or where it lies")
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    calibration = Path(CALIBRATION.source).read_text(encoding="utf-8")
    held_out = tokenizer(HELD_OUT.read_text(encoding="utf-8")[:20_000], return_tensors="pt").input_ids[0]
    first = tokenizer(calibration[:60_000], return_tensors="pt").input_ids[0]
    if options.model is not None and options.model.exists():
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        texts = read(standard_library())
        random.shuffle(texts)
        text = "\n\n".join(texts)[:4_000_000] + calibration
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        model = MODELS[options.family](first)
        train(model, ids, 60 * options.minutes)
        if options.model is not None:
            model.save_pretrained(options.model)
    model.eval().requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = {"dense": math.log(perplexity(model, held_out, seqlen=SEQLEN))}
    one_shot = options.quality == "one-shot"
    chosen = Recipe().with_quality("fast" if one_shot else options.quality).replace(seqlen=SEQLEN)
    if one_shot:
        chosen = chosen.replace(solve="none")
    for name, fields in {"none": {"mode": "none"}, **POINTS}.items():
        if fields.get("down_rotation", "none") != "none" and not DecoderModel(model).family.takes("r3"):
            continue
        again = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32).eval()
        again.load_state_dict(state)
        pruned = drot.prune(
            again, chosen.replace(**fields), calibration=first[: 24 * SEQLEN].view(24, SEQLEN), device="cpu"
        ).model
        losses[name] = math.log(perplexity(pruned, held_out, seqlen=SEQLEN))
        print(f"{name}: {losses}", flush=True)
    gap = losses["none"] - losses["dense"]
    for name, loss in losses.items():
        print(
            f"{name:6} perplexity {math.exp(loss):.2f}, closes {(losses['none'] - loss) / gap:.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
