"""The recipe: what `auto` stands for, and the qualities."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from drot.config import (
    DAMPING,
    FAST_ENTROPY_LR,
    FINETUNE_LR,
    OPTIMIZER_DEFAULTS,
    PUBLISHED_DAMPING,
    QUALITIES,
    SEQLEN,
    CalibrationConfig,
    FinetuneConfig,
    PruningConfig,
    Recipe,
    RecoveryConfig,
    ResolvedRecipe,
    RotationConfig,
    resolve,
)
from drot.config.rotation import FAST_STEPS, POINTS, TRAINING_TOKENS, point_of
from drot.config.settings import description_of
from drot.core.errors import UserError


@pytest.mark.parametrize("sparsity", ["2:4", "0.5"])
def test_the_objective_is_the_pruned_importance(sparsity):
    pruning = PruningConfig(sparsity=sparsity)
    assert resolve(Recipe(pruning=pruning)).rotation.objective == "pruned"
    entropy = Recipe(pruning=pruning, rotation=RotationConfig(objective="entropy"))
    assert resolve(entropy).rotation.objective == "entropy"


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
    pruning = resolve(recipe).pruning
    assert (pruning.solve, pruning.target, pruning.damping, pruning.damping_average) == expected
    asked = Recipe(rotation=recipe.rotation, pruning=PruningConfig(solve="pcg", target="dense", damping=0.5))
    pruning = resolve(asked).pruning
    assert (pruning.solve, pruning.target, pruning.damping) == ("pcg", "dense", 0.5)


@pytest.mark.parametrize("point", POINTS)
def test_a_point_is_a_mode_of_a_recipe_file_and_of_replace(point):
    recipe = Recipe.from_dict({"rotation": {"mode": point}})
    assert recipe == Recipe().replace(mode=point) == Recipe().replace(**POINTS[point])
    assert recipe.rotation == RotationConfig(mode=point)
    assert point_of(resolve(recipe).rotation) == point
    with pytest.raises(UserError, match="`mode` stock has no R3"):
        Recipe().replace(mode="stock", down_rotation=32)


@pytest.mark.parametrize("mode", ["layer", "none"])
@pytest.mark.parametrize("average", ["mean", "median"])
def test_the_average_of_the_damping_is_that_of_the_recipe(mode, average):
    recipe = Recipe(rotation=RotationConfig(mode=mode), pruning=PruningConfig(damping_average=average))
    assert resolve(recipe).pruning.damping_average == average


@pytest.mark.parametrize("quality", QUALITIES)
def test_a_quality_sets_its_fields_and_leaves_the_others(quality):
    start = Recipe(
        pruning=PruningConfig(method="wanda", target_weight=0.5), recovery=RecoveryConfig(recover_lr=0.1)
    )
    recipe = start.with_quality(quality)
    pruning, recovery = recipe.pruning, recipe.recovery
    found = (pruning.solve, pruning.target, recovery.recover, recovery.distill_epochs)
    assert found == tuple(QUALITIES[quality].values())
    assert (recipe.pruning.method, recipe.pruning.target_weight) == ("wanda", 0.5)
    assert recipe.recovery.recover_lr == 0.1
    assert json.loads(json.dumps(recipe.to_dict())) == recipe.to_dict()


def test_fast_sets_the_steps_that_nothing_else_sets():
    sharing = Recipe().replace(layers_per_rotation=2).with_quality("fast")
    assert sharing.rotation.steps == FAST_STEPS["shared"]
    for mode, steps in FAST_STEPS.items():
        assert Recipe().replace(mode=mode).with_quality("fast").rotation.steps == steps
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
    assert resolve(Recipe(rotation=RotationConfig(**fields))).rotation.lr == rate


def test_the_default_is_balanced():
    assert resolve(Recipe()) == resolve(Recipe().with_quality("balanced"))


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
    resolved = resolve(recipe, format=format, rotations_given=given)
    assert (resolved.rotation.boundary, resolved.rotation.hessians) == (boundary, hessians)
    for other in ("dense", "packed"):  # a resolved recipe stays as it is
        assert dataclasses.replace(resolve(resolved, format=other, device="cuda"), format=format) == resolved


def test_the_recipe_in_the_manifest_survives_json():
    """A resumed run compares its recipe with the recipe in run.json."""
    for rotation in (RotationConfig(blocks=2), RotationConfig(mode="shared"), RotationConfig()):
        resolved = resolve(Recipe(rotation=rotation))
        written = resolved.to_dict()
        assert json.loads(json.dumps(written)) == written
        assert ResolvedRecipe.from_dict(written, format="dense") == resolved
        assert resolve(Recipe.from_dict(written)) == resolved


def test_a_resolved_recipe_holds_values_only():
    """Whatever a recipe leaves open: a value that `resolve` forgets is refused, not recorded."""
    for mode in ("none", "layer", "shared"):
        for section in resolve(Recipe().replace(mode=mode)).to_dict().values():
            assert not {"auto", None} & {value for value in section.values() if not isinstance(value, list)}
    for wrong in ("auto", None):
        with pytest.raises(UserError, match="`solve` must be one of none, sparsegpt, pcg, admm; got"):
            ResolvedRecipe.from_dict({"pruning": resolve(Recipe()).to_dict()["pruning"] | {"solve": wrong}})


def test_the_descriptions_name_the_defaults():
    """They are docstrings, which cannot hold the values of constants."""
    for section, field, values in (
        (PruningConfig, "damping", (DAMPING, PUBLISHED_DAMPING)),
        (RotationConfig, "steps", [*(each for each, _ in OPTIMIZER_DEFAULTS.values()), *FAST_STEPS.values()]),
        (RotationConfig, "lr", (*(rate for _, rate in OPTIMIZER_DEFAULTS.values()), FAST_ENTROPY_LR)),
        (RotationConfig, "training_tokens", (TRAINING_TOKENS,)),
        (CalibrationConfig, "seqlen", (SEQLEN,)),
        (FinetuneConfig, "lr", FINETUNE_LR.values()),
    ):
        said = re.findall(r"\d[\d.e-]*\d|\d", description_of(section, field).partition("Default: ")[2])
        assert [float(number) for number in said] == list(values), field


def test_a_file_of_the_calibration_may_be_a_path():
    assert CalibrationConfig(source=Path("/texts/a.txt")).source == "/texts/a.txt"
    relative = Recipe().replace(source=Path("wikitext2")).calibration.source
    assert relative == "./wikitext2"  # and not the text on the hub
    with pytest.raises(UserError, match="must be a str; got 3"):
        CalibrationConfig(source=3)


def test_what_the_model_and_the_machine_decide():
    resolved = resolve(Recipe(), positions=512, device="cuda")
    assert (resolved.calibration.seqlen, resolved.rotation.product_dtype) == (512, "bfloat16")
    assert resolve(Recipe().replace(mode="none"), device="cuda").rotation.product_dtype == "float32"
    given = resolve(Recipe().replace(source="text.txt", seqlen=9), positions=512, tokens=(3, 40)).calibration
    assert (given.source, given.nsamples, given.seqlen) == ("tensor", 3, 40)
    assert resolve(Recipe().replace(seqlen=9), positions=4).calibration.seqlen == 9  # prune refuses it
    mixed = Recipe().replace(sparsity="1:3", sparsity_of={"q_proj": "4:8"}, block_size=100)
    assert resolve(mixed).pruning.block_size == 96  # of 3 and 8
    assert resolve(mixed.replace(block_size=5)).pruning.block_size == 24
