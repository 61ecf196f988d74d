"""The command line: the recipe that the options give, the output on stdout and stderr, the exit status."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import drot
from drot.cli import app as cli
from drot.cli import tables
from drot.cli.prune import prune as prune_command
from drot.cli.recipe import parse_rotation
from drot.cli.sensitivity import advice
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig, Sparsity
from drot.demo.demo import HELD_OUT, MODEL
from drot.errors import UserError
from drot.pipeline import prune as pipeline
from drot.pipeline.sensitivity import SensitivityResult
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
    """The arguments with which `drot prune` calls the pipeline, which is replaced by a function."""
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


def test_every_option_reaches_the_recipe(calls):
    text = (
        "prune m --out o --sparsity 4:8 --rotation shared --objective entropy "
        "--optimizer paper --steps 7 --lr 0.5 --hessians dense --layers-per-step 2 "
        "--product-dtype bfloat16 --reference-compat --damping 0.1 --block-size 64 --calibration some.json "
        "--nsamples 3 --seqlen 9 --seed 5 --text-column body --save-rotations s.st --device cpu "
        "--dtype bfloat16 --resume --format packed"
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
            layers_per_step=2,
            hessians="dense",
            product_dtype="bfloat16",
            reference_compat=True,
        ),
        pruning=PruningConfig(sparsity=Sparsity.parse("4:8"), damping=0.1, block_size=64),
        calibration=CalibrationConfig(source="some.json", nsamples=3, seqlen=9, seed=5, text_column="body"),
    )
    assert str(options["save_rotations_to"]) == "s.st"
    assert (options["device"], options["dtype"], options["resume"]) == ("cpu", "bfloat16", True)
    assert options["format"] == "packed"
    assert cli.run(["prune", "m", "--out", "o", "--method", "wanda", "--rotations", "r.st"]) == 0
    assert calls[1][1].pruning.method == "wanda" and str(calls[1][2]["rotations"]) == "r.st"
    assert cli.run(["prune", "m", "--out", "o", "--early-stop", "0.1"]) == 0
    assert calls[2][1].rotation.early_stop == 0.1
    text = "--keep layers.0.* --sparsity-of down_proj=4:8 --keep k_proj --sparsity-of layers.1.*=0.25"
    assert cli.run(["prune", "m", "--out", "o", *text.split()]) == 0
    assert calls[-1][1].pruning == PruningConfig(
        keep=("layers.0.*", "k_proj"), sparsity_of={"down_proj": "4:8", "layers.1.*": "0.25"}
    )
    for text in ("--hessians dense", "--rotations r.st"):  # it works with both
        assert cli.run(["prune", "m", "--out", "o", "--boundary", "residual", *text.split()]) == 0
        assert calls[-1][1].rotation.boundary == "residual"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rotation none --steps 5 --lr 0.1", "--steps, --lr have no effect with --rotation none"),
        ("--rotation none --objective entropy", "--objective has no effect with --rotation none"),
        ("--rotation none --hessians dense", "--hessians has no effect with --rotation none"),
        ("--rotation none --save-rotations f", "--save-rotations has no effect with --rotation none"),
        ("--rotation none --rotations f", "--rotations has no effect with --rotation none"),
        ("--rotations f --steps 5", "--steps has no effect with --rotations FILE"),
        ("--rotations f --rotation block:4", "--rotation block:N has no effect with --rotations FILE"),
        ("--layers-per-step 2", "--layers-per-step has no effect with --rotation other than shared"),
        (
            "--rotation shared --layers-per-step 2 --early-stop 0.1",
            "--early-stop has no effect with --layers-per-step",
        ),
        ("--optimizer paper --early-stop 0.1", "--early-stop has no effect with --optimizer paper"),
        (
            "--method wanda --reference-compat",
            "--reference-compat has no effect with --method other than sparsegpt",
        ),
        (
            "--method magnitude --block-size 64",
            "--block-size has no effect with --method other than sparsegpt and --solve other than sparsegpt",
        ),
        (
            "--method magnitude --quality fast --damping 0.1",
            "--damping has no effect with --method other than sparsegpt, --solve none and --target self",
        ),
        ("--target-weight 0.5 --target self", "--target-weight has no effect with --target self"),
        (
            "--recover-lr 0.1 --recover-epochs 2",
            "--recover-epochs, --recover-lr have no effect with --recover none",
        ),
        ("--calibration a.txt --text-column body", "--text-column has no effect with a .txt file"),
    ],
)
def test_an_option_without_effect_is_refused(calls, capsys, options, message):
    assert cli.run(["prune", "m", "--out", "o", *options.split()]) == 2
    error = one_line(capsys.readouterr().err)
    assert message in error and "leave one or the other out" in error and not calls


def test_defaults_may_be_spelled_out(calls):
    text = "prune m --out o --method magnitude --rotation none --block-size 128 --objective auto"
    assert cli.run(text.split()) == 0


def test_blocks_fit_any_m(calls):
    """m = 3 does not divide the default block size, 128. The manifest has the block size that is used."""
    assert cli.run(["prune", "m", "--out", "o", "--sparsity", "1:3"]) == 0
    assert calls[0][1].to_dict()["pruning"]["block_size"] == 126


def test_the_recipe_in_the_manifest_survives_json():
    """A resumed run compares its recipe with the recipe in run.json."""
    for rotation in (RotationConfig(blocks=(24, 8)), RotationConfig(mode="shared"), RotationConfig()):
        written = Recipe(rotation=rotation).to_dict()
        assert json.loads(json.dumps(written)) == written
        assert written["rotation"]["hessians"] == ("dense" if rotation.mode == "shared" else "sequential")


@pytest.mark.parametrize("field", dataclasses.fields(Recipe))
def test_every_field_of_the_recipe_has_an_option(field):
    """A field that is added to the configuration needs an option."""
    import inspect

    renamed = {"mode": "rotation", "blocks": "rotation", "source": "calibration"}
    options = inspect.signature(prune_command).parameters
    for setting in dataclasses.fields(field.default_factory):
        assert renamed.get(setting.name, setting.name) in options


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
    assert "layer 0 (1 of 1): pruning" in captured.err


def test_table(calls, capsys):
    assert cli.run(["prune", "m", "--out", "some-folder"]) == 0
    out = capsys.readouterr().out
    for text in ("sparsegpt 2:4", "0.4 -> 0.2", "900 -> 800", "50.0%", "0.2500", "Saved to some-folder"):
        assert text in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "wandb"], "--method must be one of magnitude, wanda, sparsegpt; got 'wandb'"),
        (["--rotation", "some"], "--rotation must be one of none, layer, shared, block:N; got 'some'"),
        (["--rotation", "block:x"], "block:N needs a whole number of blocks, as in block:4; got 'block:x'"),
        (["--rotation", "block"], "--rotation block:N needs a whole number of blocks, as in block:4; got"),
        (["--sparsity", "4:2"], "--sparsity must be a ratio"),
        (["--steps", "many"], "'--steps'"),
        (["--no-such-option"], "--no-such-option"),
        (["--nsamples", "0"], "--nsamples must be a whole number of at least 1; got 0"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 18446744073709551615; got -1"),
        (["--seed", str(2**64)], "--seed must be a whole number from 0 to 18446744073709551615; got 1844"),
        (["--sparsity-of", "down_proj"], "--sparsity-of must be PATTERN=SPARSITY such as down_proj=4:8; got"),
        (["--sparsity-of", "down_proj=2"], "the sparsity in --sparsity-of must be a ratio in [0, 1)"),
        (["--sensitivity"], "--out has no effect with --sensitivity, which writes no model"),
        (["--lr", "inf"], "--lr must be a finite number above 0 and at most 3.14159; got inf"),
    ],
)
def test_the_users_mistakes(calls, capsys, options, message):
    assert cli.run(["prune", "m", "--out", "o", *options]) == 2
    captured = capsys.readouterr()
    assert message in one_line(captured.err) and captured.out == "" and not calls


def result_of(errors, **pruning):
    return SensitivityResult(Recipe(pruning=PruningConfig(**pruning)), errors, {"base_model": "m"})


@pytest.fixture
def sensitivity(monkeypatch):
    """The arguments of drot.sensitivity, which is replaced by a function with figures for two linears."""
    seen = []
    errors = {
        f"layers.{i}.mlp.{r}": {"2:4": 0.12 if i else 0.02, "0.5": 0.01, "6:12": None if i else 0.3}
        for i in range(2)
        for r in ("up_proj", "down_proj")
    }

    def measure(model, recipe, **options):
        seen.append((model, recipe, options))
        print("a library prints to stdout")
        options["progress"](ProgressEvent(phase="sensitivity", layer=0, layers=2))
        return result_of(errors, sparsity_of=recipe.pruning.sparsity_of, keep=recipe.pruning.keep)

    monkeypatch.setattr("drot.pipeline.sensitivity.sensitivity", measure)
    return seen


def test_sensitivity(sensitivity, calls, capsys):
    arguments = ["prune", "m", "--sensitivity", "--keep", "layers.1.mlp.up_proj", "--device", "cpu"]
    assert cli.run([*arguments, "--rotations", "r.st"]) == 0
    captured = capsys.readouterr()
    out = " ".join(captured.out.split())
    for text in ("Output error at 2:4", "Output error at 0.5", "Output error at 6:12", "0.1200*", "0.0700"):
        assert text in out
    assert "Largest output error with this recipe: layers.1.mlp.down_proj 0.1200 (2:4), layers.0.mlp" in out
    assert (
        '--keep layers.1.mlp.down_proj, or give it another sparsity: --sparsity-of "layers.1.mlp.down' in out
    )
    assert max(map(len, captured.out.splitlines()[:-1])) <= 100
    assert "a library prints to stdout" in captured.err and "layer 0 (1 of 2): output errors" in captured.err
    ((model, recipe, options),) = sensitivity
    assert (model, recipe.pruning.keep, str(options["rotations"])) == ("m", ("layers.1.mlp.up_proj",), "r.st")
    assert cli.run([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["errors"]["layers.1.mlp.up_proj"] == {"2:4": 0.12, "0.5": 0.01, "6:12": None}
    assert data["recipe"]["pruning"]["keep"] == ["layers.1.mlp.up_proj"] and data["base_model"] == "m"
    assert not calls


def test_the_advice_of_the_sensitivity_table():
    assert (
        advice(result_of({"layers.0.mlp.up_proj": {"2:4": 0.5}}, keep="*"))
        == "The recipe keeps all linears dense."
    )
    only = advice(result_of({"layers.0.mlp.up_proj": {"2:4": 0.5}}))
    assert only.endswith("Keep the first dense: --keep layers.0.mlp.up_proj.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--out is missing: name the folder to write, or use --sensitivity"),
        ("--sensitivity --out o --resume", "--out, --resume have no effect with --sensitivity"),
        ("--sensitivity --format packed", "--format has no effect with --sensitivity"),
        ("--sensitivity --save-rotations f", "--save-rotations has no effect with --sensitivity"),
        ("--sensitivity --rotation none --steps 5", "--steps has no effect with --rotation none"),
    ],
)
def test_sensitivity_writes_no_model(sensitivity, calls, capsys, options, message):
    assert cli.run(["prune", "m", *options.split()]) == 2
    assert message in one_line(capsys.readouterr().err)
    assert not calls and not sensitivity


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

    monkeypatch.setattr("drot.environment.collect", interrupt)
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


def test_a_run_without_calibration_refuses_its_options(calls, capsys):
    assert (
        cli.run(
            ["prune", "m", "--out", "o", "--method", "magnitude", "--rotation", "none", "--nsamples", "4"]
        )
        == 2
    )
    assert "--nsamples has no effect with --method magnitude --rotation none, which reads a text only if" in (
        one_line(capsys.readouterr().err)
    )
    text = "prune m --out o --method magnitude --rotation none --nsamples 4 --calibration a.txt"
    assert cli.run(text.split()) == 0


def test_the_facts_of_a_run_name_what_was_chosen_by_itself(calls, capsys):
    recipe = Recipe()
    changes = {
        "positions": 512,
        "untied_lm_head": True,
        "compute_dtype": "float32",
        "dtype": "bfloat16",
        "calibration": {"sha256": "0", "shape": [128, 512]},
    }
    tables.print_manifest(manifest(recipe, **changes))
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "c4, 128 x 512 tokens (all that the model reads), seed 0",
        "bfloat16 (computed in float32)",
        "lm_head untied from the embedding",
    ):
        assert text in shown
    tables.print_manifest(manifest(recipe, calibration={"sha256": "0", "shape": [0, 1]}))
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


def test_parse_rotation_refuses():
    with pytest.raises(UserError, match="whole number"):
        parse_rotation("block:")


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
    figures |= {"texts": {"a": text, "b": text}, "averages": {}, "against": None, "streamed": False}
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
