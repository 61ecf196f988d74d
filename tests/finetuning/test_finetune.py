"""drot.finetune: the zeros that stay, the written files, the record, the refusals and the command line."""

import dataclasses
import functools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from runs import saved_bytes
from small_checkpoints import save_small
from small_models import random_tokens, save_small_model, small_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as its_logging

import drot
from drot import CalibrationConfig, FinetuneConfig, PruningConfig, Recipe, RotationConfig
from drot.checkpoint.convert import convert
from drot.checkpoint.load import load_model, load_tokenizer
from drot.checkpoint.manifest import accept_files, read_any_manifest, read_manifest
from drot.cli import app as cli
from drot.cli.commands import imported
from drot.config import FINETUNE_LR, default_seqlen
from drot.core.errors import UserError
from drot.finetuning import finetune as module
from drot.finetuning.distillation import load_dense
from drot.ops import nm_mask
from drot.reporting.demo import CALIBRATION, HELD_OUT, MODEL
from drot.sparse.linear import is_packed
from drot.sparse.packed import unpack_model

pytestmark = pytest.mark.slow

#: kind of checkpoint → arguments of drot.prune
KINDS = {
    "dense": dict(rotation=RotationConfig(mode="none")),
    "rotated": dict(rotation=RotationConfig(steps=2)),
    "residual": dict(rotation=RotationConfig(steps=2, hessians="dense", boundary="residual")),
    "packed": dict(rotation=RotationConfig(mode="none"), format="packed"),
    "packed-rotated": dict(rotation=RotationConfig(steps=2), format="packed"),
    "packed-mixed": dict(
        rotation=RotationConfig(mode="none"), format="packed", keep=("layers.0.mlp.down_proj",)
    ),
}
#: settings with which a few steps change every linear, LoRA's B included
QUICK = dict(lr=1e-2, batch_size=2, held_out=2, warmup_steps=0)


def tokens():
    return random_tokens(10, 24)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A function that returns the 2:4 checkpoint of a kind and a dtype. Tests must not change it."""
    folder = tmp_path_factory.mktemp("pruned")

    @functools.cache
    def made(kind, dtype):
        options = dict(KINDS[kind])
        recipe = Recipe(
            rotation=options.pop("rotation"),
            pruning=PruningConfig(method="magnitude", sparsity="2:4", keep=options.pop("keep", ())),
        )
        model, out = small_model("llama-biased", dtype=dtype, num_hidden_layers=2), folder / f"{kind}-{dtype}"
        drot.prune(model, recipe, calibration=tokens()[:4], device="cpu", out=out, **options)
        return out

    return lambda kind="dense", dtype=torch.bfloat16: made(kind, dtype)


@pytest.mark.parametrize("keep_adapter", [False, True])
def test_a_disk_without_space_for_the_result_is_found_before_the_training(
    pruned, tmp_path, monkeypatch, keep_adapter
):
    """Afterwards the training would be lost."""
    folder = pruned()
    usage = shutil.disk_usage(tmp_path)._replace(free=2**24)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(
        "drot.finetuning.run.run_finetuning", lambda *args, **options: pytest.fail("it trained")
    )
    config = FinetuneConfig(keep_adapter=keep_adapter, **QUICK)
    with pytest.raises(UserError, match="make room"):
        drot.finetune(folder, config, tokens=tokens(), device="cpu", out=tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def tensors(folder):
    """The tensors of a checkpoint, with packed weights made dense."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if is_packed(model):
        unpack_model(model)
    return model.state_dict()


def run(folder, out, **settings):
    return drot.finetune(folder, FinetuneConfig(**(QUICK | settings)), out=out, tokens=tokens(), device="cpu")


@pytest.mark.parametrize(
    ("kind", "full"),
    [
        *(("dense", False), ("rotated", True), ("residual", False), ("packed", True)),
        *(("packed-rotated", False), ("packed-mixed", False)),
    ],
)
def test_the_result_is_of_the_same_kind_with_the_same_zeros(pruned, tmp_path, kind, full):
    folder = pruned(kind)
    result = run(folder, tmp_path / "out", full=full)
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        pruned_linear = name.endswith("_proj.weight")
        trained = pruned_linear or (full and name.endswith(("norm.weight", "_proj.bias")))
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(weight, after[name]) != trained, name
        if pruned_linear:
            assert torch.equal(weight == 0, after[name] == 0), name
            kept = kind == "packed-mixed" and name == "model.layers.0.mlp.down_proj.weight"
            assert int((weight == 0).sum()) == (0 if kept else weight.numel() // 2)
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out")]
    assert configs[0] == configs[1]
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "out").iterdir()}
    saved, loaded = drot.load(folder, device="cpu"), drot.load(tmp_path / "out", device="cpu")
    assert is_packed(saved) == is_packed(loaded) == kind.startswith("packed")
    torch.testing.assert_close(result.model(tokens()).logits, loaded(tokens()).logits, atol=0.05, rtol=0.05)
    assert read_manifest(tmp_path / "out") == result.manifest


def test_the_record(pruned, tmp_path):
    folder = pruned("rotated")
    first = run(folder, tmp_path / "one", epochs=2).manifest
    second = run(tmp_path / "one", tmp_path / "two", full=True, lr=1e-4).manifest
    own = {"finetune", "files", "digest"}
    assert second.model_dump(exclude=own) == read_manifest(folder).model_dump(exclude=own)
    assert second.finetune[0] == first.finetune[0] and len(second.finetune) == 2
    lora, full = second.finetune
    assert (lora.start, full.start) == (str(folder), str(tmp_path / "one"))
    assert (lora.steps, full.steps, lora.processes) == (8, 4, 1)
    assert (lora.settings.warmup_steps, lora.settings.lr, lora.settings.text.seqlen) == (0, 1e-2, 24)
    assert (lora.settings.method, full.settings.method) == ("lora", "full")
    assert lora.text.shape == [8, 24] and lora.held_out.shape == [2, 24]
    assert [step for step, _ in lora.loss_curve] == list(range(1, 9))
    assert lora.loss_curve[-1][1] < lora.loss_curve[0][1]
    assert {"drot", "torch", "transformers", "python", "peft", "accelerate"} <= lora.versions.keys()
    assert lora.machine["threads"] == torch.get_num_threads()
    for record in second.finetune:
        assert record.held_out.perplexity_after == pytest.approx(math.exp(record.held_out.loss_after))
        assert not any(part.model_extra for part in (record, record.text, record.held_out))
    # the second run started from the file of the first, so the figures agree
    assert full.held_out.loss_before == pytest.approx(lora.held_out.loss_after, rel=1e-6)


def test_the_figures_are_of_the_written_model(pruned, tmp_path):
    """The held-out loss is measured after the merge and the rounding, not before."""
    folder = pruned()
    held_out = run(folder, tmp_path / "out").manifest.finetune[-1].held_out
    for path, figure in ((folder, "loss_before"), (tmp_path / "out", "loss_after")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        rows = tokens()[-2:]
        assert float(model(rows, labels=rows).loss.detach()) == pytest.approx(
            getattr(held_out, figure), rel=1e-5
        )


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_the_same_command_gives_the_same_bytes(pruned, tmp_path, full):
    folder = pruned()
    for name in ("one", "two"):
        torch.manual_seed(ord(name[0]))
        before = torch.get_rng_state()
        run(folder, tmp_path / name, full=full)
        assert torch.equal(torch.get_rng_state(), before)
    assert saved_bytes(tmp_path / "one") == saved_bytes(tmp_path / "two")


def test_gradient_checkpointing_and_accumulation_change_no_weight_by_more_than_rounding(pruned):
    folder = pruned("residual", torch.float32)
    plain = run(folder, None, lr=1e-3, dropout=0.0).model
    for settings in (dict(gradient_checkpointing=True), dict(batch_size=1, accumulation=2)):
        other = run(folder, None, lr=1e-3, dropout=0.0, **settings).model
        for one, two in zip(plain.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3)


def test_a_kept_adapter_opens_with_peft_on_top_of_the_pruned_model(pruned, tmp_path, capsys):
    from peft import PeftModel

    folder = pruned("rotated")
    result = run(folder, tmp_path / "adapter", keep_adapter=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = model(tokens()).logits
    opened = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    torch.testing.assert_close(opened(tokens()).logits, result.model(tokens()).logits)
    assert not torch.allclose(opened(tokens()).logits, base, atol=1e-3)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert cli.run(["info", str(tmp_path / "adapter")]) == 0
    assert f"an adapter for peft on top of {folder}" in " ".join(capsys.readouterr().out.split())


def test_an_adapter_says_that_it_needs_its_model_and_is_not_sparse(pruned, tmp_path, capfd):
    folder, out = pruned("rotated"), tmp_path / "adapter"
    before = its_logging.get_verbosity()
    its_logging.set_verbosity_warning()  # the default, which other tests may have changed
    run(folder, out, keep_adapter=True)
    assert its_logging.get_verbosity() == its_logging.WARNING
    its_logging.set_verbosity(before)
    assert "using a model of type" not in capfd.readouterr().err
    text = (out / "README.md").read_text()
    assert "A LoRA adapter for a pruned model" in text and "together are not sparse" in text
    assert "a model that was loaded in Python, with 50.0% of the weights" in text
    assert 'pruned = AutoModelForCausalLM.from_pretrained("PRUNED_MODEL")' in text
    assert 'PeftModel.from_pretrained(pruned, "adapter")' in text
    assert str(folder) not in text and "More Information Needed" not in text  # as in peft's own card
    data = ModelCard(text).data.to_dict()
    assert data["library_name"] == "peft" and data["tags"] == ["drot", "lora"] and "base_model" not in data
    with pytest.raises(UserError, match=f"holds an adapter, and the sparse weights lie in {folder}"):
        drot.export_artifact(out, tmp_path / "a.drot")
    assert cli.run(["eval", str(out), "--ppl", str(HELD_OUT)]) == 2
    told = capfd.readouterr().err
    assert "not sparse: repeat drot finetune without --keep-adapter" in told
    assert "merge_and_unload" not in told and told.count("\n") == 1


def elsewhere(folder, share=0.5):
    """A model that another program pruned: zeros, and no manifest."""
    model = small_model("qwen3", num_hidden_layers=2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.masked_fill_(torch.rand_like(weight) < share, 0)
    model.save_pretrained(folder)
    return folder


def test_a_model_that_another_program_pruned(tmp_path, capsys):
    folder, out = elsewhere(tmp_path / "pruned"), tmp_path / "out"
    run(folder, out)
    before, after = tensors(folder), tensors(out)
    assert all(torch.equal(before[name] == 0, after[name] == 0) for name in before)
    assert cli.run(["info", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "pruning by another program" in shown and "fine-tuning LoRA r 8, lr 0.01, 4 steps" in shown
    assert "linears set to zero by another program." in (out / "README.md").read_text()
    run(out, tmp_path / "again")
    assert len(read_any_manifest(tmp_path / "again").finetune) == 2
    with pytest.raises(UserError, match="was pruned by another program and fine-tuned by drot"):
        drot.prune(out)
    with pytest.raises(UserError, match=r"holds no drot.json, and 2.\d% of the linear weights"):
        run(elsewhere(tmp_path / "dense", share=0.02), tmp_path / "refused")


def test_a_model_that_another_program_pruned_is_packed_after_its_fine_tuning(tmp_path):
    model = small_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.masked_fill_(nm_mask(weight.abs(), 2, 4), 0)
    model.save_pretrained(tmp_path / "pruned")
    run(tmp_path / "pruned", tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "packed", "packed")
    assert is_packed(drot.load(tmp_path / "packed", device="cpu"))


def test_a_fine_tuned_checkpoint_is_converted_with_its_record(pruned, tmp_path):
    run(pruned("rotated"), tmp_path / "out")
    manifest = convert(tmp_path / "out", tmp_path / "packed", "packed")
    assert manifest.format == "packed" and len(manifest.finetune) == 1


def test_a_rise_of_the_held_out_loss_is_logged(pruned, caplog):
    """The model learns to repeat one token, which the held-out rows do not hold."""
    rows = random_tokens(10, 24, vocab=90)
    rows[:-2] = 95
    result = drot.finetune(pruned(), FinetuneConfig(**QUICK, epochs=3), tokens=rows, device="cpu")
    held_out = result.manifest.finetune[-1].held_out
    assert held_out.loss_after > held_out.loss_before
    assert "the model is worse on the held-out text after the fine-tuning" in caplog.text


# ---- refusals ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(pruned):
    return pruned()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(rank=0), "`rank` must be a whole number of at least 1; got 0"),
        (dict(alpha=0), "`alpha` must be a finite number above 0; got 0"),
        (dict(dropout=1.0), "`dropout` must be a finite number of at least 0 and below 1; got 1.0"),
        (dict(lr=math.nan), "`lr` must be a finite number above 0; got nan"),
        (dict(held_out=0), "`held_out` must be a whole number of at least 1; got 0"),
        (dict(warmup_steps=-1), "`warmup_steps` must be a whole number of at least 0; got -1"),
        (dict(full=True, keep_adapter=True), "`full` trains no adapter"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError, match=message):
        FinetuneConfig(**settings)


def test_nothing_is_written_after_a_refusal(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"the training diverged: the loss is nan with `lr`, 1e\+30: lower"):
        run(folder, out, lr=1e30)
    with pytest.raises(UserError, match="`rank` must be at most 32, the hidden size of this model; got 10"):
        run(folder, out, rank=10**30)
    with pytest.raises(UserError, match="must have more rows than `held_out`, 10; got 10"):
        run(folder, out, held_out=10)
    with pytest.raises(UserError, match="must be auto, cpu or cuda"):
        drot.finetune(folder, out=out, tokens=tokens(), device="tpu")
    with pytest.raises(UserError, match="holds no tokenizer"):
        drot.finetune(folder, out=out)
    with pytest.raises(UserError, match=r"must be in \[0, 96\), the model's vocabulary"):
        drot.finetune(folder, FinetuneConfig(held_out=1), out=out, tokens=tokens() + 90, device="cpu")
    with pytest.raises(UserError, match="is not an empty folder"):
        run(folder, folder)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_cannot_be_saved_is_refused_before_the_training(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("drot.finetuning.run.run_finetuning", None)
    settings, out = FinetuneConfig(held_out=1), tmp_path / "out"
    with pytest.raises(UserError, match="`tokenizer` must have a save_pretrained"):
        drot.finetune(folder, settings, tokens=tokens(), tokenizer=lambda text: None, out=out, device="cpu")
    assert not out.exists()


def test_a_damaged_model_is_refused(folder, tmp_path):
    folder = shutil.copytree(folder, tmp_path / "pruned")
    model = load_model(folder)
    model.model.norm.weight.data.fill_(1e38)  # finite, but not what follows from it
    model.save_pretrained(folder)
    accept_files(folder)
    with pytest.raises(
        UserError, match="the model's loss on the held-out text is (nan|inf): its weights are damaged"
    ):
        run(folder, tmp_path / "out")


def test_packed_weights_take_no_adapter(pruned, tmp_path):
    with pytest.raises(UserError, match="peft cannot open an adapter on packed weights"):
        run(pruned("packed"), tmp_path / "out", keep_adapter=True)


def test_a_quantised_model_is_refused(folder, tmp_path):
    folder = shutil.copytree(folder, tmp_path / "pruned")
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"this model is quantised \(GPTQ\)"):
        run(folder, tmp_path / "out")


@pytest.mark.parametrize(("full", "missing"), [(False, "accelerate and peft"), (True, "accelerate")])
def test_missing_packages_are_named(folder, monkeypatch, full, missing):
    find_spec = module.importlib.util.find_spec
    absent = lambda name, *rest: None if name in module.PACKAGES else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr(module.importlib.util, "find_spec", absent)
    with pytest.raises(
        UserError, match=f"fine-tuning needs the packages? {missing}: pip install 'accelerate>"
    ):
        run(folder, None, full=full)


def test_a_gpu_with_too_little_memory(folder, monkeypatch):
    def train(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("transformers.Trainer.train", train)
    with pytest.raises(UserError, match="too little memory for `batch_size`, 2, and .* `seqlen`, 24: lower"):
        run(folder, None)


def test_nothing_of_the_trainer_is_left(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    run(folder, tmp_path / "out")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "tmp"]
    assert not list((tmp_path / "tmp").iterdir())


# ---- against a dense model ---------------------------------------------------------------------------


def test_the_loss_is_the_divergence_from_the_dense_model(pruned, tmp_path):
    """The first point of the curve is that of the pruned model; the zeros stay; the divergence falls."""
    folder, dense = pruned("rotated", torch.float32), small_model("llama-biased", num_hidden_layers=2)
    dense.save_pretrained(tmp_path / "dense")
    settings = dict(full=True, against=str(tmp_path / "dense"), batch_size=8, lr=1e-3, epochs=20)
    found = run(folder, tmp_path / "out", **settings)
    rows = tokens()[:-2]

    def divergence(model):
        with torch.no_grad():
            p, q = (each(input_ids=rows).logits[:, :-1].double().softmax(-1) for each in (dense, model))
        return float((p * (p.log() - q.log())).sum(-1).mean())

    record = found.manifest.finetune[-1]
    before, after = divergence(drot.load(folder, device="cpu")), divergence(found.model)
    first, width = record.loss_curve[0][1], rows.shape[1]
    # transformers 5.4 divides a loss by the number of all tokens, later versions by those that are predicted
    assert any(first == pytest.approx(each, rel=1e-4) for each in (before, before * (width - 1) / width))
    assert after < 0.7 * before
    assert record.settings.against == settings["against"]
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert all(not after[name][value == 0].any() for name, value in before.items() if "_proj" in name)


def test_the_dense_model_may_be_packed(pruned, tmp_path):
    run(pruned("dense"), tmp_path / "out", against=str(pruned("packed")))


def test_a_configuration_of_accelerate_does_not_change_the_arithmetic(pruned, tmp_path, monkeypatch):
    plain = run(pruned("dense"), tmp_path / "plain", full=True).manifest.finetune[-1].loss_curve
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert run(pruned("dense"), tmp_path / "out", full=True).manifest.finetune[-1].loss_curve == plain


def test_a_dense_model_of_another_vocabulary_is_refused(pruned, tmp_path):
    small_model("llama-biased", vocab_size=64, num_hidden_layers=2).save_pretrained(tmp_path / "dense")
    with pytest.raises(UserError, match=r"`against` must be a model with the vocabulary of .* has 64"):
        run(pruned(), tmp_path / "out", against=str(tmp_path / "dense"))


def test_a_dense_model_with_another_tokenizer_is_refused(tmp_path):
    """Its ids name other words: the model would be trained towards nonsense."""
    model = small_model("llama", num_hidden_layers=1)
    save_small_model(model, tmp_path / "dense")
    sample, tokenizer = random_tokens(1, 30, vocab=20)[0], load_tokenizer(tmp_path / "dense")
    for other in (tokenizer, None, tokenizer.save_pretrained):  # the last has no `decode`
        load_dense(str(tmp_path / "dense"), model, other, sample)
    file = tmp_path / "dense" / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    first, second = (tokenizer.convert_ids_to_tokens(int(token)) for token in sample.unique()[:2])
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="`against` must have the tokenizer of the pruned model"):
        load_dense(str(tmp_path / "dense"), model, tokenizer, sample)


# ---- the command line --------------------------------------------------------------------------------


def test_every_field_has_an_option():
    options = {param.name for param in imported("finetune").params}
    names = {field.name for field in dataclasses.fields(FinetuneConfig)} - {"text"}
    names |= {field.name for field in dataclasses.fields(CalibrationConfig)} - {"source"}
    assert names | {"text"} <= options


def test_the_papers_settings_are_the_defaults():
    """The appendix "Compatibility with LoRA for Fine-Tuning Pruned Models" of the paper."""
    config = FinetuneConfig()
    assert (config.rank, config.alpha, config.dropout, config.resolved_lr) == (8, 32, 0.1, 2e-4)
    assert (config.weight_decay, config.resolved_warmup_steps(4096)) == (1e-2, 400)
    assert config.text == CalibrationConfig(source="wikitext2", nsamples=4096)
    assert config.text.seqlen is None and default_seqlen(4096) == 2048
    assert config.resolved_warmup_steps(50) == 5
    assert FinetuneConfig(full=True).resolved_lr == FINETUNE_LR["full"]


def test_a_warm_up_must_end_before_the_training():
    assert FinetuneConfig(warmup_steps=49).resolved_warmup_steps(50) == 49
    with pytest.raises(UserError, match=r"must be below the 50 steps of this training; got 50: lower it"):
        FinetuneConfig(warmup_steps=50).resolved_warmup_steps(50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--full", "--rank", "4"], "--rank has no effect with --full: leave one or the other out"),
        (["--full", "--keep-adapter"], "--full trains no adapter: leave out --full or --keep-adapter"),
        (["--text", "a.txt", "--text-column", "b"], "--text-column has no effect with a .txt file"),
        (["--text", "a.txt,b.txt", "--text-column", "b"], "--text-column has no effect with a .txt file"),
        (
            ["--text", "a.txt,b.jsonl", "--text-column", "b"],
            "--text must be c4, wikitext2, a dataset on the hub",
        ),
        (["--text", "a.txt,a.txt"], "--text with several texts must name each once"),
        (["--tokens", "10M", "--nsamples", "5"], "--tokens sets --nsamples: leave one or the other out"),
        (["--tokens", "3T"], "--tokens must be a number of tokens, as in 10M; got '3T'"),
        (["--tokens", "many"], "--tokens must be a number of tokens, as in 10M; got 'many'"),
        (["--tokens", "0"], "--tokens must be a number of tokens"),
        (["--text", "nothing.txt"], "--text must be c4, wikitext2, a dataset on the hub"),
        (["--held-out", "0"], "--held-out must be a whole number of at least 1; got 0"),
    ],
)
def test_mistakes_on_the_command_line(capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    for text in ("a.txt", "b.txt"):
        Path(text).touch()
    assert cli.run(["finetune", str(MODEL), "--out", str(tmp_path / "out"), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_the_command(capsys, tmp_path):
    """Pruned, fine-tuned on a file, shown by info, and measured by eval."""
    model, text = save_small(tmp_path / "model", head_dim=16), ["--nsamples", "4", "--seqlen", "64"]
    pruning = ["--rotation", "none", "--method", "magnitude", "--calibration", CALIBRATION.source, *text]
    assert cli.run(["prune", str(model), "--out", str(tmp_path / "p"), "--format", "packed", *pruning]) == 0
    capsys.readouterr()
    command = ["finetune", str(tmp_path / "p"), "--text", CALIBRATION.source, *text, "--held-out", "2"]
    assert cli.run([*command, "--out", str(tmp_path / "out"), "--json", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)["finetune"][0]
    assert record["steps"] == 4 and "fine-tuning, step 4 of 4, loss" in captured.err
    assert cli.run(["info", str(tmp_path / "out")]) == 0
    assert "fine-tuning LoRA r 8" in " ".join(capsys.readouterr().out.split())
    full = ["finetune", str(tmp_path / "p"), "--text", CALIBRATION.source, "--held-out", "2", "--full"]
    full += ["--tokens", "0.25K", "--seqlen", "64", "--out", str(tmp_path / "full"), "--device", "cpu"]
    assert cli.run(full) == 0
    assert "all kept weights, lr 5e-05, 4 steps, 4 x 64 tokens" in capsys.readouterr().out
    sample = tmp_path / "text.txt"
    sample.write_text(HELD_OUT.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    assert cli.run(["eval", str(tmp_path / "full"), "--ppl", str(sample), "--seqlen", "64"]) == 0


def test_two_processes_write_one_checkpoint(tmp_path):
    """torchrun with two processes, which exchange their gradients through gloo."""
    recipe = Recipe(rotation=RotationConfig(mode="none"), pruning=PruningConfig(method="magnitude"))
    folder = tmp_path / "pruned"
    drot.prune(
        load_model(MODEL),
        recipe,
        calibration=random_tokens(1, 8),
        tokenizer=load_tokenizer(MODEL),
        device="cpu",
        out=folder,
    )
    before = tensors(folder)
    command = [
        sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "-m", "drot", "finetune", str(folder), "--out", str(tmp_path / "out"), "--device", "cpu", "--json",
        "--text", CALIBRATION.source, "--nsamples", "4", "--seqlen", "32", "--held-out", "2", "--full",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)["finetune"][0]
    assert (record["processes"], record["steps"]) == (2, 2)
    after = tensors(tmp_path / "out")
    assert all(torch.equal(before[key] == 0, after[key] == 0) for key in before)
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[weight], after[weight])


@pytest.mark.parametrize("named", ["auto", "cuda", "cuda:1"])
def test_each_rank_takes_its_own_gpu(named, monkeypatch):
    """accelerate makes the GPU of a rank the current GPU, which `auto` then names."""
    monkeypatch.setattr(module, "pick_device", lambda device: torch.device("cuda:1"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if named == "cuda:1":
        with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
            module._pick_device(named)
    else:
        assert module._pick_device(named) == torch.device("cuda:1")
