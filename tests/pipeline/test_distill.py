"""Distillation: its loss and its steps, what it leaves alone, where it is left out, and resumed runs."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from runs import (
    TOKENS,
    assert_patterns,
    assert_same_weights,
    interrupted,
    named_linears,
    one_shot,
    prune,
    saved_bytes,
    saved_tensors,
)
from small_checkpoints import save_small
from small_models import random_text, random_tokens, save_small_model, small_model
from torch.func import functional_call

import drot
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.manifest import read_manifest
from drot.cli import app as cli
from drot.config import QUALITIES, Recipe, RecoveryConfig, Sparsity, resolve
from drot.core.errors import UserError
from drot.core.events import silent
from drot.model.decoder import DecoderModel
from drot.pipeline import distill as module
from drot.pipeline import steps
from drot.pipeline.batches import DISTILL_HELD_OUT_SHARE, check_sequences, held_out_sequences, schedule
from drot.pipeline.context import RunContext
from drot.pipeline.kept_weights import BETAS
from drot.pipeline.memory import further_bytes
from drot.pipeline.tokens import trainable
from drot.pruning import prune_magnitude
from drot.reporting.demo import CALIBRATION

pytestmark = pytest.mark.slow

#: token ids of the training that `prune` takes
FURTHER = random_tokens(8, 40, seed=7)
HELD_OUT = held_out_sequences(len(FURTHER), DISTILL_HELD_OUT_SHARE)
#: a training of few steps that lowers the loss of a small model
QUICK = dict(distill_epochs=2, distill_lr=3e-3, distill_batch=2)


def recipe(mode="none", **fields):
    return one_shot(mode, **QUICK | fields)


def kl_of(dense, pruned, tokens):
    """The mean KL(dense ‖ pruned) of the next token, in fp64, by its definition."""
    with torch.no_grad():
        p, q = (model(tokens).logits.double().softmax(-1) for model in (dense, pruned))
    return float((p * (p / q).log()).sum(-1).mean())


@pytest.mark.parametrize(
    "fields",
    [
        dict(mode="none"),
        dict(mode="layer"),
        dict(mode="layer", hessians="dense", boundary="residual"),
        dict(mode="shared", sparsity="0.5"),
    ],
    ids=["none", "input", "residual", "shared"],
)
def test_the_record_holds_the_kl_of_the_held_out_sequences(fields, tmp_path):
    """Of both models as transformers computes them: so every basis is right."""
    dense, tokens = small_model("qwen2"), FURTHER[-HELD_OUT:]
    before = prune(small_model("qwen2"), recipe(**fields | {"distill_epochs": 0})).model
    result = prune(small_model("qwen2"), recipe(**fields), out=tmp_path / "out")
    record = result.manifest.distillation
    assert record.kl_before == pytest.approx(kl_of(dense, before, tokens), rel=2e-3)
    assert record.trained == (record.kl_after < record.kl_before)
    if record.trained:
        assert record.kl_after == pytest.approx(kl_of(dense, result.model, tokens), rel=2e-3)
    loaded = drot.load(tmp_path / "out", device="cpu")
    assert torch.equal(loaded(tokens).logits, result.model(tokens).logits)
    assert_patterns(loaded, recipe(**fields).pruning)
    assert read_manifest(tmp_path / "out").distillation == record
    assert result.manifest.seconds.phases["distill"] > 0


@pytest.mark.parametrize("keeps", [False, True])
def test_the_steps_are_those_of_adam_on_the_kl_of_the_whole_model(keeps):
    """Against an Adam on vectors of the kept weights, in fp64, through transformers' own forward pass."""
    dense, pruned = (small_model("llama", dtype=torch.float64, num_hidden_layers=2) for _ in range(2))
    for linear in named_linears(pruned).values():
        linear.weight.copy_(prune_magnitude(linear.weight, Sparsity.parse("2:4")).weight)
    names = [
        name for name, _ in pruned.named_parameters() if name.endswith(("proj.weight", "layernorm.weight"))
    ]
    start = {name: value.detach().clone() for name, value in pruned.named_parameters()}
    kept = {name: start[name] != 0 for name in names}
    vectors = {name: start[name][kept[name]].clone().requires_grad_() for name in names}
    scales = {name: float(vector.detach().square().mean().sqrt()) for name, vector in vectors.items()}
    adam = torch.optim.Adam([{"params": [vector]} for vector in vectors.values()], betas=BETAS)
    trained = len(FURTHER) - HELD_OUT
    generator = torch.Generator().manual_seed(0)
    step, steps = 0, QUICK["distill_epochs"] * math.ceil(trained / 2)
    for _ in range(QUICK["distill_epochs"]):
        for batch in torch.randperm(trained, generator=generator).split(2):
            weights = {n: torch.zeros_like(start[n]).masked_scatter(kept[n], vectors[n]) for n in names}
            found = functional_call(pruned, weights, (FURTHER[batch],)).logits.log_softmax(-1)
            wanted = dense(FURTHER[batch]).logits.log_softmax(-1)
            adam.zero_grad()
            (wanted.exp() * (wanted - found)).sum().backward()
            for group, scale in zip(adam.param_groups, scales.values(), strict=True):
                group["lr"] = QUICK["distill_lr"] * scale * schedule(step, steps)
            adam.step()
            step += 1
    chosen = resolve(recipe(), tokens=tuple(TOKENS.shape), distillation=len(FURTHER))
    run = RunContext(pruned, chosen, TOKENS, torch.device("cpu"), silent, distill_tokens=FURTHER)
    stream = CalibrationStream.embed(DecoderModel(dense), FURTHER, run.device)
    for layer in DecoderModel(dense).layers:
        stream.advance(layer)
    record = module._train(run, stream, None, keeps=keeps)
    assert record.trained and record.kl_after < record.kl_before and record.passes == QUICK["distill_epochs"]
    for name, value in pruned.named_parameters():
        if name in kept:
            torch.testing.assert_close(value[kept[name]], vectors[name].detach(), rtol=1e-7, atol=1e-9)
        else:
            assert torch.equal(value, start[name])


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "opt", "qwen3_next"])
def test_other_families(family):
    dense, chosen = small_model(family), recipe("layer", distill_epochs=1, down_rotation="auto")
    result = prune(small_model(family), chosen)
    record = result.manifest.distillation
    before = prune(small_model(family), chosen.replace(distill_epochs=0)).model
    assert record.kl_before == pytest.approx(kl_of(dense, before, FURTHER[-HELD_OUT:]), rel=5e-3)
    if record.trained:
        assert record.kl_after == pytest.approx(kl_of(dense, result.model, FURTHER[-HELD_OUT:]), rel=5e-3)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_streamed_run_writes_what_a_run_in_memory_holds(format, tmp_path):
    model = save_small(tmp_path / "model", "llama-biased")
    chosen = recipe("layer", sparsity="2:4")
    written = prune(model, chosen, out=tmp_path / "out", format=format).manifest
    inside = prune(drot.load(model, device="cpu"), chosen, out=tmp_path / "inside", format=format).manifest
    assert saved_bytes(tmp_path / "out") == saved_bytes(tmp_path / "inside")
    assert written.distillation == inside.distillation
    assert written.format == format and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_finished_training_is_not_repeated(format, tmp_path, monkeypatch):
    chosen, model = recipe("layer", sparsity="2:4"), save_small(tmp_path / "model", "llama")
    prune(model, chosen, out=tmp_path / "whole", format=format)
    interrupted(model, chosen, out=tmp_path / "out", at=("save",), format=format)
    monkeypatch.setattr(module, "_train", lambda *args, **kept: pytest.fail("it trained again"))
    manifest = prune(model, chosen, out=tmp_path / "out", format=format, resume=True).manifest
    assert saved_bytes(tmp_path / "whole") == saved_bytes(tmp_path / "out")
    assert manifest.distillation.kl_after is not None


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("damaged", ["distilled_layer_00001", "layer_00001"])
def test_after_damage_it_is_trained_again(damaged, format, tmp_path, caplog):
    chosen, model = recipe("layer", sparsity="2:4"), save_small(tmp_path / "model", "llama")
    prune(model, chosen, out=tmp_path / "whole", format=format)
    interrupted(model, chosen, out=tmp_path / "out", at=("save",), format=format)
    file = tmp_path / "out.partial" / f"{damaged}.safetensors"
    content = bytearray(file.read_bytes())
    content[-100:] = bytes(100)
    file.write_bytes(content)
    prune(model, chosen, out=tmp_path / "out", format=format, resume=True)
    assert saved_bytes(tmp_path / "whole") == saved_bytes(tmp_path / "out")
    assert f"{damaged}.safetensors" in caplog.text and "it is computed again" in caplog.text


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_resumed_model_in_memory_has_the_trained_weights(format, tmp_path):
    chosen = recipe("layer", sparsity="2:4")
    whole = prune(small_model("llama"), chosen, out=tmp_path / "whole", format=format)
    interrupted(small_model("llama"), chosen, out=tmp_path / "out", at=("save",), format=format)
    resumed = prune(small_model("llama"), chosen, out=tmp_path / "out", format=format, resume=True)
    assert_same_weights(resumed.model, whole.model)


def test_a_resumed_run_may_train_with_other_settings(tmp_path, monkeypatch):
    chosen, other = recipe("layer"), recipe("layer", distill_lr=1e-3, distill_epochs=1)
    prune(small_model("llama"), other, out=tmp_path / "whole")
    for phase in ("distill", "save"):
        out = tmp_path / phase
        interrupted(small_model("llama"), chosen, out=out, at=(phase, 0, 0))
        monkeypatch.setattr(steps, "prune_layer", lambda *args, **given: pytest.fail("it pruned again"))
        prune(small_model("llama"), other, out=out, resume=True)
        monkeypatch.undo()
        assert saved_bytes(tmp_path / "whole") == saved_bytes(out)
        assert read_manifest(out).recipe.recovery.distill_epochs == 1
    with pytest.raises(UserError, match="distill_lr"):  # the result of a finished run is what it is
        prune(small_model("llama"), chosen, out=out, resume=True)


@pytest.mark.parametrize("epochs", [0, 1])
def test_routers_in_fp32_are_not_rounded(epochs, tmp_path):
    """In a run that computes in 16 bits, as on a GPU."""
    folder = save_small_model(small_model("glm4_moe"), tmp_path / "model")
    prune(folder, recipe(distill_epochs=epochs), out=tmp_path / "out", dtype="bfloat16")
    tensors = saved_tensors(tmp_path / "out")
    routers = [tensor for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")]
    assert routers and not any(torch.equal(one, one.bfloat16().float()) for one in routers)


@pytest.mark.parametrize("room", [2**20, 2**40])
def test_buffers_keep_their_dtype(room, monkeypatch, tmp_path):
    """The bias of the router of some mixtures is fp32 in a bf16 model."""
    monkeypatch.setattr(module, "available_memory", lambda: room)
    model = small_model("glm4_moe", dtype=torch.bfloat16)
    (name, before), *_ = [(n, b.clone()) for n, b in model.named_buffers() if n.endswith("correction_bias")]
    prune(model, recipe(), out=tmp_path / "out")
    after = saved_tensors(tmp_path / "out")[name]
    assert after.dtype == before.dtype == torch.float32 and torch.equal(after, before)


def test_without_memory_the_pruned_weights_stay_and_it_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "available_memory", lambda: 2**20)
    result = prune(small_model("llama"), recipe("layer"), out=tmp_path / "out")
    without = prune(small_model("llama"), recipe("layer", distill_epochs=0))
    assert_same_weights(result.model, without.model)
    record = read_manifest(tmp_path / "out").distillation
    assert record.left_out.startswith("that takes about ") and record.kl_before is None
    before, after = (message for message in caplog.messages if record.left_out in message)
    assert before.startswith("the kept weights of all layers will not be trained together: ")
    assert before.endswith("`recover=block` trains those of each layer alone")
    assert after == f"the kept weights are not trained towards the dense model: {record.left_out}"


@pytest.mark.parametrize(("family", "mode"), [("llama", "layer"), ("qwen3_moe", "none")])
def test_layers_that_are_computed_again_give_the_same_bytes(family, mode, monkeypatch):
    chosen, seen = recipe(mode, down_rotation="auto"), []
    train = module._train

    def spy(*args, keeps):
        seen.append(keeps)
        return train(*args, keeps=keeps)

    monkeypatch.setattr(module, "_train", spy)
    kept = prune(small_model(family), chosen)
    needed = module._needed
    monkeypatch.setattr(module, "_needed", lambda run, keeps=False: 2**60 if keeps else needed(run))
    again = prune(small_model(family), chosen)
    assert seen == [True, False]
    assert_same_weights(again.model, kept.model)


def test_a_training_that_does_not_help_changes_nothing(caplog):
    result = prune(small_model("llama"), recipe(distill_lr=1.0))
    record = result.manifest.distillation
    assert record.kl_after > record.kl_before and not record.trained
    assert_same_weights(result.model, prune(small_model("llama"), recipe(distill_epochs=0)).model)
    assert "the distillation raised the loss on held-out sequences" in caplog.text


def test_a_small_rise_on_few_held_out_sequences_undoes_nothing(monkeypatch):
    monkeypatch.setattr(module, "HARM", 2**20)
    result = prune(small_model("llama"), recipe(distill_lr=1.0))
    record = result.manifest.distillation
    assert record.kl_after > record.kl_before and record.trained
    without = prune(small_model("llama"), recipe(distill_epochs=0)).model.state_dict()
    assert any(not torch.equal(tensor, without[name]) for name, tensor in result.model.state_dict().items())


def test_a_training_that_diverges_leaves_the_pruned_weights(tmp_path, capsys):
    """The run was long, and its layers are good: they are not lost for a rate that is too high."""
    result = prune(small_model("llama"), recipe(distill_lr=1e30), out=tmp_path / "out")
    record = read_manifest(tmp_path / "out").distillation
    assert not record.trained and record.kl_after is None and record.kl_before > 0
    assert cli.run(["info", str(tmp_path / "out")]) == 0
    assert "diverged, so the weights stayed as they were pruned" in " ".join(capsys.readouterr().out.split())
    assert_same_weights(result.model, prune(small_model("llama"), recipe(distill_epochs=0)).model)


def test_bfloat16_weights_add_up_small_steps():
    chosen = recipe(distill_lr=6e-4, distill_epochs=8)
    pruned, trained = (
        prune(small_model("llama", dtype=torch.bfloat16), chosen.replace(distill_epochs=epochs)).model
        for epochs in (0, 8)
    )
    a, b = (model.model.layers[0].mlp.up_proj.weight for model in (pruned, trained))
    large = a.abs() > 0.1
    assert torch.equal(a == 0, b == 0) and float((a != b)[large].float().mean()) > 0.2


def test_one_sequence_is_too_few():
    with pytest.raises(UserError, match="`distill_epochs` needs at least 2 calibration sequences"):
        prune(chosen=recipe(), distillation=FURTHER[:1])


def test_token_ids_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="as long as `calibration` has, 40 tokens; got 39"):
        prune(chosen=recipe(), distillation=FURTHER[:, 1:])
    with pytest.raises(UserError, match="token ids must be in"):
        prune(chosen=recipe(), distillation=FURTHER + 1000)
    with pytest.raises(UserError, match="`distillation` needs `calibration`"):
        drot.prune(small_model("llama"), recipe(), distillation=FURTHER)


def test_without_token_ids_of_its_own_it_is_left_out_and_the_recipe_says_so(caplog):
    """On the tokens that the pruning has read there is little to learn."""
    result = prune(chosen=recipe(), distillation=None)
    assert result.manifest.recipe.recovery.distill_epochs == 0 and result.manifest.distillation is None
    assert "that needs other token ids than the calibration, as `distillation`" in caplog.text


@pytest.mark.parametrize("count", [None, 3])
def test_of_a_text_it_takes_other_sequences(count, tmp_path, monkeypatch):
    model, seen = save_small(tmp_path / "model", "llama"), []
    train = module._train
    monkeypatch.setattr(
        module, "_train", lambda run, *rest, **kept: seen.append(run) or train(run, *rest, **kept)
    )
    chosen = recipe(nsamples=4, seqlen=24, source=CALIBRATION.source, distill_nsamples=count)
    manifest = drot.prune(model, chosen, device="cpu").manifest
    (run,) = seen
    assert run.tokens.shape == (4, 24) and run.distill_tokens.shape == (count or 12, 24)
    rows = {tuple(row.tolist()) for row in (*run.tokens, *run.distill_tokens)}
    assert len(rows) == 4 + (count or 12)
    assert manifest.recipe.recovery.distill_nsamples == (count or 12)
    assert manifest.distillation.passes == QUICK["distill_epochs"]


def test_fewer_token_ids_than_the_recipe_asks_for_are_read_repeatedly(monkeypatch):
    """They take no more memory than they are."""
    train, seen = module._train, []
    monkeypatch.setattr(
        module, "_train", lambda run, *rest, **kept: seen.append(run) or train(run, *rest, **kept)
    )
    found = prune(chosen=recipe(distill_nsamples=2 * len(FURTHER)), distillation=FURTHER).manifest
    assert found.distillation.passes == 2 * QUICK["distill_epochs"]
    (run,) = seen
    assert further_bytes(run.sizes, run.recipe, torch.float32) == 4 * FURTHER.numel() * run.sizes.state


def test_a_repeated_run_of_a_short_text_draws_the_same_sequences(tmp_path, caplog):
    """The manifest had the number that was found, and a repeat found fewer of fewer."""
    model = save_small(tmp_path / "model", "llama")
    (tmp_path / "text.txt").write_text(random_text(330))
    chosen = recipe(nsamples=12, seqlen=24, source=str(tmp_path / "text.txt"))
    first = drot.prune(model, chosen, out=tmp_path / "first", device="cpu").manifest
    assert "of 36 sequences for the training of all layers, so each pass reads them 3 times" in caplog.text
    assert first.recipe.recovery.distill_nsamples == 36 and first.distillation.trained is not None
    assert first.distillation.passes == 3 * QUICK["distill_epochs"]
    repeated = Recipe.from_file(tmp_path / "first")
    again = drot.prune(model, repeated, out=tmp_path / "again", device="cpu").manifest
    assert again.identity["distillation"] == first.identity["distillation"]
    assert again.distillation == first.distillation
    first_tensors, tensors = (saved_tensors(tmp_path / name) for name in ("first", "again"))
    assert_same_weights(tensors, first_tensors)


@pytest.mark.parametrize(
    ("field", "value"), [("distill_epochs", -1), ("distill_lr", 0.0), ("distill_batch", 0)]
)
def test_wrong_settings_are_refused(field, value):
    with pytest.raises(UserError, match=f"`{field}`"):
        RecoveryConfig(**{field: value})


def test_best_trains_all_layers_together():
    assert [quality for quality, fields in QUALITIES.items() if fields["distill_epochs"]] == ["best"]


def test_a_dry_run_counts_its_memory_and_a_report_names_it(tmp_path, capsys):
    model = save_small(tmp_path / "model", "llama")
    options = ["--distill-epochs", "1", "--device", "cpu", "--seqlen", "32", "--rotation", "none"]
    assert cli.run(["prune", str(model), "--dry-run", *options]) == 0
    assert "training together" in capsys.readouterr().out
    out = str(tmp_path / "out")
    prune(model, recipe(), out=out)
    assert cli.run(["info", out]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "trained together for 2 epochs, lr 0.003" in shown and "on held-out sequences" in shown
    assert cli.run(["prune", str(model), "--out", "x", "--distill-lr", "0.1"]) == 2
    assert "--distill-lr has no effect with --distill-epochs 0" in capsys.readouterr().err


def test_it_trains_on_all_sequences_but_those_that_are_held_out():
    seen = []
    prune(small_model("llama"), recipe(distill_epochs=1), progress=lambda event: seen.append(event))
    steps = [event for event in seen if event.phase == "distill" and event.steps]
    trained = len(FURTHER) - HELD_OUT
    assert len(steps) == steps[-1].steps == math.ceil(trained / 2)
    assert all(math.isfinite(event.loss) for event in steps)


@pytest.mark.parametrize(("count", "ranks", "enough"), [(17, 16, True), (16, 16, False), (1, 1, False)])
def test_each_rank_trains_a_sequence_beside_those_that_are_held_out(count, ranks, enough):
    assert trainable(count, count, ranks) == (count if enough else 0)
    alike = SimpleNamespace(size=ranks)
    with nullcontext() if enough else pytest.raises(UserError, match="because it holds some out"):
        check_sequences(count, "distill_epochs", "distill_nsamples", alike, DISTILL_HELD_OUT_SHARE)


def test_a_text_that_is_too_short_is_recorded(tmp_path):
    """All its sequences overlap those of the calibration."""
    folder = save_small_model(small_model("llama"), tmp_path / "dense")
    (tmp_path / "short.txt").write_text(random_text(30))
    chosen = recipe().replace(source=str(tmp_path / "short.txt"), nsamples=3, seqlen=24, distill_epochs=1)
    manifest = drot.prune(folder, chosen, out=tmp_path / "out", device="cpu").manifest
    assert manifest.recipe.recovery.distill_epochs == 0
    assert manifest.distillation.left_out.startswith("the text has too few sequences")
