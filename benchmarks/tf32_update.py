"""SparseGPT 2:4 with the update right of each block in TF32, emulated on a CPU, against fp32.

A GPU rounds the factors of a TF32 product to 10 bits of mantissa and adds in fp32. Each line shows, for all
weights that a run of the embedded model prunes, the share of the mask that changes and the change of the
error.

    python benchmarks/tf32_update.py --csv      blocks of 128 and of 32 columns, without and with rotations
"""

import argparse
import dataclasses
import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

import torch
from _harness import add_csv, append_rows, commit, machine
from torch import Tensor

import drot
from drot.config import Recipe, RotationConfig
from drot.pruning import PruneOutcome, output_error, prune_sparsegpt, weight
from drot.reporting.demo import CALIBRATION, MODEL


def rounded(x: Tensor, bits: int) -> Tensor:
    """fp32 numbers, rounded to the nearest with `bits` bits of mantissa."""
    drop = 23 - bits
    return ((x.contiguous().view(torch.int32) + (1 << (drop - 1))) & -(1 << drop)).view(torch.float32)


@contextmanager
def rounded_update(bits: int) -> Iterator[None]:
    """A context in which `addmm_`, the update of SparseGPT, rounds its factors."""
    exact = Tensor.addmm_
    Tensor.addmm_ = lambda total, a, b, **scale: exact(total, rounded(a, bits), rounded(b, bits), **scale)
    try:
        yield
    finally:
        Tensor.addmm_ = exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser)
    options = parser.parse_args()
    rows: list[tuple[int, float, float]] = []

    def compared(target: Tensor, hessian: Tensor, sparsity: Any, **settings: Any) -> PruneOutcome:
        for block in (128, 32):
            of_block = settings | {"block_size": block}
            exact = prune_sparsegpt(target, hessian, sparsity, **of_block)
            with rounded_update(bits=10):
                found = prune_sparsegpt(target, hessian, sparsity, **of_block | {"total": exact.energy})
            errors = [output_error(target, outcome.weight, hessian) for outcome in (found, exact)]
            rows.append(
                (block, float((found.removed != exact.removed).float().mean()), errors[0] / errors[1] - 1)
            )
        return prune_sparsegpt(target, hessian, sparsity, **settings)

    weight.prune_sparsegpt = compared
    calibration = dataclasses.replace(CALIBRATION, nsamples=32)
    for rotation in (RotationConfig(mode="none"), RotationConfig(mode="layer", steps=30)):
        rows.clear()
        recipe = Recipe(rotation=rotation, calibration=calibration).with_quality("fast").replace(solve="none")
        drot.prune(MODEL, recipe, device="cpu", dtype="float32")
        for block in (128, 32):
            masks, errors = zip(*(row[1:] for row in rows if row[0] == block), strict=True)
            figures = {
                "mask_mean": mean(masks),
                "mask_most": max(masks),
                "error_mean": mean(errors),
                "error_least": min(errors),
                "error_most": max(errors),
            }
            row: dict[str, object] = {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "commit": commit(),
                "machine": machine("cpu"),
                "torch": torch.__version__,
                "rotation": rotation.mode,
                "block": block,
                "weights": len(masks),
            }
            row |= {name: f"{figure:.3e}" for name, figure in figures.items()}
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)
            if options.csv is not None:
                append_rows(options.csv / "tf32_update.csv", [row])


if __name__ == "__main__":
    main()
