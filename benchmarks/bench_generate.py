"""generate() of 128 tokens with the embedded model: 2:4, and 2:4 with rotations, against dense.

The model is so small that starting a product takes about as long as computing it. The smallest weights are
set to zero and the rotations are random, which does not change the time of a token.
"""

from collections.abc import Callable
from functools import partial

import torch
from _harness import arguments, interleaved, report

from drot.checkpoint.load import load
from drot.model.boundary import add_boundary_rotation
from drot.model.decoder import DecoderModel
from drot.ops import nm_mask
from drot.speed.variants import DENSE, SPARSE, model_variants
from drot.sweep.demo import MODEL

PROMPT, NEW_TOKENS = 1, 128


@torch.no_grad()
def calls(dtype: str, device: str) -> dict[str, Callable[[], object]]:
    """Variant → generate() with that variant of the model."""
    model = load(MODEL, device=device, dtype=dtype)
    handle = DecoderModel(model)
    d, where = handle.hidden_size, dict(dtype=handle.dtype, device=handle.device)
    for layer in handle.layers:
        for linear in layer.linears.values():
            linear.weight.masked_fill_(nm_mask(linear.weight.abs(), 2, 4), 0)
        if layer.index:
            rotation = add_boundary_rotation(layer.module, handle.family, "input", d, **where)
            rotation.weight.normal_(0, d**-0.5)
    prompt = torch.randint(model.config.vocab_size, (1, PROMPT), device=model.device)
    options = dict(attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0)
    length = dict(min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
    return {
        name: partial(variant.generate, prompt, **options, **length)
        for name, variant in model_variants(model).items()
    }


def main() -> None:
    parser = arguments(__doc__)
    dtypes = ["bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", choices=dtypes, nargs="*", default=["bfloat16", "float32"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for dtype in options.dtype:
        report(
            "generate",
            f"tiny-llama, {NEW_TOKENS} tokens, {dtype}",
            interleaved(calls(dtype, options.device), device=options.device, repeats=options.repeats),
            peer=DENSE,
            target=SPARSE,
            at_least=1.0,
            device=options.device,
            save=options.csv,
        )


if __name__ == "__main__":
    main()
