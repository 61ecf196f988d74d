"""How many directions the weights of a model use: the effective rank of what each rotation turns.

    python benchmarks/spectrum.py MODEL [MODEL]

The effective rank (Roy & Vetterli 2007) of weights is exp of the entropy of their squared singular values,
each over their sum. It is shown over the largest rank that the weights can have: 1 if all directions carry
as much. A rotation concentrates the importance in few columns only if the weights use few directions. Each
line is an input group of a model: the least, the median and the most over its layers.
"""

import argparse
import statistics
from pathlib import Path

import torch
import transformers
from torch import Tensor

from drot.model.decoder import DecoderModel


def effective_rank(weight: Tensor) -> float:
    """exp H(p) with pᵢ = σᵢ² / Σ σ² of a weight [out, in], between 1 and min(out, in)."""
    energies = torch.linalg.svdvals(weight.double()).square()
    shares = energies / energies.sum()
    return float(torch.special.entr(shares).sum().exp())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="+", help="folder or name on the hub")
    for path in parser.parse_args().model:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        shares: dict[str, list[float]] = {}
        for layer in DecoderModel(model).layers:
            folded = layer.folded_weights()
            for group in layer.groups:
                weights = torch.cat([folded[linear.name] for linear in layer.linears_of(group)])
                rank = effective_rank(weights) / min(weights.shape)
                shares.setdefault(group.name, []).append(rank)
        for name, values in shares.items():
            low, middle, high = min(values), statistics.median(values), max(values)
            print(f"{Path(path).name:<24} {name:<12} {low:.2f}  {middle:.2f}  {high:.2f}", flush=True)


if __name__ == "__main__":
    main()
