"""The recipe of a command line of `drot prune`, and what is said about a recipe in a file and its run."""

import contextlib
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.filesize import decimal as size_text

from drot.cli.log import tell
from drot.cli.messages import flag
from drot.config import Recipe, RotationMode, resolve
from drot.config.recipe import SECTION_OF, read_recipe
from drot.config.resolve import is_published
from drot.config.rotation import POINTS, with_point
from drot.core.errors import UserError
from drot.core.reading import leaves

logger = logging.getLogger("drot")


#: setting → what follows from it where it is left open, or fits only some of its values
FOLLOWING = {
    "mode": ("boundary", "hessians", "layers_per_rotation", "down_rotation"),
    "boundary": ("hessians",),
    "layers_per_rotation": ("hessians",),
    "optimizer": ("steps", "lr"),
    "objective": ("lr", "output_weights"),
    "token_weights": ("output_weights",),
    "format": ("boundary", "hessians"),
}
#: what follows from `is_published` for the rotation; the settings of the pruning stay those of the run
OF_PUBLISHED = ("training_tokens", "down_rotation")


@dataclass(frozen=True)
class AskedRecipe:
    """The recipe of a command line.

    recipe: the recipe with the options of the command line.
    start: the recipe without the options that set its fields: the defaults, or the recipe of a file.
    manifest: the manifest that holds `start`; {} if it stands in none.
    """

    recipe: Recipe
    start: Recipe
    manifest: dict[str, Any]


def asked_recipe(file: Path | None, given: dict[str, Any], quality: str | None) -> AskedRecipe:
    """The recipe of a command line. Logs the fields of the recipe in `file` that its options replace.

    Args:
        file: the value of --recipe.
        given: name of the parameter → value, for the options that were given.
        quality: the value of --quality, which sets what the other options do not.
    """
    start, manifest = (Recipe(), {}) if file is None else read_recipe(file)
    fields = recipe_fields(given)
    # of the run: its result may have been converted since
    before, format = start, (manifest.get("identity") or {}).get("format") or manifest.get("format")
    formats = format or given.get("format", "dense"), given.get("format", format or "dense")
    if manifest.get("finetune"):
        logger.warning("the fine-tuning of %s is not repeated: the recipe is that of its run", file)
    if manifest:
        start = _opened(start, fields, formats)
    recipe = start.asked(quality, **fields)
    if file is not None:
        _tell_changes((before, recipe), formats, file)
    if "steps" not in fields:  # those of a quality may be without effect, which is no mistake
        start = start.replace(steps=recipe.rotation.steps)
    return AskedRecipe(recipe, start, manifest)


def _opened(start: Recipe, fields: dict[str, Any], formats: tuple[str, str]) -> Recipe:
    """`start` with the defaults of what follows from other settings, where `fields` change those alone.

    start: the recipe of a run, which has the values that followed. They may not fit the settings that replace
        its own.
    formats: of the weights, in that run and now.
    """

    def value(recipe: Recipe, name: str) -> Any:
        return getattr(getattr(recipe, SECTION_OF[name]), name)

    causes = [name for name in FOLLOWING if name in fields and fields[name] != value(start, name)]
    if formats[0] != formats[1]:
        causes.append("format")
    names = {name for cause in causes for name in FOLLOWING[cause]}
    decides = {name: value(start, name) for name in ("mode", "optimizer", "reference_compat")}
    changed = {name: fields.get(name, before) for name, before in decides.items()}
    if is_published(**decides) != is_published(**changed):
        names.update(OF_PUBLISHED)
    if "mode" in causes and start.rotation.mode == "none":  # nothing was trained
        names.add("output_weights")
    return start.replace(**{name: value(Recipe(), name) for name in names - fields.keys()})


def run_settings(asked: AskedRecipe, given: dict[str, Any], **values: str) -> dict[str, Any]:
    """`values` of format and dtypes; for an option that was not given, the value in the manifest."""
    entries = {"format": "format", "dtype": "compute_dtype", "save_dtype": "dtype"}
    before = {name: asked.manifest.get(entry) for name, entry in entries.items() if name not in given}
    return values | {name: value for name, value in before.items() if value is not None}


def fit_recipe(
    asked: AskedRecipe, size: str | None, model: str, given: dict[str, Any], **options: Any
) -> AskedRecipe:
    """The recipe whose run fits into the memory `size`, the value of --fit, and says what was changed.

    Without a size it is the recipe as it was asked for.

    given: the options of the command line, which stay as they are.
    options: further arguments of `fitted`.
    """
    if size is None:
        return asked
    memory = parse_size(size)
    from drot.pipeline.dry_run import fitted

    chosen = fitted(model, asked.recipe, memory, fixed=recipe_fields(given), **options)
    before, after = size_text(chosen.asked), size_text(chosen.needed)
    if chosen.changes:
        settings = " ".join(f"{flag(field)} {value}" for field, value in chosen.changes.items())
        tell(f"drot: --fit {size} chose {settings}: about {after} on the device instead of {before}")
    else:
        tell(f"drot: --fit {size} changed nothing: the run needs about {after} on the device")
    return dataclasses.replace(asked, recipe=chosen.recipe)


def parse_size(text: str) -> int:
    """The bytes in a size such as 24GB. Raises UserError for other texts, and for sizes below 1 MB."""
    with contextlib.suppress(ValidationError):
        if (size := TypeAdapter(ByteSize).validate_python(text)) >= 1e6:
            return int(size)
    raise UserError(f"`fit` must be a size of at least 1 MB, as in 24GB; got {text!r}")


def recipe_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Field of the recipe → value, from the options of a command line.

    given: name of the parameter → value, for the options that were given. Options that are no setting of the
        recipe, such as `out`, are left out.
    """
    fields = {name: value for name, value in given.items() if name in SECTION_OF}
    if "rotation" in given:
        fields = with_point(parse_rotation(given["rotation"]) | fields)
    if "calibration" in given:
        fields["source"] = given["calibration"]
    return fields


def parse_rotation(text: str) -> dict[str, Any]:
    """The fields of RotationConfig for a value of --rotation. Raises UserError for another value."""
    if text in (*get_args(RotationMode), *POINTS):
        return {"mode": text, "blocks": 1}
    name, _, blocks = text.partition(":")
    if name != "block":
        expected = ", ".join((*get_args(RotationMode), *POINTS))
        raise UserError(f"--rotation must be one of {expected}, block:N; got {text!r}")
    try:
        return {"mode": "layer", "blocks": int(blocks)}
    except ValueError:
        raise UserError(
            f"--rotation block:N needs a whole number of blocks, as in block:4; got {text!r}"
        ) from None


def _tell_changes(recipes: tuple[Recipe, Recipe], formats: tuple[str, str], file: Path) -> None:
    """recipes, formats: that of the file, and that of the command line."""
    before, after = (
        {"format": format, **dict(leaves(resolve(recipe, format=format).to_dict()))}
        for recipe, format in zip(recipes, formats, strict=True)
    )
    differing = [
        f"{name} {before[name]} -> {value}" for name, value in after.items() if value != before[name]
    ]
    if differing:
        logger.warning("the command line replaces settings of %s: %s", file, ", ".join(differing))


def check_rotations_file(manifest: dict[str, Any], rotations: Path | None) -> None:
    """Raises UserError if the run of `manifest` used a file of rotations and none is given now."""
    if (used := manifest.get("rotations_file")) and rotations is None:
        raise UserError(
            f"the run of this recipe used the rotations in {used['file']} (SHA-256 {used['sha256'][:12]}…): "
            "name that file as `rotations`"
        )
