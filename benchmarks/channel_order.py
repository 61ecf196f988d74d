"""Which channels of an MLP should share a block of R3: neighbours, correlated channels, or uncorrelated ones.

    python benchmarks/channel_order.py --calibration TEXT --eval TEXT --eval TEXT

The order of the channels inside of an MLP does not change a model. Each order permutes the rows of gate_proj
and up_proj and the columns of down_proj of the embedded model, which is then pruned by `--quality fast`.

- neighbours: as the model has them.
- correlated: a block takes the channel with the most energy that is left, and those that correlate most with
  it, by the absolute value, on the calibration text.
- spread: the channels of a correlated block go to different blocks.
"""

import argparse
import dataclasses
from pathlib import Path

import torch
from _harness import machine
from perplexity import CALIBRATION, RECIPES
from torch import Tensor, nn

import drot
from drot.checkpoint.load import load_tokenizer
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.reporting.demo import MODEL

BLOCK = 64


def grams(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """XᵀX [ff, ff] in fp64 of the inputs of each down_proj."""
    layers = model.model.layers
    found = [torch.zeros(2 * [layer.mlp.down_proj.in_features], dtype=torch.float64) for layer in layers]

    def add(index: int):
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, 1).double()
            found[index].add_(x.T @ x)

        return hook

    hooks = [layer.mlp.down_proj.register_forward_pre_hook(add(i)) for i, layer in enumerate(layers)]
    with torch.no_grad():
        for row in tokens:
            model(row[None])
    for hook in hooks:
        hook.remove()
    return found


def correlated(gram: Tensor) -> Tensor:
    """The channels [ff], in which each BLOCK is a channel and those that correlate most with it."""
    scale = gram.diagonal().clamp_min(1e-30).sqrt()
    correlation, left = (gram / scale / scale[:, None]).abs(), gram.diagonal().clone()
    blocks = []
    for _ in range(len(gram) // BLOCK):
        near = correlation[left.argmax()].masked_fill(left < 0, -1)
        blocks.append(near.topk(BLOCK).indices)
        left[blocks[-1]] = -1
    return torch.cat(blocks)


ORDERS = {
    "neighbours": lambda gram: torch.arange(len(gram)),
    "correlated": correlated,
    "spread": lambda gram: correlated(gram).view(-1, BLOCK).T.flatten(),
}


def permute(model: nn.Module, orders: list[Tensor]) -> None:
    """Gives the channels inside of each MLP another order, in place."""
    for layer, order in zip(model.model.layers, orders, strict=True):
        mlp = layer.mlp
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.data = linear.weight.data[order].clone()
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, order].clone()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--eval", action="append", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = load_tokenizer(str(MODEL))
    settings = dataclasses.replace(CALIBRATION, source=options.calibration, seed=options.seed)
    recipe = dataclasses.replace(RECIPES["full, fast"], calibration=settings)
    tokens = load_eval_tokens(options.calibration, tokenizer)[: 64 * 512].view(64, 512)
    texts = {Path(path).stem: load_eval_tokens(path, tokenizer) for path in options.eval}
    print(f"{machine('cpu')}, seed {options.seed}, blocks of {BLOCK}")
    for name, order in ORDERS.items():
        model = drot.load(MODEL, dtype="float32", device="cpu")
        permute(model, [order(gram) for gram in grams(model, tokens)])
        result = drot.prune(model, recipe, tokenizer=tokenizer, device="cpu", dtype="float32")
        found = {text: perplexity(result.model, ids, seqlen=512) for text, ids in texts.items()}
        print(name, " ".join(f"{text} {value:.3f}" for text, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
