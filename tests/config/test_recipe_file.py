"""Recipes in files: a round trip, YAML, manifests, and what is refused."""

import itertools
import json
import os

import pytest

from drot.config import CalibrationConfig, PruningConfig, Recipe, RecoveryConfig, RotationConfig, resolve
from drot.core.errors import UserError

RICH = Recipe(
    rotation=RotationConfig(mode="layer", blocks=2, steps=7, lr=1e-3, hessians="dense"),
    pruning=PruningConfig(
        sparsity=1 / 3, keep=("layers.0.*",), sparsity_of={"down_proj": "4:8", "q_proj": 0.123456789}
    ),
    recovery=RecoveryConfig(recover="block"),
    calibration=CalibrationConfig(source="a.jsonl", nsamples=3, seed=5),
)


@pytest.mark.parametrize("recipe", [RICH, Recipe(), Recipe(rotation=RotationConfig(mode="shared"))])
def test_to_dict_and_back(recipe, tmp_path):
    written = json.loads(json.dumps(recipe.to_dict()))
    assert Recipe.from_dict(written) == recipe
    (tmp_path / "drot.json").write_text(json.dumps({"format_version": 1, "recipe": written}))
    for path in (tmp_path, tmp_path / "drot.json"):
        assert Recipe.from_file(path) == recipe


def test_a_ratio_survives_its_text():
    assert Recipe.from_dict(RICH.to_dict()).pruning.sparsity.ratio == 1 / 3


def test_yaml(tmp_path):
    """YAML 1.1, which PyYAML reads, takes 2:4 for 124, 1e-3 for text and no for false."""
    (tmp_path / "recipe.yaml").write_text(
        "pruning: {sparsity: 2:4, method: wanda, sparsity_of: {down_proj: 4:8, q_proj: 0.25}}\n"
        "rotation: {lr: 1e-3, early_stop: .5, steps: 12, reference_compat: true, layers_per_step: 2}\n"
        "calibration: {source: no, nsamples: 8}\n"
    )
    assert Recipe.from_file(tmp_path / "recipe.yaml") == Recipe(
        pruning=PruningConfig(
            method="wanda", sparsity="2:4", sparsity_of={"down_proj": "4:8", "q_proj": 0.25}
        ),
        rotation=RotationConfig(lr=1e-3, early_stop=0.5, steps=12, reference_compat=True, layers_per_step=2),
        calibration=CalibrationConfig(source="no", nsamples=8),
    )


def test_a_changed_rotation_leaves_the_average_that_a_manifest_records(tmp_path):
    """`mode="none"` alone has the mean, but the recorded share is one of the median."""
    written = {"format_version": 1, "recipe": resolve(Recipe()).to_dict()}
    (tmp_path / "drot.json").write_text(json.dumps(written))
    pruning = resolve(Recipe.from_file(tmp_path).replace(mode="none")).pruning
    assert (pruning.damping, pruning.damping_average) == (0.3, "median")


#: a value of a few lines that stands for a list of 10**9 elements
BOMB = (
    "[&a [x, x, x, x, x, x, x, x, x, x], "
    + ", ".join(
        f"&{name} [{', '.join([f'*{before}'] * 10)}]" for before, name in itertools.pairwise("abcdefghi")
    )
    + "]"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pruning: {sparsty: 2:4}", "pruning has no field 'sparsty': did you mean sparsity?"),
        ("prunning: {}", "the recipe has no field 'prunning': did you mean pruning?"),
        ("x: {}", "the recipe has no field 'x': it has rotation, pruning, recovery, calibration"),
        ("pruning: 2:4", "pruning must hold the fields of a section; got '2:4'"),
        ("rotation: {steps: many}", "`steps` must be a whole number from 0 to 1000000; got 'many'"),
        ("rotation: {steps: true}", "`steps` must be a whole number"),
        ("rotation: {lr: fast}", "`lr` must be a finite number above 0; got 'fast'"),
        ("rotation: {lr: 4}", "`lr` must be a finite number above 0 and at most 3.14159; got 4.0"),
        ("rotation: {reference_compat: 1}", "`reference_compat` must be a bool; got 1"),
        ("rotation: {blocks: two}", "`blocks` must be a whole number"),
        ("rotation: {mode: [layer]}", "`mode` must be one of"),
        ("pruning: {keep: 3}", "`keep` must be patterns"),
        ("pruning: {sparsity_of: 3}", "`sparsity_of` must be PATTERN=SPARSITY"),
        ("pruning: {sparsity_of: [3]}", "`sparsity_of` must be PATTERN=SPARSITY"),
        ("pruning: {sparsity: true}", "`sparsity` must be a ratio"),
        ("pruning: {damping: low}", "`damping` must be a finite number"),
        ("pruning: {damping_average: mode}", "`damping_average` must be one of mean, median; got 'mode'"),
        ("pruning: {target_weight: null}", "`target_weight` must be"),
        ("recovery: {recover_lr: a}", "`recover_lr` must be a finite number above 0"),
        ("calibration: {source: 4}", "`source` must be a str; got 4"),
        ("calibration: {text_column: null}", "`text_column` must be a str; got None"),
        ("- a\n- b", "must hold the sections of a recipe, got list"),
        ("a: 1\nb: [", "is not valid YAML (line 2: "),
        ("a: " + "[" * 5000, "is nested too deeply"),
        ("rotation: {steps: " + "9" * 5000 + "}", "is not valid YAML"),
        ("rotation: {steps: !!timestamp now}", "is not valid YAML"),
        ("rotation: {steps: !!bool maybe}", "is not valid YAML"),
        ("a: !!python/object/apply:os.system [exit]", "is not valid YAML"),
        (f"pruning: {{sparsity: {10**400}}}", "`sparsity` must be a ratio"),
        (f"rotation: {{lr: {10**400}}}", "`lr` must be a finite number"),
        (f"rotation: {{steps: {BOMB}}}", "`steps` must be a whole number"),
        (f"rotation: {BOMB}", "rotation must hold the fields of a section; got [['x', "),
        (f"pruning: {{keep: [{BOMB}]}}", "`keep` must be patterns"),
        (
            f"pruning: {{sparsity_of: {{q_proj: {BOMB}}}}}",
            "the sparsity of q_proj in `sparsity_of` must be a ratio",
        ),
        (f"pruning: {{sparsity: {BOMB}}}", "`sparsity` must be a ratio"),
        ("rotation: " + "x" * 100_000, "rotation must hold the fields of a section; got 'xxx"),
        ("rotation: {steps: 1000000000000}", "`steps` must be a whole number from 0 to 1000000"),
        ("recipe: 3", "holds no recipe"),
        ("rotation: {steps: 4}\npruning: {}\nrotation: {lr: 1}", "line 3: 'rotation' stands twice"),
        ("rotation:\n  steps: 4\n  lr: 1\n  steps: 5", "line 4: 'steps' stands twice"),
        ("a: &a {b: 1}\nc: {!!merge <<: [*a, *a]}", "line 2: merge keys are not read"),
        ("a: " + "x" * 2**20, "must have at most 1048576 bytes"),
    ],
)
def test_one_line_that_names_the_field(tmp_path, content, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        Recipe.from_file(file)
    assert message in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_recipe_file(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "twice.json").write_text('{"rotation": {"steps": 4,\n"steps": 5}}')
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\xfa")
    for name, message in {
        "a.txt": "must be a .yaml or .json file",
        "none.yaml": "none.yaml does not exist",
        "a.json": "is not valid JSON",
        "twice.json": "'steps' stands twice in one object, see lines 1, 2",
        "pipe.yaml": "must be a file, got a pipe",
        "b.yaml": "must be UTF-8",
        ".": "drot.json does not exist",
    }.items():
        with pytest.raises(UserError, match=message):
            Recipe.from_file(tmp_path / name)


def test_replace_finds_the_section():
    recipe = Recipe().replace(sparsity="4:8", lr=0.1, seed=3)
    assert (str(recipe.pruning.sparsity), recipe.rotation.lr, recipe.calibration.seed) == ("4:8", 0.1, 3)
    with pytest.raises(UserError, match="the recipe has no field 'sparsityy': did you mean sparsity"):
        Recipe().replace(sparsityy=1)


def test_no_two_sections_share_a_field():
    """`replace` finds the section of a field by the field's name."""
    names = [name for section in Recipe().to_dict().values() for name in section]
    assert len(names) == len(set(names))


def test_numbers_and_words_are_those_of_yaml_1_2(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("calibration: {nsamples: 010}\nrotation: {down_rotation: 064, reference_compat: True}")
    found = Recipe.from_file(file)
    assert (found.calibration.nsamples, found.rotation.down_rotation) == (10, 64)
    assert found.rotation.reference_compat is True
