"""The command line: what reaches the recipe, what lands on which stream, and the exit status."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import drot
from drot import cli, console, pipeline
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig, Sparsity
from drot.demo import HELD_OUT, MODEL
from drot.errors import UserError
from drot.progress import ProgressEvent


def manifest(recipe, **changes):
    layer = {
        "layer": 0,
        "linears": {"q": {"sparsity": 0.5, "output_error": 0.25, "damping": 0.01}},
        "seconds": 1.5,
        "rotation": {
            "loss_before": 0.4,
            "loss_after": 0.2,
            "entropy_before": 900.0,
            "entropy_after": 800.0,
        },
    }
    return {
        "recipe": recipe.to_dict(),
        "base_model": "someone/some-model",
        "rotations_file": None,
        "calibration": {"sha256": "0", "shape": [2, 8]},
        "sparsity": 0.5,
        "relative_logit_error": 1e-6,
        "stock_architecture": False,
        "dtype": "float32",
        "device": "cpu",
        "seconds": {"total": 2.0},
        "layers": [layer],
    } | changes


@pytest.fixture
def calls(monkeypatch):
    """What `drot prune` handed to the pipeline, which is not run."""
    seen = []

    def prune(model, recipe, **options):
        seen.append((model, recipe, options))
        print("a library prints to stdout")
        options["progress"](ProgressEvent(phase="prune", layer=0, layers=1))
        return pipeline.PruneResult(nn.Identity(), manifest(recipe), options["out"])

    monkeypatch.setattr(pipeline, "prune", prune)
    return seen


def one_line(text):
    assert text.count("\n") == 1 and text.startswith("drot: "), text
    return text


def test_defaults_are_those_of_the_recipe(calls, tmp_path):
    assert cli.run(["prune", "some-model", "--out", str(tmp_path / "out")]) == 0
    ((model, recipe, options),) = calls
    assert model == "some-model"
    assert recipe == Recipe()
    assert options["out"] == tmp_path / "out"
    assert (options["device"], options["dtype"], options["resume"]) == ("auto", "auto", False)
    assert options["rotations"] is None and options["save_rotations_to"] is None


def test_every_option_arrives(calls, tmp_path):
    text = (
        "prune m --out o --method wanda --sparsity 4:8 --rotation shared --objective entropy "
        "--optimizer paper --steps 7 --lr 0.5 --early-stop 0.1 --hessians dense --layers-per-step 2 "
        "--product-dtype bfloat16 "
        "--reference-compat --damping 0.1 --block-size 64 --calibration some.txt --nsamples 3 --seqlen 9 "
        "--seed 5 --text-column body --rotations r.st --save-rotations s.st --device cpu --dtype bfloat16 "
        "--resume --format packed"
    )
    assert cli.run(text.split()) == 0
    ((_, recipe, options),) = calls
    assert recipe == Recipe(
        rotation=RotationConfig(
            mode="shared",
            objective="entropy",
            optimizer="paper",
            steps=7,
            lr=0.5,
            early_stop=0.1,
            layers_per_step=2,
            hessians="dense",
            product_dtype="bfloat16",
            reference_compat=True,
        ),
        pruning=PruningConfig(method="wanda", sparsity=Sparsity.parse("4:8"), damping=0.1, block_size=64),
        calibration=CalibrationConfig(source="some.txt", nsamples=3, seqlen=9, seed=5, text_column="body"),
    )
    assert str(options["rotations"]) == "r.st" and str(options["save_rotations_to"]) == "s.st"
    assert (options["device"], options["dtype"], options["resume"]) == ("cpu", "bfloat16", True)
    assert options["layout"] == "packed"


@pytest.mark.parametrize("field", dataclasses.fields(Recipe))
def test_every_field_of_the_recipe_has_an_option(field):
    """A knob that is added to the configuration must be reachable from the command line."""
    import inspect

    renamed = {"mode": "rotation", "blocks": "rotation", "source": "calibration"}
    options = inspect.signature(cli.prune).parameters
    for knob in dataclasses.fields(field.default_factory):
        assert renamed.get(knob.name, knob.name) in options


@pytest.mark.parametrize(
    ("text", "mode", "blocks"), [("none", "none", 1), ("shared", "shared", 1), ("block:8", "layer", 8)]
)
def test_rotation(calls, text, mode, blocks):
    assert cli.run(["prune", "m", "--out", "o", "--rotation", text]) == 0
    rotation = calls[0][1].rotation
    assert (rotation.mode, rotation.blocks) == (mode, blocks)


def test_json_is_all_there_is_on_stdout(calls, capsys, tmp_path):
    assert cli.run(["prune", "m", "--out", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data == {"out": str(tmp_path), **json.loads(json.dumps(manifest(Recipe())))}
    assert "a library prints to stdout" in captured.err
    assert "layer 1/1: pruning" in captured.err


def test_table(calls, capsys):
    assert cli.run(["prune", "m", "--out", "some-folder"]) == 0
    out = capsys.readouterr().out
    for text in ("sparsegpt 2:4", "0.4 -> 0.2", "900 -> 800", "50.0%", "0.2500", "Saved to some-folder"):
        assert text in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "wandb"], "method must be one of magnitude, wanda, sparsegpt; got 'wandb'"),
        (["--rotation", "some"], "rotation must be one of none, layer, shared; got 'some'"),
        (["--rotation", "block:x"], "--rotation block:N needs a whole number of blocks; got 'block:x'"),
        (["--sparsity", "4:2"], "sparsity must be a ratio"),
        (["--steps", "many"], "'--steps'"),
        (["--no-such-option"], "--no-such-option"),
        (["--nsamples", "0"], "nsamples must be a finite number of at least 1; got 0"),
    ],
)
def test_the_users_mistakes(calls, capsys, options, message):
    assert cli.run(["prune", "m", "--out", "o", *options]) == 2
    captured = capsys.readouterr()
    assert message in one_line(captured.err) and captured.out == "" and not calls


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


def test_parse_rotation_refuses():
    with pytest.raises(UserError, match="whole number"):
        cli.parse_rotation("block:")


def positions(events, shared=False):
    """Share of the bar after every event."""
    with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as bars:
        progress = console.BarProgress(bars, shared=shared)
        shares = []
        for event in events:
            progress(event)
            task = bars.tasks[0]
            shares.append(task.completed / task.total)
    return shares


def test_bar_moves_forward_within_a_pass():
    events = []
    for layer in range(2):
        where = dict(layer=layer, layers=2)
        events.append(ProgressEvent(phase="calibrate", **where))
        events += [ProgressEvent(phase="rotate", step=i, steps=4, loss=1.0, **where) for i in range(5)]
        events.append(ProgressEvent(phase="prune", **where))
    shares = positions(events)
    assert shares == sorted(shares)
    assert shares[5] == pytest.approx(0.45) and shares[6] == shares[5] and shares[7] == 0.5


def test_bar_starts_again_for_the_next_pass():
    """A shared rotation: calibrate all layers, train once, prune all layers."""
    events = [ProgressEvent(phase="calibrate", layer=i, layers=4) for i in range(4)]
    events += [ProgressEvent(phase="rotate", layers=4, step=i, steps=10) for i in (1, 10)]
    events += [ProgressEvent(phase="prune", layer=i, layers=4) for i in range(4)]
    assert positions(events, shared=True) == [0, 0.25, 0.5, 0.75, 0.1, 1.0, 0, 0.25, 0.5, 0.75]


def test_lines_without_a_terminal():
    file = io.StringIO()
    progress = console.LineProgress(Console(file=file))
    for layer in range(2):
        progress(ProgressEvent(phase="calibrate", layer=layer, layers=2))
        for step in range(3):
            progress(
                ProgressEvent(
                    phase="rotate", layer=layer, layers=2, step=step, steps=2, loss=4.0 - step - layer
                )
            )
        progress(ProgressEvent(phase="prune", layer=layer, layers=2))
    progress(ProgressEvent(phase="evaluate", step=1, steps=2))
    progress(ProgressEvent(phase="evaluate", step=2, steps=2))
    assert [line.rpartition(" (")[0] for line in file.getvalue().splitlines()] == [
        "layer 1/2: loss 4 -> 2 in 2 steps, pruning",
        "layer 2/2: loss 3 -> 1 in 2 steps, pruning",
        "evaluated 2 windows",
    ]
