"""`drot sample`: a calibration text that the model writes itself."""

import json
import shutil

import pytest
import torch

import drot
from drot.checkpoint.load import load, load_tokenizer
from drot.cli import app as cli
from drot.config import CalibrationConfig
from drot.reporting.demo import MODEL
from drot.serving.own_text import _batches
from drot.text.source import load_calibration

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


def test_every_token_is_told(tmp_path):
    """Of two batches: a batch of a large model takes minutes."""
    events = []
    drot.sample(MODEL, tmp_path / "own.jsonl", tokens=34 * 4, seqlen=4, device="cpu", progress=events.append)
    told = [event.step for event in events if event.phase == "sample"]
    assert told == [64, 96, 128, 132, 134, 136]
    assert {event.steps for event in events if event.phase == "sample"} == {136}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--seqlen", "1"], "--seqlen must be at least 2"),
        (["--seqlen", "100000"], "--seqlen must be at most"),
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
