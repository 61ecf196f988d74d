"""The command line: the output on stdout and stderr, the exit status, and a run from prune to eval."""

import json
import math

import pytest
import torch
from command_output import one_line
from made_manifests import made_manifest

import drot
from drot.cli import app as cli
from drot.cli import tables
from drot.config import Recipe
from drot.demo.demo import HELD_OUT, MODEL
from drot.pipeline import prune as pipeline


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
    for text in ("sparsegpt 2:4", "1 -> 0.2", "900 -> 800", "50.0%", "0.0100", "Saved to some-folder"):
        assert text in out


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
    told = f"the finished layers lie in {out}.partial; to go on, give the same command with --resume"
    assert one_line(capsys.readouterr().err) == (
        f"drot: interrupted: {told if finished else 'no layer was finished, and nothing is kept'}\n"
    )


def test_the_facts_of_a_run_name_what_was_chosen_by_itself(calls, capsys):
    recipe = Recipe()
    changes = {
        "positions": 512,
        "untied_lm_head": True,
        "compute_dtype": "float32",
        "dtype": "bfloat16",
        "calibration": {"sha256": "0", "shape": [128, 512]},
    }
    tables.print_manifest(made_manifest(recipe, **changes))
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "c4, 128 x 512 tokens (all that the model reads), seed 0",
        "bfloat16 (computed in float32)",
        "lm_head untied from the embedding",
    ):
        assert text in shown
    tables.print_manifest(made_manifest(recipe, calibration={"sha256": "0", "shape": [0, 1]}))
    shown = capsys.readouterr().out
    assert "none: magnitude pruning without a rotation needs no text" in " ".join(shown.split())
    assert "lm_head" not in shown and "computed in" not in shown


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


def test_info_of_a_path_that_is_not_a_folder(capsys, tmp_path):
    (tmp_path / "drot.json").write_text("{}")
    for path, reason in ((tmp_path / "drot.json", "is a file"), (tmp_path / "no", "does not exist")):
        assert cli.run(["info", str(path)]) == 2
        assert f"{path} {reason}: name the folder" in one_line(capsys.readouterr().err)


def test_json_has_no_infinity(monkeypatch, capsys):
    """JSON has no Infinity and no NaN: a figure that is not finite is null."""
    text = {"tokens": 9, "windows": 1, "split": None, "sha256": "0"}
    figures = {"model": "m", "seqlen": 8, "perplexity": {"a": math.inf, "b": math.nan}, "tasks": {"t": 0.5}}
    figures |= {
        "texts": {"a": text, "b": text},
        "averages": {},
        "against": None,
        "agreement": {},
        "streamed": False,
    }
    figures |= {"dtype": "float32", "machine": "cpu"}
    figures |= {"task_details": {"t": {"metric": "acc", "fewshot": 0, "stderr": math.nan}}}
    monkeypatch.setattr("drot.evaluation.evaluate.evaluate", lambda models, **options: [figures])
    assert cli.run(["eval", "m", "--json"]) == 0
    out = capsys.readouterr().out
    got = json.loads(out, parse_constant=pytest.fail)
    assert got["perplexity"] == {"a": None, "b": None} and got["tasks"] == {"t": 0.5}
    assert got["task_details"]["t"]["stderr"] is None
    assert cli.run(["eval", "m"]) == 0
    assert "inf" in capsys.readouterr().out
