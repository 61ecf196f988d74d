"""What a run copies between the memories while it waits, against benchmarks/counting.py."""

import runpy
from pathlib import Path

import torch
from runs import prune, recipe
from small_models import random_tokens, save_small_model, small_model

from drot.config import resolve
from drot.pipeline import distill

ROOT = Path(__file__).resolve().parents[2]


def test_the_copies_of_a_layer_are_those_that_are_counted(tmp_path, monkeypatch):
    """Of the caller's thread: other threads copy while it works. The run has all that a run can have."""
    counting = runpy.run_path(str(ROOT / "benchmarks/counting.py"))
    recover = {"recover": "block", "recover_epochs": 1}
    chosen, tokens = recipe(quality="best", sparsity="2:4", steps=2, **recover), random_tokens(4, 40)
    train = distill._train

    def helps(*given, **kept):  # a training that does not help would read each layer again
        return train(*given, **kept).model_copy(update={"trained": True})

    monkeypatch.setattr(distill, "_train", helps)
    copied, counted = [], []
    for layers in (2, 3):
        model = small_model("llama", num_hidden_layers=layers).bfloat16()
        save_small_model(model, tmp_path / f"{layers}")
        costs = counting["Costs"](torch.device("second:0"))
        with costs:
            prune(tmp_path / f"{layers}", chosen, calibration=tokens, out=tmp_path / f"out-{layers}",
                  device="second:0", dtype="bfloat16")  # fmt: skip
        copied.append(sum(costs.copied.values()))
        resolved = resolve(
            chosen, device="cuda", down_width=model.config.intermediate_size, tokens=(4, 40), distillation=4
        )
        found, _ = counting["counted_run"](model.to("meta"), resolved, tokens)
        counted.append(sum(found.copied.values()))
    expected = counted[1] - counted[0]
    # the arguments of the layer are not small where the layer is
    assert expected <= copied[1] - copied[0] < 1.08 * expected
