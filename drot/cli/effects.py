"""The check of `drot prune` for options that would have no effect."""

from collections.abc import Iterator, Sequence
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


def _without_effect(
    recipe: ResolvedRecipe, *, given: bool, measures: bool
) -> Iterator[tuple[str, Sequence[str]]]:
    """Each condition that holds, in words, with the fields of the options that have no effect then.

    An option without effect is a mistake on a command line. Recipe itself accepts it, because a program may
    vary one setting of a recipe and leave the others as they are.

    given, measures: whether --rotations and --sensitivity were given.
    """
    rotation, pruning, recovery = recipe.rotation, recipe.pruning, recipe.recovery
    sparsegpt = pruning.method == "sparsegpt"
    if rotation.mode == "none":
        yield "--rotation none", (*TRAINING, "down_rotation", "rotations", "save_rotations_to")
    if rotation.objective == "entropy":
        yield "--objective entropy", ["output_weights"]
    if rotation.mode == "shared":
        yield "--rotation stock, light or shared", ["hessians"]
    if rotation.mode != "layer":
        yield "--rotation none, stock, light or shared", ["layers_per_rotation"]
    if given:
        yield "--rotations FILE", (*TRAINING, "blocks")
    if rotation.mode != "shared":
        yield "--rotation other than shared", ["layers_per_step"]
    if rotation.layers_per_step > 0:
        yield "--layers-per-step", ["early_stop"]
    if rotation.optimizer == "paper":
        yield "--optimizer paper", ["early_stop"]
    if not sparsegpt:
        yield "--method other than sparsegpt", ["reference_compat"]
    if not sparsegpt and pruning.solve != "sparsegpt":
        yield "--method other than sparsegpt and --solve other than sparsegpt", ["block_size"]
    if not sparsegpt and (pruning.solve, pruning.target) == ("none", "self"):
        yield (
            "--method other than sparsegpt, --solve none and --target self",
            ["damping", "damping_average"],
        )
    if pruning.target == "self":
        yield "--target self", ["target_weight"]
    if recovery.recover == "none":
        yield "--recover none", ["recover_epochs", "recover_lr", "recover_batch"]
    if not recovery.distill_epochs:
        yield "--distill-epochs 0", ["distill_nsamples", "distill_lr", "distill_batch"]
    if all(text.endswith(".txt") for text, _ in texts_of(recipe.calibration.source)):
        yield "a .txt file", ["text_column"]
    if not recipe.reads_calibration and not measures:
        yield (
            "--method magnitude --rotation none, which reads a text only if --calibration names one",
            ["nsamples", "seqlen", "seed", "text_column", "token_weights"],
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
    conditions = _without_effect(
        resolve(asked.recipe), given=files["rotations"] is not None, measures=measures
    )
    for condition, fields in conditions:
        if idle := [name for name in fields if name in changed]:
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
