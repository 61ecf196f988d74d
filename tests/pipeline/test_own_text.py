"""A calibration text that the model writes itself, by `drot sample` and in a run."""

import json
import shlex
import shutil

import pytest
import runs
import torch
from small_models import random_text, save_small_model, small_model
from transformers import LlamaConfig

import drot
from drot.checkpoint.load import load, load_tokenizer
from drot.checkpoint.manifest import read_manifest
from drot.cli import app as cli
from drot.config import CalibrationConfig
from drot.pipeline.own_text import _batch, _batches
from drot.pipeline.sizes import without_weights
from drot.reporting.demo import MODEL
from drot.text.source import calibration_hash, load_calibration

pytestmark = pytest.mark.slow

NARROW = {"do_sample": True, "top_k": 2, "temperature": 0.3, "repetition_penalty": 1.5, "eos_token_id": 1}


def test_the_text_is_calibration_and_repeats_by_its_seed(tmp_path, capsys):
    texts = {}
    for name, seed in {"one": 0, "again": 0, "other": 1}.items():
        out = tmp_path / f"{name}.jsonl"
        before = torch.get_rng_state()
        arguments = ["--tokens", "70", "--seqlen", "32", "--seed", str(seed), "--device", "cpu"]
        assert cli.run(["sample", str(MODEL), "--out", str(out), *arguments]) == 0
        assert torch.equal(torch.get_rng_state(), before)
        texts[name] = out.read_text()
        assert f"--calibration TEXT,{out}" in capsys.readouterr().out
    assert texts["one"] == texts["again"] != texts["other"]
    rows = [json.loads(line)["text"] for line in texts["one"].splitlines()]
    assert len(set(rows)) == 3  # 70 tokens in rows of 32
    settings = CalibrationConfig(source=str(tmp_path / "one.jsonl"), nsamples=2, seqlen=32)
    assert load_calibration(settings, load_tokenizer(MODEL)).shape == (2, 32)


def test_the_next_command_is_one_for_a_shell(tmp_path, capsys):
    model, out = tmp_path / "a model", tmp_path / "my own.jsonl"
    shutil.copytree(MODEL, model)
    arguments = ["--tokens", "8", "--seqlen", "8", "--device", "cpu"]
    assert cli.run(["sample", str(model), "--out", str(out), *arguments]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command == ["drot", "prune", str(model), "--calibration", f"TEXT,{out}", "--out", "DIR"]


def test_tokens_have_the_probabilities_of_the_model(tmp_path):
    """The surprise of drawn tokens is the entropy of their distributions, whatever a chat model narrows."""
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(NARROW))
    model, tokenizer = load(tmp_path / "model", device="cpu", dtype="float32"), load_tokenizer(MODEL)
    assert model.generation_config.top_k == 2
    ids = torch.cat(list(_batches(model, tokenizer, 40, 48, 0)))
    assert ids.shape == (40, 48)
    assert len(ids[:, 0].unique()) > 30 and not set(ids[:, 0].tolist()) & set(tokenizer.all_special_ids)
    with torch.no_grad():
        log_p = model(ids).logits[:, :-1].double().log_softmax(-1)
    surprise = -log_p.gather(-1, ids[:, 1:, None])[..., 0]
    excess = surprise + (log_p.exp() * log_p).sum(-1)  # of mean 0, whatever came before
    assert abs(float(excess.mean())) < 4 * float(excess.std()) / excess.numel() ** 0.5


def test_a_tokenizer_with_more_tokens_than_the_model(made, monkeypatch):
    model, tokenizer = load(made / "model", device="cpu"), load_tokenizer(made / "model")
    rows = model.config.vocab_size
    tokenizer.add_tokens([f"<{number}>" for number in range(9 * rows)])
    ids = torch.cat(list(_batches(model, tokenizer, 40, 2, 0)))
    assert ids.max() < rows <= len(tokenizer) // 9


def test_every_token_is_told(tmp_path):
    """Of two batches: a batch of a large model takes minutes."""
    events = []
    drot.sample(MODEL, tmp_path / "own.jsonl", tokens=34 * 4, seqlen=4, device="cpu", progress=events.append)
    told = [event.step for event in events if event.phase == "sample"]
    assert told == [64, 96, 128, 132, 134, 136]
    assert {event.steps for event in events if event.phase == "sample"} == {136}


@pytest.mark.parametrize(("gigabytes", "sequences"), [(1, 1), (24, 32), (80, 256), (141, 512), (1000, 512)])
def test_a_gpu_writes_as_many_sequences_as_its_memory_holds(monkeypatch, gigabytes, sequences):
    """Of LLaMA-3-8B in bf16: 16 GB of weights, 67 MB of keys and values for each sequence of 512."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip
    model = without_weights(config)
    monkeypatch.setattr("drot.pipeline.own_text.is_gpu", lambda device: True)
    monkeypatch.setattr("drot.pipeline.own_text.total_memory", lambda device: gigabytes * 10**9)
    assert model.dtype == torch.bfloat16 and _batch(model, 512) == sequences


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--seqlen", "1"], "--seqlen must be at least 2"),
        (["--seqlen", "100000"], "--seqlen must be at most"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 18446744073709551615; got -1"),
        (["--seed", str(2**64)], "--seed must be a whole number from 0 to 18446744073709551615; got 1844"),
        (["--out", "text.txt"], "--out must end in .jsonl"),
    ],
)
def test_what_is_refused(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["sample", str(MODEL), "--out", "own.jsonl", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_replaced_and_a_broken_model_writes_none(tmp_path):
    out = tmp_path / "own.jsonl"
    out.write_text("kept")
    with pytest.raises(drot.UserError, match="exists"):
        drot.sample(MODEL, out)
    assert out.read_text() == "kept"
    model = load(MODEL, device="cpu")
    model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "broken")
    load_tokenizer(MODEL).save_pretrained(tmp_path / "broken")
    with pytest.raises(drot.UserError):
        drot.sample(tmp_path / "broken", tmp_path / "none.jsonl", tokens=8, seqlen=8, device="cpu")
    assert not list(tmp_path.glob("none*"))


# ---- in a run ----------------------------------------------------------------------------------------

OWN = "own_text.jsonl"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small model and a text."""
    folder = tmp_path_factory.mktemp("own")
    save_small_model(small_model("llama"), folder / "model")
    (folder / "text.txt").write_text(random_text(2000))
    return folder


def recipe(folder=None, **fields):
    source = "own" if folder is None else f"{folder}/text.txt,own"
    return runs.one_shot(**{"source": source, "nsamples": 4, "seqlen": 48, "steps": 2} | fields)


def prune(folder, out=None, chosen=None, **options):
    return drot.prune(folder / "model", chosen or recipe(), out=out, device="cpu", **options)


def rows_of(folder):
    return [json.loads(line)["text"] for line in (folder / OWN).read_text().splitlines()]


def cut_off_after_the_text(folder, out):
    runs.interrupted(folder / "model", recipe(), out=out, at=("tokenize",), calibration=None)


def test_a_run_reads_half_of_its_tokens_from_the_model(made, tmp_path):
    """In sequences that follow each other, beside as many at random places of the other text."""
    chosen = recipe(made)
    result = prune(made, tmp_path / "out", chosen)
    assert result.manifest.recipe.calibration.source == chosen.calibration.source
    assert OWN in read_manifest(tmp_path / "out").files
    tokenizer = load_tokenizer(made / "model")
    whole = tokenizer("\n\n".join(rows_of(tmp_path / "out")), add_special_tokens=False).input_ids
    other = load_calibration(chosen.replace(source=f"{made}/text.txt", nsamples=2).calibration, tokenizer)
    both = torch.stack([other[0], torch.tensor(whole[:48]), other[1], torch.tensor(whole[48:96])])
    assert result.manifest.calibration.sha256 == calibration_hash(both)
    other = prune(made, tmp_path / "other", recipe(made, seed=1))
    assert other.manifest.calibration.shape == [4, 48] and rows_of(tmp_path / "other") != rows_of(
        tmp_path / "out"
    )


def test_a_tenth_more_is_written_than_a_run_reads(made, tmp_path, monkeypatch):
    """Also for the training of all layers together, whose sequences hold other text."""
    monkeypatch.setattr("drot.pipeline.own_text.SEQLEN", 32)
    chosen = recipe(made, distill_epochs=1, nsamples=8, seqlen=40, distill_nsamples=4)
    result = prune(made, tmp_path / "out", chosen)
    assert len(rows_of(tmp_path / "out")) == 9  # 1.1 * (4 + 2) * 40 / 32
    assert result.manifest.recipe.recovery.distill_nsamples == 4 and result.manifest.distillation


def test_a_sampled_file_is_read_as_the_text_of_the_run(made, tmp_path, monkeypatch, caplog):
    """In sequences that follow each other: at random places the training of all layers found half as many."""
    monkeypatch.setattr("drot.pipeline.own_text.SEQLEN", 32)
    drot.sample(made / "model", tmp_path / "own.jsonl", tokens=9 * 32, seqlen=32, device="cpu")
    fields = dict(distill_epochs=1, nsamples=8, seqlen=40, distill_nsamples=4)
    sources = (f"{made}/text.txt,own", f"{made}/text.txt,{tmp_path}/own.jsonl")
    results = [
        prune(made, tmp_path / str(i), recipe(source=each, **fields)) for i, each in enumerate(sources)
    ]
    assert rows_of(tmp_path / "0") == [
        json.loads(line)["text"] for line in (tmp_path / "own.jsonl").read_text().splitlines()
    ]
    own, sampled = (result.manifest for result in results)
    assert own.calibration.sha256 == sampled.calibration.sha256
    assert own.identity["distillation"] == sampled.identity["distillation"]
    assert "beside the calibration the text has" not in caplog.text


def test_the_text_is_written_once(made, tmp_path):
    """Neither a run that goes on nor one that was finished writes it again."""
    phases = []

    def stop(event):
        phases.append(event.phase)
        if (event.phase, event.layer) == ("prune", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(made, tmp_path / "out", progress=stop)
    text = rows_of(tmp_path / "out.partial")
    assert "sample" in phases
    with pytest.raises(drot.UserError, match="unfinished run"):
        prune(made, tmp_path / "out")
    phases.clear()
    for _ in range(2):
        result = prune(made, tmp_path / "out", resume=True, progress=lambda e: phases.append(e.phase))
        assert rows_of(tmp_path / "out") == text
    assert "sample" not in phases and "prune" in phases and result.finished_before
    prune(made, tmp_path / "whole")
    assert runs.saved_bytes(tmp_path / "whole") == runs.saved_bytes(tmp_path / "out")


def test_a_run_that_ends_after_the_text_goes_on_with_it(made, tmp_path):
    cut_off_after_the_text(made, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out.partial").iterdir()] == [OWN]
    phases = []
    prune(made, tmp_path / "out", resume=True, progress=lambda event: phases.append(event.phase))
    assert "sample" not in phases and not (tmp_path / "out.partial").exists()


def test_a_run_that_reads_another_text_does_not_keep_it(made, tmp_path):
    cut_off_after_the_text(made, tmp_path / "out")
    other = recipe().replace(source=f"{made}/text.txt")
    prune(made, tmp_path / "out", other, resume=True)
    assert OWN not in {file.name for file in (tmp_path / "out").iterdir()}


def test_a_run_of_another_text_is_told_so_before_the_model_writes_one(made, tmp_path):
    phases, other = [], recipe().replace(source=f"{made}/text.txt")
    runs.interrupted(made / "model", other, out=tmp_path / "out", calibration=None)
    for chosen, line in (
        (recipe(), f"it has no {OWN}, so its run read another text"),
        (recipe(seed=1), "calibration.seed: 0 in the unfinished run, 1 now; repeat the settings"),
    ):
        with pytest.raises(drot.UserError, match=line):
            prune(made, tmp_path / "out", chosen, resume=True, progress=lambda e: phases.append(e.phase))
    assert not {"sample", "tokenize", "load"} & set(phases)


@pytest.mark.parametrize("changes", [dict(seed=1), dict(model=True), dict(damaged=True)])
def test_a_text_of_another_run_is_written_again(made, tmp_path, caplog, changes):
    """A run that ended before its first layer left its text, and no journal that says what run it was."""
    text, source = tmp_path / "out.partial" / OWN, made
    cut_off_after_the_text(made, tmp_path / "out")
    if changes.pop("model", False):
        shutil.copytree(made, source := tmp_path / "made")
    if changes.pop("damaged", False):
        text.write_bytes(b"[]\n" + text.read_bytes())
    prune(source, tmp_path / "out", recipe(source, **changes), resume=True)
    assert "of another model or of other settings: it is written again" in caplog.text
    prune(source, tmp_path / "new", recipe(source, **changes))
    assert runs.saved_bytes(tmp_path / "new") == runs.saved_bytes(tmp_path / "out")


def test_a_loaded_model_writes_and_keeps_its_generation_config(made):
    model = load(made / "model", device="cpu")
    before = model.generation_config
    result = drot.prune(model, recipe(), tokenizer=load_tokenizer(made / "model"), device="cpu")
    assert result.manifest.calibration.shape == [4, 48]
    assert model.generation_config is before


def test_a_model_that_the_memory_does_not_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("drot.pipeline.own_text.available_memory", lambda: 20_000_000)
    with pytest.raises(
        drot.UserError, match=r"the whole model in main memory, 27\.\d MB, and 20\.0 MB are free"
    ):
        drot.prune(MODEL, recipe(), out=tmp_path / "out", device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_model_that_gives_no_probabilities_leaves_nothing(made, tmp_path):
    model = load(made / "model", device="cpu")
    model.model.norm.weight.data.fill_(3e38)
    model.save_pretrained(tmp_path / "broken")
    load_tokenizer(made / "model").save_pretrained(tmp_path / "broken")
    with pytest.raises(drot.UserError, match="in place of probabilities"):
        drot.prune(tmp_path / "broken", recipe(), out=tmp_path / "out", device="cpu")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["broken"]


def test_a_gpu_that_gives_no_probabilities_names_no_cause(made, tmp_path, monkeypatch):
    def generate(*args, **options):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("transformers.LlamaForCausalLM.generate", generate)
    with pytest.raises(drot.UserError, match="in place of probabilities"):
        drot.prune(made / "model", recipe(), out=tmp_path / "out", device="cpu")


def test_only_a_run_knows_own(made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["prune", str(MODEL), "--calibration", "own", "--dry-run", "--device", "cpu"]) == 0
    prune(made, tmp_path / "out")
    assert cli.run(["finetune", "out", "--text", "own", "--out", "tuned"]) == 2
    assert "no such name and no file" in capsys.readouterr().err.splitlines()[-1]
