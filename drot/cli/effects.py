"""The check of `drot prune` for options that would have no effect."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from drot.config import Recipe, RotationConfig
from drot.core.errors import UserError

#: fields of RotationConfig that matter for given rotations too
NOT_TRAINING = ("mode", "blocks", "boundary")
#: fields of RotationConfig that only the training reads
TRAINING = tuple(f.name for f in dataclasses.fields(RotationConfig) if f.name not in NOT_TRAINING)

Condition = tuple[str, Callable[[Recipe, bool], bool], tuple[str, ...]]

#: Conditions under which options have no effect: the condition in words; a function of the recipe, and of
#: whether --rotations was given, that tests it; and the fields of the options without effect.
#: An option without effect is a mistake on a command line. Recipe itself accepts it, because a program may
#: vary one setting of a recipe and leave the others as they are.
WITHOUT_EFFECT: tuple[Condition, ...] = (
    (
        "--rotation none",
        lambda recipe, given: recipe.rotation.mode == "none",
        (*TRAINING, "rotations", "save_rotations_to"),
    ),
    ("--rotations FILE", lambda recipe, given: given, (*TRAINING, "blocks")),
    (
        "--rotation other than shared",
        lambda recipe, given: recipe.rotation.mode != "shared",
        ("layers_per_step",),
    ),
    ("--layers-per-step", lambda recipe, given: recipe.rotation.layers_per_step is not None, ("early_stop",)),
    ("--optimizer paper", lambda recipe, given: recipe.rotation.optimizer == "paper", ("early_stop",)),
    (
        "--method other than sparsegpt",
        lambda recipe, given: recipe.pruning.method != "sparsegpt",
        ("reference_compat",),
    ),
    (
        "--method other than sparsegpt and --solve other than sparsegpt",
        lambda recipe, given: "sparsegpt" not in (recipe.pruning.method, recipe.solve),
        ("block_size",),
    ),
    (
        "--method other than sparsegpt, --solve none and --target self",
        lambda recipe, given: (
            recipe.pruning.method != "sparsegpt" and (recipe.solve, recipe.target) == ("none", "self")
        ),
        ("damping", "damping_average"),
    ),
    ("--target self", lambda recipe, given: recipe.target == "self", ("target_weight",)),
    (
        "--recover none",
        lambda recipe, given: recipe.recovery.recover == "none",
        ("recover_epochs", "recover_lr", "recover_batch"),
    ),
    ("a .txt file", lambda recipe, given: recipe.calibration.source.endswith(".txt"), ("text_column",)),
)
#: as in WITHOUT_EFFECT, for a run that prunes
NO_TEXT: Condition = (
    "--method magnitude --rotation none, which reads a text only if --calibration names one",
    lambda recipe, given: not recipe.reads_calibration,
    ("nsamples", "seqlen", "seed", "text_column"),
)


def check_effects(recipe: Recipe, start: Recipe, *, measures: bool = False, **files: Path | None) -> None:
    """Raises UserError that names the options that changed a field of the recipe but have no effect.

    recipe: the recipe with the options of the command line.
    start: the recipe without them: the defaults, or the recipe of a file.
    measures: whether --sensitivity was given, which reads calibration text with every recipe.
    files: the options `rotations` and `save_rotations_to`, which are not part of the recipe.
    """
    changed = {name for name, file in files.items() if file is not None}
    for section in dataclasses.fields(recipe):
        part, before = getattr(recipe, section.name), getattr(start, section.name)
        fields = (field.name for field in dataclasses.fields(part))
        changed |= {name for name in fields if getattr(part, name) != getattr(before, name)}
    table = WITHOUT_EFFECT if measures else (*WITHOUT_EFFECT, NO_TEXT)
    for condition, applies, fields_without_effect in table:
        idle = [name for name in fields_without_effect if name in changed]
        if idle and applies(recipe, files["rotations"] is not None):
            verb = "have" if len(idle) > 1 else "has"
            options = ", ".join(f"`{name}`" for name in idle)
            raise UserError(f"{options} {verb} no effect with {condition}: leave one or the other out")


def check_no_output(**options: object) -> None:
    """Raises UserError that names the options of a written model that were given with --sensitivity."""
    if given := [f"`{name}`" for name, value in options.items() if value]:
        verb = "have" if len(given) > 1 else "has"
        raise UserError(
            f"{', '.join(given)} {verb} no effect with --sensitivity, which writes no model: leave one or "
            "the other out"
        )
