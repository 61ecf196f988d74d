"""The recipe that the options of `drot prune` give, and the options that are refused."""

import json
from typing import get_args

import pytest
from command_output import one_line
from transformers import AutoTokenizer

from drot.cli import app as cli
from drot.cli.commands import imported
from drot.cli.options import given_options
from drot.cli.prune import SETTINGS
from drot.cli.recipe import asked_recipe
from drot.config import Method, Recipe, RotationConfig, resolve
from drot.config.recipe import SECTION_OF, SECTIONS
from drot.config.settings import description_of, fields_of
from drot.core.validation import members_of
from drot.reporting.demo import HELD_OUT, MODEL


@pytest.fixture
def in_folder_with_text(monkeypatch, tmp_path):
    """The current folder holds a.txt."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()


def test_defaults_are_those_of_the_recipe(calls, tmp_path):
    assert cli.run(["prune", "some-model", "--out", str(tmp_path / "out")]) == 0
    ((model, recipe, options),) = calls
    assert model == "some-model"
    assert recipe == Recipe()
    assert options["out"] == tmp_path / "out"
    assert (options["device"], options["dtype"], options["resume"]) == ("auto", "auto", False)
    assert options["rotations"] is None and options["save_rotations_to"] is None


def test_one_gpu_is_this_process(calls, tmp_path, monkeypatch):
    """A rank that is alone could not tell that it is one, and would start another, without end."""
    monkeypatch.setattr("drot.cli.ranks._launch", lambda arguments, count: pytest.fail("ranks are started"))
    arguments = ["prune", "some-model", "--out", str(tmp_path / "out"), "--device", "cpu", "--gpus", "1"]
    assert cli.run(arguments) == 0
    assert len(calls) == 1


#: options whose value no rule gives → a value
VALUES = {"rotation": "shared", "sparsity": "4:8", "sparsity_of": "down_proj=4:8", "keep": "layers.0.*"}
VALUES |= {"calibration": "some.json", "text_column": "body", "down_rotation": "32"}
FIELDS = {"rotation": "mode", "calibration": "source"}


@pytest.mark.parametrize("name", [option.name for option in SETTINGS])
def test_each_option_sets_its_field(name):
    """A value other than the default reaches the recipe, as if it had been given in Python."""
    command = imported("prune")
    (option,) = (param for param in command.params if param.name == name)
    choices = set((option.metavar or "").strip("[]").split("|")) - {str(option.default)}
    field = FIELDS.get(name, name)
    annotation = fields_of(SECTIONS[SECTION_OF[field]])[field].annotation
    number = {int: 7, float: 0.5}.get(members_of(annotation)[0])
    value = VALUES.get(name) or (str(number) if number else sorted(choices)[0])
    context = command.make_context("prune", ["m", option.opts[0], *([] if option.is_flag else [value])])
    recipe = asked_recipe(None, given_options(context), None).recipe
    given = True if option.is_flag else [value] if option.multiple else number or value
    assert recipe == Recipe().replace(**{field: given}) != Recipe()


def test_the_options_of_a_run_reach_the_pipeline(calls):
    text = "--save-rotations s.st --device cpu --dtype bfloat16 --resume --format packed"
    assert cli.run(["prune", "m", "--out", "o", *text.split()]) == 0
    options = calls[0][2]
    assert str(options["save_rotations_to"]) == "s.st" and options["format"] == "packed"
    assert (options["device"], options["dtype"], options["resume"]) == ("cpu", "bfloat16", True)
    for text in ("--hessians dense", "--rotations r.st"):  # it works with both
        assert cli.run(["prune", "m", "--out", "o", "--boundary", "residual", *text.split()]) == 0
        assert calls[-1][1].rotation.boundary == "residual"
    assert str(calls[-1][2]["rotations"]) == "r.st"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rotation none --steps 5 --lr 0.1", "--steps, --lr have no effect with --rotation none"),
        ("--rotation none --objective entropy", "--objective has no effect with --rotation none"),
        ("--rotation none --hessians dense", "--hessians has no effect with --rotation none"),
        (
            "--rotation stock --hessians sequential",
            "--hessians has no effect with --rotation stock, light or shared",
        ),
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
            "--method magnitude --quality fast --solve none --damping 0.1",
            "--damping has no effect with --method other than sparsegpt, --solve none and --target self",
        ),
        (
            "--method wanda --quality fast --solve none --damping-average mean",
            "--damping-average has no effect with --method other than sparsegpt, --solve none and",
        ),
        ("--target-weight 0.5 --target self", "--target-weight has no effect with --target self"),
        (
            "--recover-lr 0.1 --recover-epochs 2",
            "--recover-epochs, --recover-lr have no effect with --recover none",
        ),
        ("--calibration a.txt --text-column body", "--text-column has no effect with a .txt file"),
    ],
)
def test_an_option_without_effect_is_refused(calls, capsys, in_folder_with_text, options, message):
    assert cli.run(["prune", "m", "--out", "o", *options.split()]) == 2
    error = one_line(capsys.readouterr().err)
    assert message in error and "leave one or the other out" in error and not calls


def test_defaults_may_be_spelled_out(calls):
    text = "prune m --out o --method magnitude --rotation none --block-size 128 --objective auto"
    assert cli.run(text.split()) == 0


def test_blocks_fit_any_m(calls):
    """m = 3 does not divide the default block size, 128. The manifest has the block size that is used."""
    assert cli.run(["prune", "m", "--out", "o", "--sparsity", "1:3"]) == 0
    assert resolve(calls[0][1]).to_dict()["pruning"]["block_size"] == 126


def test_the_options_are_those_of_the_fields():
    """With the default, the choices and the description of the field."""
    options = {option.name: option for option in imported("prune").params}
    renamed = {"mode": "rotation", "blocks": "rotation", "source": "calibration"}
    assert {renamed.get(field, field) for field in SECTION_OF} <= options.keys()
    assert options["steps"].opts == ["--steps"] and options["block_size"].default == 128
    assert options["hessians"].metavar == "[auto|sequential|dense]"
    described = description_of(RotationConfig, "hessians")
    assert "`boundary` residual" in described
    described = described.replace("`boundary`", "--boundary").replace("`mode`", "--rotation")
    assert options["hessians"].help == described
    assert options["reference_compat"].is_flag and not options["reference_compat"].secondary_opts
    assert options["keep"].multiple and options["keep"].default is None


@pytest.mark.parametrize(
    ("options", "mode", "down", "blocks"),
    [
        (["none"], "none", "auto", 1),
        (["shared"], "shared", "auto", 1),
        (["block:8"], "layer", "auto", 8),
        (["stock"], "shared", "none", 1),
        (["light"], "shared", 64, 1),
        (["full"], "layer", "auto", 1),
        (["light", "--down-rotation", "32"], "shared", 32, 1),
        (["layer", "--down-rotation", "none"], "layer", "none", 1),
    ],
)
def test_rotation(calls, options, mode, down, blocks):
    assert cli.run(["prune", "m", "--out", "o", "--rotation", *options]) == 0
    rotation = calls[0][1].rotation
    assert (rotation.mode, rotation.down_rotation, rotation.blocks) == (mode, down, blocks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "wandb"], f"--method must be one of {', '.join(get_args(Method))}; got 'wandb'"),
        (
            ["--rotation", "some"],
            "--rotation must be one of none, layer, shared, stock, light, full, block:N; got 'some'",
        ),
        (
            ["--rotation", "none", "--down-rotation", "64"],
            "--down-rotation has no effect with --rotation none",
        ),
        (
            ["--rotation", "stock", "--down-rotation", "64"],
            "--rotation stock has no R3, got --down-rotation 64: leave one or the other out",
        ),
        (
            ["--rotation", "light", "--down-rotation", "none"],
            "--rotation light has R3, got --down-rotation none: leave one or the other out",
        ),
        (["--down-rotation", "big"], "--down-rotation must be auto, none, or the size of a block, a whole"),
        (["--rotation", "block:x"], "block:N needs a whole number of blocks, as in block:4; got 'block:x'"),
        (["--sparsity", "4:2"], "--sparsity must be a ratio"),
        (["--steps", "many"], "'--steps'"),
        (["--no-such-option"], "--no-such-option"),
        (["--nsamples", "0"], "--nsamples must be a whole number of at least 1; got 0"),
        (["--seed", str(2**64)], "--seed must be a whole number from 0 to 18446744073709551615; got 1844"),
        (["--sparsity-of", "down_proj"], "--sparsity-of must be PATTERN=SPARSITY such as down_proj=4:8; got"),
        (
            ["--sparsity-of", "down_proj=2"],
            "sparsity of down_proj in --sparsity-of must be a ratio",
        ),
        (["--sensitivity"], "--out has no effect with --sensitivity"),
        (["--sensitivity", "--quality", "best"], "--out, --quality have no effect with --sensitivity"),
        (["--sensitivity", "--dry-run", "--gpus", "1"], "--out, --dry-run, --gpus have no effect with"),
        (["--lr", "4"], "--lr must be a finite number above 0 and at most 3.14159; got 4.0"),
    ],
)
def test_the_users_mistakes(calls, capsys, options, message):
    assert cli.run(["prune", "m", "--out", "o", *options]) == 2
    captured = capsys.readouterr()
    assert message in one_line(captured.err) and captured.out == "" and not calls


def test_a_run_without_calibration_refuses_its_options(calls, capsys, in_folder_with_text):
    text = "prune m --out o --method magnitude --rotation none --nsamples 4"
    assert cli.run(text.split()) == 2
    refused = "--nsamples has no effect with --method magnitude --rotation none, which reads a text only if"
    assert refused in one_line(capsys.readouterr().err)
    assert cli.run([*text.split(), "--calibration", "a.txt"]) == 0


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path, capsys):
    """A folder that is not empty, and a text that does not exist, are told before a night of work."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    command = ["prune", str(MODEL), "--dry-run", "--calibration"]
    assert cli.run([*command, str(HELD_OUT), "--out", str(tmp_path / "out")]) == 2
    assert "exists and is not an empty folder" in one_line(capsys.readouterr().err)
    (tmp_path / "begun.partial").mkdir()
    (tmp_path / "begun.partial" / "run.json").write_text("{}")
    assert cli.run([*command, str(HELD_OUT), "--out", str(tmp_path / "begun")]) == 2
    assert "unfinished run" in one_line(capsys.readouterr().err)
    held = [*command, str(HELD_OUT), "--save-rotations"]
    assert cli.run([*held, str(tmp_path / "out" / "file")]) == 2
    assert "file exists: name another --save-rotations" in one_line(capsys.readouterr().err)
    assert cli.run([*held, str(tmp_path / "new"), "--device", "cpu"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "and as much again on its disk while it is written" in printed and not (tmp_path / "new").exists()
    assert cli.run([*command, "missing.txt"]) == 2
    assert "got 'missing.txt', which is no such name and no file" in one_line(capsys.readouterr().err)


def test_a_dry_run_makes_no_folders(tmp_path, capsys):
    """It says whether the run could make them all the same."""
    options = ["--calibration", str(HELD_OUT), "--device", "cpu", "--steps", "1", "--dry-run"]
    command = ["prune", str(MODEL), *options, "--out", str(tmp_path / "a" / "b" / "out")]
    assert cli.run([*command, "--save-rotations", str(tmp_path / "c" / "d" / "r.safetensors")]) == 0
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for option in ("--out", "--save-rotations"):
        for name, reason in (("file", "Not a directory"), ("x" * 300, "File name too long")):
            capsys.readouterr()
            place = tmp_path / name / "a" / "b"
            assert cli.run(["prune", str(MODEL), *options, option, str(place)]) == 2
            assert f"cannot write {place}: {reason}" in one_line(capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_dry_run_counts_the_tokens_of_a_local_text(tmp_path, capsys):
    """A text on the hub is not fetched, and may be shorter than what is asked for."""
    tokens = len(
        AutoTokenizer.from_pretrained(MODEL)(HELD_OUT.read_text(), add_special_tokens=False).input_ids
    )
    command = ["prune", str(MODEL), "--dry-run", "--device", "cpu", "--seqlen", "128", "--nsamples", "4000"]
    for source, known in ((str(HELD_OUT), True), (f"{HELD_OUT},c4", False)):
        assert cli.run([*command, "--json", "--calibration", source]) == 0
        found = json.loads(capsys.readouterr().out)
        wanted = tokens // 128 * 128 if known else 4000 * 128
        assert (found["tokens"], found["tokens_known"]) == (wanted, known)
        assert cli.run([*command, "--calibration", source]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert (
            f"{wanted:,} tokens;" if known else f"{wanted:,} tokens, or all of a shorter text;"
        ) in printed
    assert 0 < tokens < 4000 * 128
