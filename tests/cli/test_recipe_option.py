"""`drot prune --recipe`: the recipe that reaches the pipeline, what beside it replaces, what is told."""

import json

import pytest
from made_manifests import made_manifest

from drot.checkpoint.manifest import write_manifest
from drot.cli import app as cli
from drot.config import PruningConfig, Recipe, RotationConfig, resolve

RECIPE = Recipe(
    rotation=RotationConfig(mode="none"),
    pruning=PruningConfig(method="wanda", sparsity="4:8", keep=("layers.0.*",)),
)


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a checkpoint, of which only the manifest is there."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    manifest = made_manifest(
        RECIPE,
        base_model="someone/model",
        format="packed",
        dtype="bfloat16",
        compute_dtype="float32",
    )
    write_manifest(folder, manifest)
    return folder


def change(folder, **entries):
    file = folder / "drot.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def prune(*arguments):
    return cli.run(["prune", *map(str, arguments), "--out", "o", "--json"])


def test_a_run_is_repeated_from_its_checkpoint(calls, checkpoint, caplog):
    assert prune("--recipe", checkpoint) == 0
    ((model, recipe, options),) = calls
    assert model == "someone/model" and resolve(recipe) == resolve(RECIPE)
    assert (options["format"], options["dtype"], options["save_dtype"]) == ("packed", "float32", "bfloat16")
    assert not caplog.messages
    assert prune("other/model", "--recipe", checkpoint / "drot.json", "--format", "dense") == 0
    model, recipe, options = calls[1]
    assert (model, options["format"]) == ("other/model", "dense")


def test_a_model_that_is_not_here_is_asked_for(calls, checkpoint, capsys):
    change(checkpoint, base_model="./models/dense")
    assert prune("--recipe", checkpoint) == 2 and not calls
    line = "there is no ./models/dense, from which the checkpoint of --recipe was made: name MODEL"
    assert line in capsys.readouterr().err
    assert prune("m", "--recipe", checkpoint) == 0


def test_options_replace_fields_and_say_so(calls, checkpoint, caplog):
    arguments = ("--recipe", checkpoint, "--sparsity", "2:4", "--rotation", "block:2", "--method", "wanda")
    assert prune(*arguments) == 0
    ((_, recipe, _),) = calls
    written = Recipe.from_dict(resolve(RECIPE).to_dict())  # in which solve is none, not auto
    follows = dict(boundary="auto", hessians="auto", output_weights="auto")
    follows |= dict(training_tokens=None, down_rotation="auto")
    assert recipe == written.replace(sparsity="2:4", mode="layer", blocks=2, **follows)
    (said,) = caplog.messages
    assert "rotation.mode none -> layer, rotation.blocks 1 -> 2, " in said
    assert "rotation.training_tokens 0 -> 32, " in said and "pruning.sparsity 4:8 -> 2:4" in said
    assert "method" not in said and str(checkpoint) in said


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        (dict(layers_per_rotation=2), ["--rotation", "none"], dict(mode="none", layers_per_rotation=1)),
        (dict(layers_per_rotation=2), ["--rotation", "stock"], dict(mode="shared", layers_per_rotation=1)),
        (dict(boundary="residual"), ["--rotation", "light"], dict(mode="shared", boundary="input")),
        ({}, ["--layers-per-rotation", "2"], dict(layers_per_rotation=2, hessians="dense")),
        ({}, ["--boundary", "residual"], dict(boundary="residual", hessians="dense")),
        (dict(output_weights="equal"), ["--rotation", "light"], dict(output_weights="equal")),
        (dict(mode="none", solve="admm"), ["--rotation", "full"], dict(output_weights="gradient")),
        ({}, ["--token-weights", "equal"], dict(output_weights="equal")),
        ({}, ["--optimizer", "paper"], dict(steps=2000, lr=0.01)),
        ({}, ["--objective", "entropy"], dict(steps=200, lr=0.7, output_weights="equal")),
        ({}, ["--optimizer", "paper", "--lr", "0.02"], dict(steps=2000, lr=0.02)),
        ({}, ["--optimizer", "fast"], dict(steps=200, lr=0.3)),
        ({}, ["--optimizer", "paper"], dict(training_tokens=0, down_rotation="none")),
        (dict(optimizer="paper"), ["--optimizer", "fast"], dict(training_tokens=32, down_rotation=64)),
        (dict(mode="none"), ["--rotation", "full"], dict(training_tokens=32, down_rotation=64)),
        (dict(down_rotation=32), ["--boundary", "residual"], dict(down_rotation=32)),
        (dict(mode="shared"), ["--rotation", "layer"], dict(down_rotation=64)),
        ({}, ["--rotation", "shared"], dict(down_rotation="none")),
    ],
)
def test_what_followed_from_a_replaced_setting_is_open_again(fields, options, expected, calls, checkpoint):
    change(checkpoint, recipe=resolve(Recipe().replace(**fields)).to_dict())
    assert prune("--recipe", checkpoint, *options) == 0
    rotation = resolve(calls[0][1]).rotation
    assert {name: getattr(rotation, name) for name in expected} == expected


@pytest.mark.parametrize(("before", "now"), [("dense", "packed"), ("packed", "dense")])
def test_the_boundary_follows_from_the_format(before, now, calls, checkpoint, caplog):
    """A packed checkpoint has R1 on the residual, a dense checkpoint at the inputs."""
    change(checkpoint, recipe=resolve(Recipe(), format=before).to_dict(), format=before)
    assert prune("--recipe", checkpoint, "--format", now) == 0
    ((_, recipe, options),) = calls
    assert options["format"] == now
    expected = resolve(Recipe(), format=now).rotation
    found = resolve(recipe, format=now).rotation
    assert (found.boundary, found.hessians) == (expected.boundary, expected.hessians)
    assert f"format {before} -> {now}" in caplog.text


def test_the_format_before_is_that_of_the_run(calls, checkpoint, caplog):
    """A result may have been converted since: its run with R1 on the residual was dense, and is repeated."""
    recipe = resolve(Recipe().replace(boundary="residual")).to_dict()
    change(checkpoint, recipe=recipe, format="packed", identity={"format": "dense"})
    assert prune("--recipe", checkpoint, "--format", "dense") == 0
    assert calls[0][1].rotation.boundary == "residual" and "replaces" not in caplog.text


def test_a_fine_tuning_is_not_repeated(calls, checkpoint, caplog):
    change(checkpoint, finetune=[{"steps": 3}])
    assert prune("--recipe", checkpoint) == 0
    assert f"the fine-tuning of {checkpoint} is not repeated" in caplog.text


def test_what_a_file_of_settings_names_stays(calls, tmp_path):
    """Its writer has chosen it. A manifest has every value, also those that nobody chose."""
    file = tmp_path / "recipe.yaml"
    file.write_text("rotation: {lr: 0.2, output_weights: equal}")
    assert prune("m", "--recipe", file, "--rotation", "stock", "--objective", "pruned") == 0
    assert (calls[0][1].rotation.lr, calls[0][1].rotation.output_weights) == (0.2, "equal")


def test_a_default_that_is_given_replaces_too(calls, checkpoint):
    """--sparsity 2:4 is the default; given beside a recipe with 4:8 it counts."""
    assert prune("--recipe", checkpoint, "--sparsity", "2:4") == 0
    assert str(calls[0][1].pruning.sparsity) == "2:4"


def test_a_quality_replaces_three_fields(calls, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("pruning: {solve: admm, method: magnitude}")
    assert prune("m", "--recipe", file, "--quality", "fast") == 0
    pruning = calls[0][1].pruning
    assert (pruning.solve, pruning.target, pruning.method) == ("pcg", "self", "magnitude")


@pytest.mark.parametrize(
    ("quality", "steps", "expected"),
    [("fast", 100, 50), ("balanced", 50, 200), ("best", 50, 200), ("fast", None, 50)],
)
def test_a_quality_names_the_steps_of_a_recipe_too(calls, tmp_path, quality, steps, expected):
    """A recipe of a manifest holds every value, also those that nobody has named."""
    file = tmp_path / "recipe.yaml"
    file.write_text(f"rotation: {{steps: {'null' if steps is None else steps}}}")
    assert prune("m", "--recipe", file, "--quality", quality) == 0
    assert resolve(calls[0][1]).rotation.steps == expected
    assert prune("m", "--recipe", file, "--quality", quality, "--steps", "7") == 0
    assert resolve(calls[1][1]).rotation.steps == 7


def test_a_recipe_without_a_model_needs_one(calls, tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text("pruning: {sparsity: 4:8}")
    assert prune("--recipe", file) == 2
    assert "MODEL is missing: name a model on the hub" in capsys.readouterr().err
    assert prune() == 2 and not calls


def test_an_unknown_field_is_one_line(calls, tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text("pruning: {sparsty: 4:8}")
    assert prune("m", "--recipe", file) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "recipe.yaml: pruning has no field 'sparsty': did you mean" in error


def test_an_option_without_effect_is_refused_beside_a_recipe(calls, checkpoint, capsys):
    """The recipe of a manifest spells out every field; only what the command line changes is refused."""
    assert prune("--recipe", checkpoint, "--steps", "5") == 2
    assert "--steps has no effect with --rotation none" in capsys.readouterr().err and not calls


def test_rotations_of_a_file_must_be_given_again(calls, checkpoint, capsys, caplog):
    recipe = resolve(RECIPE.replace(mode="layer")).to_dict()
    change(
        checkpoint,
        recipe=recipe,
        rotations_file={"file": "r.safetensors", "sha256": "a" * 64, "trained_with": {}},
    )
    assert prune("--recipe", checkpoint, "--dry-run") == 2
    assert prune("--recipe", checkpoint) == 2
    assert "used the rotations in r.safetensors" in capsys.readouterr().err and not calls
