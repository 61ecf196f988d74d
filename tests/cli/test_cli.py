"""The command line: the output on stdout and stderr, the exit status, and a run from prune to eval."""

import json
import math
import re
import shlex
import time
from pathlib import Path

import pytest
import torch
from command_output import one_line
from made_manifests import made_manifest
from small_checkpoints import save_small
from small_models import random_text, save_small_model, small_model
from together import started_drot

import drot
from drot.cli import app as cli
from drot.cli.output import print_json, print_manifest
from drot.config import Recipe
from drot.pipeline import prune as pipeline
from drot.reporting.demo import HELD_OUT, MODEL


def test_json_is_all_there_is_on_stdout(calls, capsys, tmp_path):
    assert cli.run(["prune", "m", "--out", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data == {"out": str(tmp_path), **json.loads(json.dumps(made_manifest(Recipe()).to_dict()))}
    assert "a library prints to stdout" in captured.err
    assert "layer 0 (1 of 1): pruning" in captured.err


def test_table(calls, capsys):
    assert cli.run(["prune", "m", "--out", "some-folder"]) == 0
    out = capsys.readouterr().out
    for text in (
        "sparsegpt 2:4",
        "1 → 0.2",
        "900 → 800",
        "50.0%",
        "0.0100",
        "Saved to some-folder",
        "  drot eval some-folder --against m  # ",
    ):
        assert text in out


@pytest.mark.slow
def test_the_end_of_a_run_says_what_to_do_next(capsys, tmp_path):
    """Each command runs as it is printed, with a text of the user in place of TEXT.txt."""
    recipe = Recipe().replace(steps=2, solve="none", target="self")
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    dense = small_model("llama", tie_word_embeddings=True, num_hidden_layers=1)
    save_small_model(dense, tmp_path / "model")
    (tmp_path / "text.txt").write_text(random_text(900))
    out = tmp_path / "a folder"
    arguments = [
        "--recipe",
        tmp_path / "recipe.json",
        "--calibration",
        tmp_path / "text.txt",
        "--nsamples",
        2,
        "--seqlen",
        32,
    ]
    assert cli.run(["prune", *map(str, [tmp_path / "model", "--out", out, *arguments])]) == 0
    shown = capsys.readouterr().out
    commands = re.findall(r"^  drot (.*)  # ", shown, re.MULTILINE)
    assert [line.split()[0] for line in commands] == ["eval", "report", "convert"]
    pytest.importorskip("matplotlib", reason="a report needs matplotlib")
    for line in commands:
        assert line.endswith(" --ppl TEXT.txt --seqlen 32") == line.startswith("eval")
        assert cli.run(shlex.split(line.replace("TEXT.txt", str(tmp_path / "text.txt")))) == 0, line
    assert any((tmp_path / "a folder-packed").glob("model*.safetensors"))


@pytest.mark.parametrize("arguments", [["prune"], ["prune", "m"], ["nothing"], ["info", "a", "b"]])
def test_wrong_arguments(capsys, arguments):
    assert cli.run(arguments) == 2
    one_line(capsys.readouterr().err)


def test_missing_model(capsys, tmp_path):
    assert cli.run(["prune", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")]) == 2
    assert "nothing" in one_line(capsys.readouterr().err)
    assert cli.run(["info", str(tmp_path)]) == 2
    assert "drot.json" in one_line(capsys.readouterr().err)


def test_a_fault_of_ours(monkeypatch, capsys):
    def prune(*args, **options):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr(pipeline, "prune", prune)
    assert cli.run(["prune", "m", "--out", "o"]) == 1
    assert one_line(capsys.readouterr().err) == "drot: RuntimeError: first second (--debug shows where)\n"
    assert cli.run(["prune", "m", "--out", "o", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_prints_interrupted(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("drot.machine.environment.collect", interrupt)
    assert cli.run(["info"]) == 130
    assert capsys.readouterr().err == "drot: interrupted\n"


@pytest.mark.parametrize("finished", [False, True])
def test_ctrl_c_in_a_run_says_how_to_go_on(monkeypatch, capsys, tmp_path, finished):
    out = tmp_path / "out"

    def interrupt(*args, **kwargs):
        if finished:
            (tmp_path / "out.partial").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "prune", interrupt)
    assert cli.run(["prune", "m", "--out", str(out)]) == 130
    told = f"what was finished lies in {out}.partial; to go on, give the same command with --resume"
    assert one_line(capsys.readouterr().err) == (
        f"drot: interrupted: {told if finished else 'no layer was finished, and nothing is kept'}\n"
    )


@pytest.mark.slow
def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path, capsys):
    """The message and the status of `kill`, `docker stop` and job schedulers; the run can be resumed."""
    out = tmp_path / "out"
    model = save_small(tmp_path / "model", num_hidden_layers=6)
    options = ["--calibration", str(HELD_OUT), "--nsamples", "8", "--seqlen", "64", "--steps", "20"]
    options += ["--quality", "fast"]
    arguments = ["prune", str(model), "--out", str(out), "--device", "cpu", *options]
    run = started_drot(arguments, tmp_path)
    while run.is_alive() and not list(tmp_path.glob("out.partial/layer_*.safetensors")):
        time.sleep(0.01)
    run.terminate()
    run.join()
    told = (tmp_path / "stderr").read_text()
    assert run.exitcode == 143, told
    assert told.splitlines()[-1] == (
        f"drot: interrupted: what was finished lies in {out}.partial; to go on, give the same command with "
        "--resume"
    )
    assert cli.run([*arguments, "--resume", "--json"]) == 0
    told = capsys.readouterr().err
    assert "layer 0 (1 of 6): pruning" not in told
    assert "the interrupted run finished " in told


def test_the_facts_of_a_run_name_what_was_chosen_by_itself(calls, capsys):
    recipe = Recipe()
    changes = {
        "positions": 512,
        "untied_lm_head": True,
        "compute_dtype": "float32",
        "dtype": "bfloat16",
        "calibration": {"sha256": "0", "shape": [128, 512]},
    }
    print_manifest(made_manifest(recipe, **changes))
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "c4, 128 x 512 tokens (all that the model reads), seed 0",
        "boundary rotations, R3 in front of down_proj), bfloat16",
        "10.0 s on cpu, computed in float32",
        "lm_head untied from the embedding",
    ):
        assert text in shown
    print_manifest(made_manifest(recipe, calibration={"sha256": "0", "shape": [0, 1]}))
    shown = capsys.readouterr().out
    assert "none: magnitude pruning without a rotation needs no text" in " ".join(shown.split())
    assert "lm_head" not in shown


@pytest.mark.slow
def test_prune_eval_info_for_real(capsys, tmp_path):
    """The embedded model, pruned without a rotation: the folder, its manifest and its perplexity."""
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text(HELD_OUT.read_text(encoding="utf-8")[:8000], encoding="utf-8")
    options = ["--rotation", "none", "--calibration", str(HELD_OUT), "--nsamples", "4", "--seqlen", "64"]
    assert cli.run(["prune", str(MODEL), "--out", str(out), "--device", "cpu", *options, "--json"]) == 0
    pruned = json.loads(capsys.readouterr().out)
    assert pruned["sparsity"] == pytest.approx(0.5, abs=1e-3)

    assert cli.run(["info", str(out), "--json"]) == 0
    assert {"out": str(out), **json.loads(capsys.readouterr().out)} == pruned

    assert cli.run(["eval", str(out), "--ppl", str(text), "--seqlen", "64", "--device", "cpu", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    model = drot.load(out, device="cpu").double()
    from transformers import AutoTokenizer

    ids = torch.tensor(AutoTokenizer.from_pretrained(MODEL)(text.read_text()).input_ids)
    losses = [model(row[None], labels=row[None]).loss for row in ids[: len(ids) // 64 * 64].reshape(-1, 64)]
    assert figures["perplexity"][str(text)] == pytest.approx(
        float(torch.stack(losses).mean().exp()), rel=1e-4
    )
    assert cli.run(["prune", str(MODEL), "--out", str(out), *options]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_info(capsys):
    assert cli.run(["info", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["drot"] == drot.__version__ and data["torch"] == torch.__version__
    assert "cpu" in data["backends"] and len(data["gpus"]) == torch.cuda.device_count()
    assert cli.run(["info"]) == 0
    assert torch.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--debug"]])
def test_no_command_prints_the_help(capsys, arguments):
    assert cli.run(arguments) == 0
    captured = capsys.readouterr()
    assert "Usage: drot" in captured.out and captured.err == ""


def test_info_says_in_words_what_it_found(monkeypatch, capsys):
    from drot.machine import environment

    gpu = {"name": "H200", "capability": "9.0", "memory_gib": 139.8}
    of_cuda = {
        "cuda": {"compiled": "12.8", "architectures": ["9.0", "12.0+PTX"], "torch": "12.8"},
        "cusparselt": {"found": False, "version": None, "compiled": "0.7.1"},
        "gpus": [gpu],
    }
    found = environment.collect()
    monkeypatch.setattr(environment, "collect", lambda: found | of_cuda)
    assert cli.run(["info"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "CUDA kernels built with CUDA 12.8 for 9.0, 12.0+PTX",
        "cuSPARSELt torch has none that starts, drot was built with 0.7.1",
        "GPUs H200 (compute capability 9.0, 139.8 GiB)",
    ):
        assert words in shown
    without = {"cuda": of_cuda["cuda"] | {"compiled": None}, "no_cuda_reason": "torch is a CPU build"}
    monkeypatch.setattr(environment, "collect", lambda: found | without)
    assert cli.run(["info"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "CUDA kernels none, because torch is a CPU build" in shown and "cuSPARSELt" not in shown


def test_info_of_a_path_that_is_not_a_folder(capsys, tmp_path):
    (tmp_path / "drot.json").write_text("{}")
    for path, message in (
        ("drot.json", "drot.json is a file: name a folder"),
        ("no", "there is no such folder"),
    ):
        assert cli.run(["info", str(tmp_path / path)]) == 2
        assert message in one_line(capsys.readouterr().err)


def test_json_has_no_infinity(capsys):
    """JSON has no Infinity and no NaN: a figure that is not finite is null."""
    print_json({"a": math.inf, "b": [{"c": math.nan}, 0.5], "file": Path("x")})
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown == {"a": None, "b": [{"c": None}, 0.5], "file": "x"}
