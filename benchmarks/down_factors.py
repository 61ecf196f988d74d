"""What R3 could be made of: blocks, Householder reflections, or Givens rotations of pairs of channels.

    python benchmarks/down_factors.py MODEL --calibration TEXT [--layer 0 --layer 3] [--only blocks]

For the down_proj of each layer, every kind of R3 is trained with Adam on the share of the importance that
2:4 removes, (W R)² / diag(Rᵀ H⁻¹ R), at each rate of RATES. A line is a kind: the numbers that it keeps for
each channel, the multiplications that it takes for each channel and token, and the median over the layers of
the share before and after, at the best rate.

Blocks hold neighbours, channels whose inputs are most correlated, channels whose columns of importance are
most alike, or channels that differ most in their importance.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import drot
from drot.calibration.hessian import damping_unit
from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.load import load_tokenizer
from drot.config import CalibrationConfig
from drot.config.pruning import DAMPING
from drot.model.decoder import DecoderModel
from drot.text.source import load_calibration

RATES = (0.003, 0.01, 0.03, 0.1)
BLOCK = 64
#: the places of a matrix, and its rows times R3
Turn = Callable[[Tensor], Tensor]


class Blocks(nn.Module):
    """Orthogonal blocks [size, size] of channels that `order` [in] brings together."""

    def __init__(self, order: Tensor, size: int) -> None:
        super().__init__()
        self.order, self.size = order, size
        self.raw = nn.Parameter(torch.zeros(len(order) // size, size, size))
        self.numbers = self.products = size

    def forward(self, rows: Tensor) -> Tensor:
        blocks = torch.matrix_exp(self.raw - self.raw.mT)
        parts = rows[:, self.order].unflatten(1, (-1, self.size))
        return torch.einsum("rkb,kbc->rkc", parts, blocks).flatten(1)


class Householder(nn.Module):
    """`count` reflections of all channels. At the start each undoes the one before."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        pairs = torch.randn(count // 2, 1, channels).expand(-1, 2, -1)
        self.raw = nn.Parameter(pairs.flatten(0, 1).clone())
        self.numbers, self.products = count, 2 * count

    def forward(self, rows: Tensor) -> Tensor:
        for vector in nn.functional.normalize(self.raw, dim=1):
            rows = rows - 2 * torch.outer(rows @ vector, vector)
        return rows


class Givens(nn.Module):
    """Rotations of pairs of channels, in stages: `pairs` [stages, 2, in / 2]."""

    def __init__(self, pairs: Tensor) -> None:
        super().__init__()
        self.pairs = pairs
        self.raw = nn.Parameter(torch.zeros(len(pairs), pairs.shape[2]))
        self.numbers, self.products = len(pairs) / 2, 2 * len(pairs)

    def forward(self, rows: Tensor) -> Tensor:
        for (left, right), angles in zip(self.pairs, self.raw, strict=True):
            a, b, cos, sin = rows[:, left], rows[:, right], angles.cos(), angles.sin()
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], 1)
            rows = turned[:, torch.cat([left, right]).argsort()]
        return rows


def butterfly(channels: int, size: int) -> Tensor:
    """Pairs within blocks of `size` channels, whose distance doubles from stage to stage."""
    places, stages = torch.arange(channels), []
    for stage in range(size.bit_length() - 1):
        left = places[places & (1 << stage) == 0]
        stages.append(torch.stack([left, left + (1 << stage)]))
    return torch.stack(stages)


def random_pairs(channels: int, count: int) -> Tensor:
    return torch.stack([torch.randperm(channels).view(2, -1) for _ in range(count)])


def alike(gram: Tensor) -> Tensor:
    """An order of the channels [in] in which BLOCK channels that follow each other are most alike.

    gram: [in, in]; divided by the roots of its diagonal it says how alike two channels are.
    """
    root = gram.diagonal().sqrt()
    likeness, order = (gram / root / root[:, None]).abs(), list[Tensor]()
    left = torch.ones(len(root), dtype=torch.bool)
    while left.any():
        first = int(torch.where(left, root, -1).argmax())
        block = torch.where(left, likeness[first], -1).topk(BLOCK).indices
        left[block] = False
        order.append(block)
    return torch.cat(order)


def unlike(importance: Tensor) -> Tensor:
    """An order of the channels [in] that gives each block of BLOCK some of every importance."""
    return importance.argsort().view(BLOCK, -1).T.flatten()


def removed_share(weight: Tensor, factor: Tensor, turn: Turn) -> Tensor:
    """The share of the importance of W R that 2:4 removes.

    weight: W [out, in]. factor: L [in, in] with H⁻¹ = L Lᵀ.
    """
    rows = turn(torch.cat([weight, factor.T]))
    turned, of_factor = rows[: len(weight)], rows[len(weight) :]
    importance = turned.square() / of_factor.square().sum(0)
    return importance.unflatten(1, (-1, 4)).sort(-1).values[..., :2].sum() / importance.sum()


def trained(kind: nn.Module, weight: Tensor, factor: Tensor, steps: int) -> tuple[float, float]:
    """The share that is removed before the training of `kind` and after it, at the best rate."""
    start = {name: value.clone() for name, value in kind.state_dict().items()}
    with torch.no_grad():
        before, best = float(removed_share(weight, factor, lambda rows: rows)), 1.0
    for rate in RATES:
        kind.load_state_dict(start)
        optimizer = torch.optim.Adam(kind.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            removed_share(weight, factor, kind).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            best = min(best, float(removed_share(weight, factor, kind)))
    return before, best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or name on the hub")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--nsamples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--layer", type=int, action="append", help="may be given more than once; default: all"
    )
    parser.add_argument("--only", default="", help="a part of the names of the kinds to train; default: all")
    options = parser.parse_args()
    torch.manual_seed(0)
    text = CalibrationConfig(source=options.calibration, nsamples=options.nsamples, seqlen=options.seqlen)
    tokens = load_calibration(text, load_tokenizer(options.model))
    model = DecoderModel(drot.load(options.model, device="cpu", dtype="float32"))
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    stream = CalibrationStream.embed(model, tokens, torch.device("cpu"))
    for layer in model.layers:
        (down,) = layer.downs
        at = LayerPass(layer, stream, fixed=True)
        if options.layer is None or layer.index in options.layer:
            hessian = at.hessian(down.group)
            hessian.diagonal().add_(DAMPING * damping_unit(hessian.diagonal(), "median"))
            factor = torch.linalg.cholesky(torch.linalg.inv(hessian.double())).float()
            weight = down.weight.detach().float()
            channels = weight.shape[1]
            columns = weight / factor.square().sum(1).sqrt()  # their squares are the importance
            energy = columns.square().sum(0)
            kinds = {
                "blocks of 16": Blocks(torch.arange(channels), 16),
                f"blocks of {BLOCK}": Blocks(torch.arange(channels), BLOCK),
                f"blocks of {BLOCK}, correlated": Blocks(alike(hessian), BLOCK),
                f"blocks of {BLOCK}, alike columns": Blocks(alike(columns.T @ columns), BLOCK),
                f"blocks of {BLOCK}, unlike": Blocks(unlike(energy), BLOCK),
                "Householder, 8": Householder(channels, 8),
                "Householder, 64": Householder(channels, 64),
                f"Givens, 6 stages in blocks of {BLOCK}": Givens(butterfly(channels, BLOCK)),
                "Givens, 12 stages of random pairs": Givens(random_pairs(channels, 12)),
                "Givens, 32 stages of random pairs": Givens(random_pairs(channels, 32)),
            }
            for name, kind in ((name, kind) for name, kind in kinds.items() if options.only in name):
                shares = trained(kind, weight, factor, options.steps)
                found.setdefault(name, []).append((kind.numbers, kind.products, *shares))
                print(f"layer {layer.index:2d}  {name:<34} {shares[0]:.4f} -> {shares[1]:.4f}", flush=True)
        at.advance()
    print(f"\n{Path(options.model).name}: numbers and products of a channel, and the share that is removed")
    for name, rows in found.items():
        numbers, products, before, after = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:<34} {numbers:5g} {products:5g}   {before:.4f} -> {after:.4f}")


if __name__ == "__main__":
    main()
