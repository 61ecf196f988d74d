"""The loss of the optimizers on real layers: `paper` after 2000 steps, and `fast` at different settings.

Each line also shows the step at which the loss of `fast` falls below the final loss of `paper`.

    python benchmarks/optimizers.py --csv                              layers 0 and 4 of the embedded model
    python benchmarks/optimizers.py MODEL --calibration TEXT --layers 0 3
"""

import argparse
import dataclasses
import datetime
from pathlib import Path

import torch
from _harness import RESULTS, append_rows, commit, machine
from transformers import AutoModelForCausalLM

from drot.architectures import architecture_of, decoder_layers, head_shape
from drot.calibration.data import load_calibration
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.load import load_tokenizer, pick_device
from drot.config import OPTIMIZER_DEFAULTS, Recipe, RotationConfig
from drot.demo.demo import CALIBRATION, MODEL
from drot.pipeline.layer import layer_objective
from drot.rotation.train import train_rotation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--calibration", default=CALIBRATION.source)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 4])
    parser.add_argument(
        "--lr", type=float, nargs="+", default=[0.15, 0.3, 0.5], help="learning rates of fast"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100], help="steps of fast")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", action="store_true", help="append rows to benchmarks/results/")
    options = parser.parse_args()
    device = pick_device(options.device)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    arch, shape = architecture_of(model.config), head_shape(model.config)
    tokens = load_calibration(
        options.calibration, load_tokenizer(options.model), nsamples=CALIBRATION.nsamples,
        seqlen=CALIBRATION.seqlen, seed=CALIBRATION.seed, text_column=CALIBRATION.text_column,
    )  # fmt: skip
    stream = CalibrationStream.embed(model, arch, tokens, device)
    for index, layer in enumerate(decoder_layers(model, arch)[: max(options.layers) + 1]):
        layer.to(device)
        for kind in ("entropy", "pruned") if index in options.layers else ():
            recipe = Recipe(rotation=RotationConfig(objective=kind))
            objective, _ = layer_objective(layer, index, stream, arch, shape, recipe)
            paper = RotationConfig(objective=kind, optimizer="paper")
            runs = [paper, dataclasses.replace(paper, steps=400)] + [
                RotationConfig(objective=kind, steps=steps, lr=lr, early_stop=0.0)
                for steps in options.steps
                for lr in options.lr
            ]
            goal = None
            for config in runs:
                _, record = train_rotation([objective], config, device=device)
                goal = record.loss_after if goal is None else goal
                below = next((i for i, loss in enumerate(record.loss_curve) if loss <= goal), None)
                default = (config.resolved_steps, config.resolved_lr) == OPTIMIZER_DEFAULTS[config.optimizer]
                row = {
                    "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                    "commit": commit(),
                    "machine": machine(str(device)),
                    "model": Path(options.model).name,
                    "layer": index,
                    "objective": kind,
                    "optimizer": config.optimizer,
                    "steps": config.resolved_steps,
                    "lr": config.resolved_lr,
                    "loss_before": f"{record.loss_before:.2f}",
                    "loss_after": f"{record.loss_after:.2f}",
                    "steps_to_paper": "never" if below is None else below,
                    "ms_per_step": f"{1e3 * record.seconds / len(record.loss_curve):.1f}",
                }
                print(
                    f"layer {index}  {kind:<8} {config.optimizer:<6} {config.resolved_steps:>5} steps"
                    f"  lr {config.resolved_lr:<5} loss {row['loss_before']} -> {row['loss_after']}"
                    f"  below paper's end at step {row['steps_to_paper']}  {row['ms_per_step']} ms a step"
                    f"{'  (default)' if default else ''}",
                    flush=True,
                )
                if options.csv:
                    append_rows(RESULTS / "optimizers.csv", [row])
        stream.advance(layer, index)


if __name__ == "__main__":
    main()
