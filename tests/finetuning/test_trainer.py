"""A checkpoint of drot in transformers' Trainer: its zeros, and what drot.json says of the result."""

import json
import logging

import pytest
import torch
from made_manifests import made_evaluation, write_card
from runs import assert_same_weights, saved_tensors
from small_models import random_tokens, small_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import drot
from drot import PruningConfig, Recipe, RotationConfig, UserError
from drot.checkpoint.manifest import update_manifest
from drot.checkpoint.records import EvaluationRecord
from drot.cli import app as cli

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A rotated 2:4 checkpoint with a recorded perplexity of 5.25. Tests must not change it."""
    folder = tmp_path_factory.mktemp("trainer") / "pruned"
    recipe = Recipe(
        rotation=RotationConfig(steps=1),
        pruning=PruningConfig(method="magnitude", solve="none", target="self"),
    )
    model = small_model("llama", num_hidden_layers=2)
    drot.prune(model, recipe, calibration=random_tokens(2, 16), device="cpu", out=folder)
    entry = EvaluationRecord.model_validate(made_evaluation({"wiki.txt": 5.25}))
    update_manifest(folder, lambda manifest: manifest.evaluations.append(entry))
    write_card(folder)
    return folder


def trained(folder, out, callbacks=(), warmup_steps=0, **options):
    """The folder `out`, where a Trainer saved the model in `folder` after 4 steps."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(8, 16)]
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, warmup_steps=warmup_steps,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[*callbacks], **options)
    trainer.train()
    trainer.save_model(str(out))
    return out


def zero_shares(folder):
    """(layer, role) → share of zeros, counted in the state dict of the loaded model."""
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return {
        (int(name.split(".")[2]), name.split(".")[4]): float((tensor == 0).double().mean())
        for name, tensor in state.items()
        if name.endswith("_proj.weight")
    }


def recorded_shares(folder):
    layers = json.loads((folder / "drot.json").read_text())["layers"]
    return {(each["layer"], role): r["sparsity"] for each in layers for role, r in each["linears"].items()}


def test_rotations_that_would_be_trained_are_refused(evaluated):
    """They would no longer be orthogonal, and no program could open the result."""
    model = drot.load(evaluated, device="cpu", dtype="float32").requires_grad_(True)
    for name in ("down_rotation", "residual_rotation"):
        with pytest.raises(UserError, match=f"{name}.weight must stay as it is, orthogonal"):
            drot.KeepMask().on_train_begin(None, None, None, model=model)
        for part, parameter in model.named_parameters():
            if name in part:
                parameter.requires_grad_(False)
    callback = drot.KeepMask()
    callback.on_train_begin(None, None, None, model=model)
    callback.on_train_end(None, None, None)


def test_a_training_that_fills_the_zeros_is_said(evaluated, tmp_path, caplog, capsys):
    out = trained(evaluated, tmp_path / "out")
    warning = next(r.message for r in caplog.records if r.name == "drot" and "other weights" in r.message)
    assert "drot.KeepMask" in warning and "evaluations in drot.json are dropped" in warning
    manifest = json.loads((out / "drot.json").read_text())
    assert manifest["sparsity"] < 0.01 and "evaluations" not in manifest and manifest["saved_again"]
    assert recorded_shares(out) == pytest.approx(zero_shares(out))
    card = (out / "README.md").read_text()
    assert "5.250" not in card and "other weights" in card and f"{manifest['sparsity']:.1%}" in card
    assert cli.run(["info", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "50.00%" not in shown and "5.25" not in shown and "saved again" in shown
    assert "5.250" in (evaluated / "README.md").read_text()  # the original keeps its figures


def test_under_keep_mask_the_zeros_stay(evaluated, tmp_path, caplog):
    out = trained(evaluated, tmp_path / "out", [drot.KeepMask()])
    assert recorded_shares(out) == zero_shares(out) == zero_shares(evaluated)
    manifest = json.loads((out / "drot.json").read_text())
    assert manifest["sparsity"] == 0.5 and manifest["saved_again"] and "evaluations" not in manifest
    message = next(r.message for r in caplog.records if r.name == "drot" and "other weights" in r.message)
    assert "KeepMask" not in message
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (evaluated, out))
    kept = before.model.layers[0].mlp.up_proj.weight != 0
    assert not torch.equal(
        before.model.layers[0].mlp.up_proj.weight[kept], after.model.layers[0].mlp.up_proj.weight[kept]
    )


@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_a_model_that_is_only_saved_again_keeps_its_figures(evaluated, tmp_path, caplog, size):
    """In whichever files: a run writes a file for each layer."""
    caplog.set_level(logging.INFO, "drot")
    AutoModelForCausalLM.from_pretrained(evaluated).save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or size == "20KB"
    manifest = json.loads((tmp_path / "drot.json").read_text())
    assert manifest["evaluations"] and "saved_again" not in manifest
    assert "5.250" in (tmp_path / "README.md").read_text() and not caplog.records


def test_shards_of_another_state_dict_are_counted(tmp_path):
    """FSDP gives `save_pretrained` the weights as a state dict; the model holds others or none."""
    model = small_model("llama", num_hidden_layers=2)
    plain = Recipe(rotation=RotationConfig(mode="none"), pruning=PruningConfig(method="magnitude"))
    drot.prune(model, plain, calibration=random_tokens(2, 16), device="cpu", out=tmp_path / "pruned")
    model = drot.load(tmp_path / "pruned", device="cpu")
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "out", state_dict=state, max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert set(recorded_shares(tmp_path / "out").values()) == {0.0}


def test_packed_zeros_are_counted(evaluated, tmp_path):
    from drot.checkpoint.convert import convert

    convert(evaluated, tmp_path / "packed", "packed")
    manifest = json.loads((tmp_path / "packed" / "drot.json").read_text())
    assert manifest["evaluations"] and "saved_again" not in manifest  # the same weights in another format
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.values[:, ::2] = 0
    model.save_pretrained(tmp_path / "out")
    shares = recorded_shares(tmp_path / "out")
    assert shares.pop((1, "o_proj")) == 0.75 and set(shares.values()) == {0.5}


def test_keep_mask_refuses_what_it_cannot_keep(evaluated, tmp_path):
    class Drifting(torch.optim.SGD):
        """Moves weights without a gradient too."""

        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(0.1 * group["lr"])

    for warmup in (0, 1):  # with a warm-up the first step has a rate of 0
        with pytest.raises(UserError, match="the optimiser moves weights whose gradient is 0"):
            trained(
                evaluated, tmp_path / "out", [drot.KeepMask()], warmup_steps=warmup,
                optimizer_cls_and_kwargs=(Drifting, {"lr": 1e-2}),
            )  # fmt: skip
    model = small_model("llama").requires_grad_(False)
    with pytest.raises(UserError, match="moves none of them"):
        drot.KeepMask().on_train_begin(None, None, None, model=model)


def test_a_fine_tuned_model_that_is_saved_has_its_own_manifest(evaluated, tmp_path):
    config = drot.FinetuneConfig(full=True, held_out=2, batch_size=2, lr=1e-3)
    tokens = random_tokens(8, 16)
    result = drot.finetune(evaluated, config, tokens=tokens, device="cpu", out=tmp_path / "tuned")
    result.model.save_pretrained(tmp_path / "again")
    second = json.loads((tmp_path / "again" / "drot.json").read_text())
    assert len(second["finetune"]) == 1 and "evaluations" not in second and "saved_again" not in second
    assert_same_weights(saved_tensors(tmp_path / "tuned"), saved_tensors(tmp_path / "again"))
