"""The check of `drot prune` for options that would have no effect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from drot.cli.recipe import AskedRecipe
from drot.config import ResolvedRecipe, RotationConfig, resolve
from drot.config.recipe import SECTIONS
from drot.config.settings import fields_of, values_of
from drot.core.errors import UserError
from drot.text.mixture import texts_of

#: fields of RotationConfig that matter for given rotations too
NOT_TRAINING = ("mode", "blocks", "layers_per_rotation", "down_rotation", "boundary")
#: fields of RotationConfig that only the training reads
TRAINING = tuple(name for name in fields_of(RotationConfig) if name not in NOT_TRAINING)

Condition = tuple[str, Callable[[ResolvedRecipe, bool], bool], tuple[str, ...]]

#: Conditions under which options have no effect: the condition in words; a function of the recipe, and of
#: whether --rotations was given, that tests it; and the fields of the options without effect.
#: An option without effect is a mistake on a command line. Recipe itself accepts it, because a program may
#: vary one setting of a recipe and leave the others as they are.
WITHOUT_EFFECT: tuple[Condition, ...] = (
    (
        "--rotation none",
        lambda recipe, given: recipe.rotation.mode == "none",
        (*TRAINING, "down_rotation", "rotations", "save_rotations_to"),
    ),
    (
        "--objective entropy",
        lambda recipe, given: recipe.rotation.objective == "entropy",
        ("output_weights",),
    ),
    (
        "--rotation stock, light or shared",
        lambda recipe, given: recipe.rotation.mode == "shared",
        ("hessians",),
    ),
    (
        "--rotation none, stock, light or shared",
        lambda recipe, given: recipe.rotation.mode != "layer",
        ("layers_per_rotation",),
    ),
    ("--rotations FILE", lambda recipe, given: given, (*TRAINING, "blocks")),
    (
        "--rotation other than shared",
        lambda recipe, given: recipe.rotation.mode != "shared",
        ("layers_per_step",),
    ),
    ("--layers-per-step", lambda recipe, given: recipe.rotation.layers_per_step > 0, ("early_stop",)),
    ("--optimizer paper", lambda recipe, given: recipe.rotation.optimizer == "paper", ("early_stop",)),
    (
        "--method other than sparsegpt",
        lambda recipe, given: recipe.pruning.method != "sparsegpt",
        ("reference_compat",),
    ),
    (
        "--method other than sparsegpt and --solve other than sparsegpt",
        lambda recipe, given: "sparsegpt" not in (recipe.pruning.method, recipe.pruning.solve),
        ("block_size",),
    ),
    (
        "--method other than sparsegpt, --solve none and --target self",
        lambda recipe, given: (
            recipe.pruning.method != "sparsegpt"
            and (recipe.pruning.solve, recipe.pruning.target) == ("none", "self")
        ),
        ("damping", "damping_average"),
    ),
    ("--target self", lambda recipe, given: recipe.pruning.target == "self", ("target_weight",)),
    (
        "--recover none",
        lambda recipe, given: recipe.recovery.recover == "none",
        ("recover_epochs", "recover_lr", "recover_batch"),
    ),
    (
        "--distill-epochs 0",
        lambda recipe, given: not recipe.recovery.distill_epochs,
        ("distill_nsamples", "distill_lr", "distill_batch"),
    ),
    (
        "a .txt file",
        lambda recipe, given: all(text.endswith(".txt") for text, _ in texts_of(recipe.calibration.source)),
        ("text_column",),
    ),
)
#: as in WITHOUT_EFFECT, for a run that prunes
NO_TEXT: Condition = (
    "--method magnitude --rotation none, which reads a text only if --calibration names one",
    lambda recipe, given: not recipe.reads_calibration,
    ("nsamples", "seqlen", "seed", "text_column", "token_weights"),
)


def check_effects(asked: AskedRecipe, *, measures: bool = False, **files: Path | None) -> None:
    """Raises UserError that names the options that changed a field of the recipe but have no effect.

    asked: the recipe of the command line.
    measures: whether --sensitivity was given, which reads calibration text with every recipe.
    files: the options `rotations` and `save_rotations_to`, which are not part of the recipe.
    """
    changed = {name for name, file in files.items() if file is not None}
    for section in SECTIONS:
        before, after = (values_of(getattr(recipe, section)) for recipe in (asked.start, asked.recipe))
        changed |= {name for name, value in after.items() if value != before[name]}
    recipe = resolve(asked.recipe)
    table = WITHOUT_EFFECT if measures else (*WITHOUT_EFFECT, NO_TEXT)
    for condition, applies, fields_without_effect in table:
        idle = [name for name in fields_without_effect if name in changed]
        if idle and applies(recipe, files["rotations"] is not None):
            _refuse(idle, f"with {condition}")


def check_no_output(asked: AskedRecipe, given: dict[str, Any]) -> None:
    """Raises UserError that names options which --sensitivity does not take.

    They are those of a written model, --dry-run and --gpus.
    """
    written = ["out", "fit", "resume", "save_rotations_to", "format", "save_dtype", "dry_run", "gpus"]
    trainings = ("recover", "distill_epochs")
    before, after = asked.start.recovery, asked.recipe.recovery
    changed = [name for name in trainings if getattr(before, name) != getattr(after, name)]
    written += [name if name in given else "quality" for name in changed]
    if idle := [name for name in dict.fromkeys(written) if name in given]:
        _refuse(idle, "with --sensitivity")


def _refuse(names: list[str], condition: str) -> None:
    verb = "have" if len(names) > 1 else "has"
    options = ", ".join(f"`{name}`" for name in names)
    raise UserError(f"{options} {verb} no effect {condition}: leave one or the other out")
