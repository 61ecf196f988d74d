"""The recipe: what `auto` stands for, and the qualities."""

import json

import pytest

from drot.config import DAMPING, QUALITIES, PruningConfig, Recipe, RecoveryConfig, RotationConfig
from drot.config.recipe import FAST_STEPS
from drot.core.errors import UserError


@pytest.mark.parametrize("sparsity", ["2:4", "0.5"])
def test_the_objective_is_the_pruned_importance(sparsity):
    pruning = PruningConfig(sparsity=sparsity)
    assert Recipe(pruning=pruning).objective == "pruned"
    assert Recipe(pruning=pruning, rotation=RotationConfig(objective="entropy")).objective == "entropy"


@pytest.mark.parametrize(
    ("rotation", "expected"),
    [
        (dict(), ("admm", "dense", DAMPING, "median")),
        (dict(mode="shared"), ("admm", "dense", DAMPING, "median")),
        (dict(mode="none"), ("none", "self", 0.01, "mean")),  # as in SparseGPT's code
        (dict(optimizer="paper"), ("none", "self", 0.01, "mean")),
        (dict(reference_compat=True), ("none", "self", 0.01, "mean")),
    ],
)
def test_a_published_method_is_not_changed_unless_that_is_asked_for(rotation, expected):
    recipe = Recipe(rotation=RotationConfig(**rotation))
    assert (recipe.solve, recipe.target, recipe.damping, recipe.damping_average) == expected
    written = recipe.to_dict()["pruning"]
    assert tuple(written[name] for name in ("solve", "target", "damping", "damping_average")) == expected
    asked = Recipe(rotation=recipe.rotation, pruning=PruningConfig(solve="pcg", target="dense", damping=0.5))
    assert (asked.solve, asked.target, asked.damping) == ("pcg", "dense", 0.5)
    assert asked.to_dict()["pruning"]["damping"] == 0.5


@pytest.mark.parametrize("mode", ["layer", "none"])
@pytest.mark.parametrize("average", ["mean", "median"])
def test_the_average_of_the_damping_is_that_of_the_recipe(mode, average):
    recipe = Recipe(rotation=RotationConfig(mode=mode), pruning=PruningConfig(damping_average=average))
    assert recipe.damping_average == recipe.to_dict()["pruning"]["damping_average"] == average


@pytest.mark.parametrize("quality", QUALITIES)
def test_a_quality_sets_three_fields_and_leaves_the_others(quality):
    start = Recipe(
        pruning=PruningConfig(method="wanda", target_weight=0.5), recovery=RecoveryConfig(recover_lr=0.1)
    )
    recipe = start.with_quality(quality)
    found = (recipe.pruning.solve, recipe.pruning.target, recipe.recovery.recover)
    assert found == tuple(QUALITIES[quality].values())
    assert (recipe.pruning.method, recipe.pruning.target_weight) == ("wanda", 0.5)
    assert recipe.recovery.recover_lr == 0.1
    assert json.loads(json.dumps(recipe.to_dict())) == recipe.to_dict()


def test_fast_sets_the_steps_that_nothing_else_sets():
    assert Recipe().with_quality("fast").rotation.steps == FAST_STEPS
    assert Recipe().with_quality("best").rotation.steps is None
    for rotation in (RotationConfig(steps=7), RotationConfig(optimizer="paper"), RotationConfig(mode="none")):
        assert Recipe(rotation=rotation).with_quality("fast").rotation == rotation


@pytest.mark.parametrize(
    ("fields", "rate"),
    [
        ({}, 0.3),
        ({"objective": "pruned"}, 0.3),
        ({"objective": "entropy"}, 0.7),
        ({"objective": "entropy", "optimizer": "paper"}, 0.01),
        ({"objective": "entropy", "lr": 0.2}, 0.2),
    ],
)
def test_the_rate_is_that_of_the_optimizer_and_the_objective(fields, rate):
    recipe = Recipe(rotation=RotationConfig(**fields))
    assert recipe.rotation.resolved_lr == recipe.to_dict()["rotation"]["lr"] == rate


def test_the_default_is_balanced():
    assert Recipe().to_dict() == Recipe().with_quality("balanced").to_dict()


def test_an_unknown_quality_is_refused():
    with pytest.raises(UserError, match="`quality` must be one of fast, balanced, best; got 'good'"):
        Recipe().with_quality("good")


@pytest.mark.parametrize("weight", [0, -0.5, 1.5, float("nan")])
def test_a_target_weight_outside_of_its_range_is_refused(weight):
    with pytest.raises(UserError, match="`target_weight` must be"):
        PruningConfig(target_weight=weight)


@pytest.mark.parametrize(
    ("fields", "format", "given", "boundary", "hessians"),
    [
        ({}, "dense", False, "input", "sequential"),
        ({}, "packed", False, "residual", "dense"),
        ({}, "packed", True, "residual", "sequential"),  # the file tells the R1 of the next layer
        ({"hessians": "sequential"}, "packed", False, "input", "sequential"),
        ({"hessians": "sequential"}, "packed", True, "residual", "sequential"),
        ({"hessians": "dense"}, "packed", False, "residual", "dense"),
        ({"hessians": "dense"}, "dense", False, "input", "dense"),
        ({"boundary": "input"}, "packed", False, "input", "sequential"),
        ({"boundary": "residual"}, "dense", False, "residual", "dense"),
        ({"mode": "shared"}, "packed", False, "input", "dense"),
        ({"mode": "none"}, "packed", False, "input", "sequential"),
    ],
)
def test_the_format_decides_where_the_rotation_acts(fields, format, given, boundary, hessians):
    recipe = Recipe(rotation=RotationConfig(**fields))
    resolved = recipe.for_format(format, rotations_given=given)
    assert (resolved.rotation.boundary, resolved.rotation.hessians) == (boundary, hessians)
    assert resolved.for_format("dense") == resolved.for_format("packed") == resolved
    recorded = recipe.to_dict()["rotation"]  # what is not resolved is recorded as for a dense model
    dense = recipe.for_format("dense").rotation
    assert (recorded["boundary"], recorded["hessians"]) == (dense.boundary, dense.hessians)


def test_the_recipe_in_the_manifest_survives_json():
    """A resumed run compares its recipe with the recipe in run.json."""
    for rotation in (RotationConfig(blocks=(24, 8)), RotationConfig(mode="shared"), RotationConfig()):
        written = Recipe(rotation=rotation).to_dict()
        assert json.loads(json.dumps(written)) == written
        assert written["rotation"]["hessians"] == ("dense" if rotation.mode == "shared" else "sequential")
