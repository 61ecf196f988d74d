"""The recipe that the options of `drot prune` give, and the options that are refused."""

import pytest
from command_output import one_line

from drot.cli import app as cli
from drot.cli.commands import imported
from drot.cli.recipe import parse_rotation
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig, Sparsity, resolve
from drot.config.recipe import SECTION_OF
from drot.config.settings import description_of
from drot.core.errors import UserError


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
        "--product-dtype bfloat16 --reference-compat --damping 0.1 --damping-average median "
        "--block-size 64 --calibration some.json "
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
        pruning=PruningConfig(
            sparsity=Sparsity.parse("4:8"), damping=0.1, damping_average="median", block_size=64
        ),
        calibration=CalibrationConfig(source="some.json", nsamples=3, seqlen=9, seed=5, text_column="body"),
    )
    assert str(options["save_rotations_to"]) == "s.st"
    assert (options["device"], options["dtype"], options["resume"]) == ("cpu", "bfloat16", True)
    assert options["format"] == "packed"
    assert cli.run(["prune", "m", "--out", "o", "--method", "wanda", "--rotations", "r.st"]) == 0
    assert calls[1][1].pruning.method == "wanda" and str(calls[1][2]["rotations"]) == "r.st"
    assert cli.run(["prune", "m", "--out", "o", "--early-stop", "0.1", "--training-tokens", "9"]) == 0
    assert (calls[2][1].rotation.early_stop, calls[2][1].rotation.training_tokens) == (0.1, 9)
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
        (
            "--method wanda --quality fast --damping-average mean",
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
    ("text", "mode", "blocks"), [("none", "none", 1), ("shared", "shared", 1), ("block:8", "layer", 8)]
)
def test_rotation(calls, text, mode, blocks):
    assert cli.run(["prune", "m", "--out", "o", "--rotation", text]) == 0
    rotation = calls[0][1].rotation
    assert (rotation.mode, rotation.blocks) == (mode, blocks)


def test_parse_rotation_refuses():
    with pytest.raises(UserError, match="whole number"):
        parse_rotation("block:")


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
        (
            ["--sparsity-of", "down_proj=2"],
            "sparsity of down_proj in --sparsity-of must be a ratio",
        ),
        (["--sensitivity"], "--out has no effect with --sensitivity, which writes no model"),
        (["--lr", "inf"], "--lr must be a finite number above 0; got inf"),
        (["--lr", "4"], "--lr must be a finite number above 0 and at most 3.14159; got 4.0"),
    ],
)
def test_the_users_mistakes(calls, capsys, options, message):
    assert cli.run(["prune", "m", "--out", "o", *options]) == 2
    captured = capsys.readouterr()
    assert message in one_line(captured.err) and captured.out == "" and not calls


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
