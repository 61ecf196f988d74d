"""The memory of a fine-tuning in full, which is said or refused before it begins."""

import pytest
import torch
from small_models import random_tokens, small_model

import drot
from drot import FinetuneConfig
from drot.core.errors import UserError
from drot.finetuning import memory
from drot.finetuning.masks import choose_full, removed_weights

CPU = torch.device("cpu")


def test_the_least_is_what_a_step_keeps():
    """Weights, gradients, Adam's moments and masks of a real step, without its activations."""
    model = small_model("llama-biased").float()
    said = memory.full_memory(model)
    masks = removed_weights(model)
    choose_full(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = random_tokens(2, 16)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    moments = [moment for state in optimizer.state.values() for moment in state.values() if moment.dim()]
    gradients = [parameter.grad for parameter in trained]
    assert said == sum(t.nbytes for t in (*model.parameters(), *gradients, *moments, *masks.values()))


def test_a_device_that_is_too_small_is_refused_before_the_training(tmp_path, monkeypatch, caplog):
    recipe = drot.Recipe().replace(mode="none", method="magnitude")
    pruned = drot.prune(small_model("llama"), recipe, calibration=random_tokens(2, 16), device="cpu")
    pruned.model.save_pretrained(tmp_path)
    needed = memory.full_memory(pruned.model)

    def train(*args, **options):
        raise InterruptedError

    monkeypatch.setattr("drot.finetuning.run.run_finetuning", train)
    config, tokens = FinetuneConfig(full=True, held_out=2), random_tokens(4, 16)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    with pytest.raises(UserError, match="`full` needs at least .* kB of memory on cpu, which has .* kB"):
        drot.finetune(tmp_path, config, tokens=tokens, device="cpu")
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    with pytest.raises(InterruptedError):
        drot.finetune(tmp_path, config, tokens=tokens, device="cpu")
    assert "a training of all kept weights takes at least" in caplog.text
