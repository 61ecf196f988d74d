"""The experts of a layer of a mixture: packed 2:4 weights against the dense experts of transformers.

The experts have the shape of Qwen3-30B-A3B, with random weights; --experts says how many there are. Each
token takes random experts.
"""

from collections.abc import Callable
from functools import partial

import torch
from _harness import arguments, interleaved, report
from bench_generate import BLOCKS, DENSE, SPARSE, variants
from transformers import AutoModelForCausalLM, Qwen3MoeConfig


@torch.no_grad()
def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768, help="the intermediate size of an expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    hidden, width, device = options.hidden, options.width, options.device
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=width,
        num_experts=options.experts,
        num_experts_per_tok=options.chosen,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=1,
        vocab_size=64,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    found = variants(model)
    experts = {name: found[name].model.layers[0].mlp.experts.to(device) for name in (DENSE, SPARSE, BLOCKS)}
    bytes_of_expert = 3 * hidden * width * torch.bfloat16.itemsize
    for tokens in (1, 8, 64, 512):
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
        drawn = torch.rand(tokens, options.experts).argsort(-1)[:, : options.chosen]
        chosen = drawn.contiguous().to(device)
        weights = torch.full(chosen.shape, 1 / options.chosen, dtype=x.dtype, device=device)
        functions: dict[str, Callable[[], object]] = {
            name: partial(of_layer, x, chosen, weights) for name, of_layer in experts.items()
        }
        report(
            "experts",
            f"{tokens} tokens, {options.chosen} of {options.experts} experts {hidden} x {width} bfloat16",
            interleaved(functions, device=device, repeats=options.repeats, warmup=1),
            peer=DENSE,
            bytes_moved=len(chosen.unique()) * bytes_of_expert,
            device=device,
            save=options.csv,
        )


if __name__ == "__main__":
    main()
