"""The loss of the optimizers on real layers: `paper` after 2000 steps, and `fast` at different settings.

Each line also shows the step at which the loss of `fast` falls below the final loss of `paper`.

    python benchmarks/optimizers.py --csv                              layers 0 and 4 of the embedded model
    python benchmarks/optimizers.py MODEL --calibration TEXT --layers 0 3 --optimizer adam fast
    python benchmarks/optimizers.py --synthetic 256 512 1024 2048 --steps 60  whether a rate fits every width

drot does not offer two of the peers: `adam` is Adam in the tangent space so(n), and `spectral` takes the
steps of the pruned importance on the entropy too.

A synthetic layer has random weights. The eigenvalues of its Hessians fall as a power law, and eight channels
are 20 times as large as the others. `paper` is not run on it.
"""

import argparse
import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from _harness import add_csv, append_rows, commit, machine
from transformers import AutoModelForCausalLM

from drot.calibration.stream import CalibrationStream
from drot.checkpoint.load import load_tokenizer
from drot.config import (
    OPTIMIZER_DEFAULTS,
    PruningConfig,
    Recipe,
    ResolvedRecipe,
    RotationConfig,
    Sparsity,
    resolve,
)
from drot.machine.devices import pick_device
from drot.model.decoder import DecoderModel
from drot.model.families import LLAMA
from drot.model.sizes import HeadShape
from drot.pipeline.objective import layer_objective
from drot.reporting.demo import CALIBRATION, MODEL
from drot.rotation.importance import layer_metrics
from drot.rotation.objective import LayerObjective
from drot.rotation.optimizers import OPTIMIZERS
from drot.rotation.retraction import DIRECTIONS
from drot.rotation.train import train_rotation
from drot.text.source import load_calibration

#: objective → the rates of fast that are compared
RATES = {"pruned": [0.15, 0.3, 0.5], "entropy": [0.4, 0.7, 1.0]}
#: the rate of `spectral`
SPECTRAL_LR = 0.3


class TangentAdam:
    """Adam in so(n) with a half cosine of the rate: Q ← Q · cayley(Ω), with Adam's step Ω for QᵀG - GᵀQ."""

    LR = 0.03
    capturable = False

    def __init__(self, start: list[torch.Tensor], *, lr: float, steps: int, objective: str) -> None:
        self.matrices = [matrix.clone() for matrix in start]
        self._omegas = [torch.zeros_like(matrix, requires_grad=True) for matrix in start]
        self._adam = torch.optim.Adam(self._omegas, lr=lr)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._adam, T_max=max(steps, 1))

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor | None]) -> None:
        for omega, gradient, q in zip(self._omegas, gradients, self.matrices, strict=True):
            omega.grad = None if gradient is None else q.mT @ gradient - gradient.mT @ q
            omega.zero_()
        self._adam.step()
        self._schedule.step()
        for omega, q in zip(self._omegas, self.matrices, strict=True):
            eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
            q.copy_(q @ torch.linalg.solve(eye - omega / 2, eye + omega / 2))


def resolved(
    rotation: RotationConfig, device: torch.device, pruning: PruningConfig | None = None
) -> ResolvedRecipe:
    """The recipe with equal tokens and without R3."""
    rotation = dataclasses.replace(rotation, down_rotation="none")
    pruning = dataclasses.replace(pruning or PruningConfig(), token_weights="equal")
    return resolve(Recipe(rotation=rotation, pruning=pruning), device=device.type)


def synthetic_objective(n: int, kind: str, device: torch.device) -> LayerObjective:
    """The objective of a random layer of hidden size n, with SparseGPT's scores for 2:4."""
    generator = torch.Generator().manual_seed(n)
    shape = HeadShape(heads=n // 64, kv_heads=max(1, n // 256), head_dim=64)
    rows = {"q_proj": n, "k_proj": 64 * shape.kv_heads, "v_proj": 64 * shape.kv_heads, "o_proj": n,
            "gate_proj": 2 * n, "up_proj": 2 * n, "down_proj": n}  # fmt: skip
    weights, hessians = {}, {}
    for group in LLAMA.groups:
        width = 2 * n if group.name == "down" else n
        hessians[group.name] = power_law_hessian(width, generator)
        for name in (linear.name for linear in group.linears):
            weights[name] = torch.randn(rows[name], width, generator=generator) / width**0.5
    metrics, _ = layer_metrics(
        "sparsegpt", hessians, LLAMA.groups, shape, damping=0.01, unrotated=kind == "pruned"
    )
    return LayerObjective(
        {name: weight.to(device) for name, weight in weights.items()},
        {group: metric.to(device) for group, metric in metrics.items()},
        LLAMA.groups, shape, objective=kind, sparsity=Sparsity.parse("2:4"),
    )  # fmt: skip


def power_law_hessian(width: int, generator: torch.Generator, outliers: int = 8) -> torch.Tensor:
    """H [width, width] with eigenvalues 1/i in a random basis, and `outliers` channels 20 times as large."""
    basis = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    hessian = basis @ (basis / torch.arange(1, width + 1)).T
    channels = torch.ones(width)
    channels[torch.randperm(width, generator=generator)[:outliers]] = 20
    return hessian * channels[:, None] * channels


def real_objectives(
    options: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, int, str, LayerObjective]]:
    """(model, layer, objective, the objective of the layer) for the layers of a model."""
    model = DecoderModel(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval())
    settings = dataclasses.replace(CALIBRATION, source=options.calibration)
    tokens = load_calibration(settings, load_tokenizer(options.model))
    stream = CalibrationStream.embed(model, tokens, device)
    for layer in model.layers[: max(options.layers) + 1]:
        layer.to(device)
        for kind in options.objective if layer.index in options.layers else ():
            recipe = resolved(RotationConfig(objective=kind), device, options.pruning)
            objective, _ = layer_objective(layer, stream, recipe)
            yield Path(options.model).name, layer.index, kind, objective
        stream.advance(layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--calibration", default=CALIBRATION.source)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 4])
    parser.add_argument(
        "--synthetic", type=int, nargs="+", help="hidden sizes of synthetic layers, for MODEL"
    )
    parser.add_argument("--objective", nargs="+", default=["entropy", "pruned"])
    parser.add_argument(
        "--lr", type=float, nargs="+", help="learning rates of fast; default: three for each objective"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100], help="steps of all but paper")
    parser.add_argument(
        "--optimizer", nargs="+", default=["paper", "fast"], choices=["paper", "adam", "spectral", "fast"]
    )
    parser.add_argument(
        "--damping", type=float, help="share of the mean of diag H, as SparseGPT's 0.01; default: drot's"
    )
    parser.add_argument("--device", default="auto")
    add_csv(parser)
    options = parser.parse_args()
    options.pruning = PruningConfig()
    if options.damping is not None:
        options.pruning = PruningConfig(damping=options.damping, damping_average="mean")
    device = pick_device(options.device)
    objectives = real_objectives(options, device)
    if options.synthetic:
        objectives = (
            (f"synthetic-{n}", 0, kind, synthetic_objective(n, kind, device))
            for n in options.synthetic
            for kind in options.objective
        )
    for model, index, kind, objective in objectives:
        runs = []
        if "paper" in options.optimizer and not options.synthetic:
            paper = RotationConfig(objective=kind, optimizer="paper")
            runs = [("paper", paper), ("paper", dataclasses.replace(paper, steps=400))]
        for steps in options.steps:
            fast = RotationConfig(objective=kind, steps=steps, early_stop=0.0)
            if "adam" in options.optimizer:
                runs.append(("adam", dataclasses.replace(fast, lr=TangentAdam.LR)))
            if "spectral" in options.optimizer and kind == "entropy":
                runs.append(("spectral", dataclasses.replace(fast, lr=SPECTRAL_LR)))
            if "fast" in options.optimizer:
                runs += [("fast", dataclasses.replace(fast, lr=lr)) for lr in options.lr or RATES[kind]]
        goal = None
        for optimizer, config in runs:
            peers = {
                "adam": (OPTIMIZERS, {"fast": TangentAdam}),
                "spectral": (DIRECTIONS, {"entropy": DIRECTIONS["pruned"]}),
            }
            rotation = resolved(config, device).rotation
            with mock.patch.dict(*peers.get(optimizer, (OPTIMIZERS, {}))):
                _, record = train_rotation([objective], rotation, device=device)
            goal = record["loss_after"] if goal is None and optimizer == "paper" else goal
            below = next((i for i, loss in enumerate(record["loss_curve"]) if goal and loss <= goal), None)
            default = optimizer in OPTIMIZERS and config == RotationConfig(
                objective=kind, optimizer=config.optimizer, steps=OPTIMIZER_DEFAULTS[optimizer][0]
            )
            row = {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "commit": commit(),
                "machine": machine(str(device)),
                "model": model,
                "layer": index,
                "objective": kind,
                "optimizer": optimizer,
                "steps": rotation.steps,
                "lr": rotation.lr,
                "loss_before": f"{record['loss_before']:.2f}",
                "loss_after": f"{record['loss_after']:.2f}",
                "steps_to_paper": "" if goal is None else "never" if below is None else below,
            }
            against = "" if goal is None else f"  below paper's end at step {row['steps_to_paper']}"
            print(
                f"{model} layer {index}  {kind:<8} {optimizer:<6} {rotation.steps:>5} steps"
                f"  lr {rotation.lr:<5} loss {row['loss_before']} -> {row['loss_after']}{against}"
                f"{'  (default)' if default else ''}",
                flush=True,
            )
            if options.csv:
                append_rows(options.csv / "optimizers.csv", [row])


if __name__ == "__main__":
    main()
