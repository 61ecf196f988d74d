"""The recipe of a command line of `drot prune`, and what is said about a recipe in a file and its run."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from drot.config import Recipe, RotationMode
from drot.config.recipe import SECTION_OF
from drot.config.recipe_file import read_recipe
from drot.core.errors import UserError

if TYPE_CHECKING:
    from drot.manifest.manifest import Manifest

logger = logging.getLogger("drot")


def recipe_and_manifest(file: Path) -> "tuple[Recipe, Manifest | None]":
    """The recipe in `file`, and the manifest that holds it; None if the file is no manifest.

    Raises UserError as `read_recipe` does, and for a manifest with wrong entries.
    """
    from drot.core.reading import check_schema
    from drot.manifest.manifest import Manifest

    recipe, entries = read_recipe(file)
    return recipe, check_schema(Manifest, entries, str(file)) if entries else None


def recipe_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Field of the recipe → value, from the options of a command line.

    given: name of the parameter → value, for the options that were given. Options that are no setting of the
        recipe, such as `out`, are left out.
    """
    out = {name: value for name, value in given.items() if name in SECTION_OF}
    out |= {name: tuple(out[name]) for name in ("keep", "sparsity_of") if name in out}
    if "rotation" in given:
        out["mode"], out["blocks"] = parse_rotation(given["rotation"])
    if "calibration" in given:
        out["source"] = given["calibration"]
    return out


def parse_rotation(text: str) -> tuple[RotationMode, int]:
    """`mode` and `blocks` of RotationConfig for a value of --rotation. Raises UserError for another value."""
    if text in get_args(RotationMode):
        return cast(RotationMode, text), 1
    name, _, blocks = text.partition(":")
    if name != "block":
        expected = ", ".join(get_args(RotationMode))
        raise UserError(f"--rotation must be one of {expected}, block:N; got {text!r}")
    try:
        return "layer", int(blocks)
    except ValueError:
        raise UserError(
            f"--rotation block:N needs a whole number of blocks, as in block:4; got {text!r}"
        ) from None


def tell_changes(start: Recipe, changed: Recipe, file: Path) -> None:
    """Logs the fields of the recipe in `file` that the command line has replaced."""
    before, after = start.to_dict(), changed.to_dict()
    differing = [
        f"{section}.{name} {before[section][name]} -> {value}"
        for section, values in after.items()
        for name, value in values.items()
        if value != before[section][name]
    ]
    if differing:
        logger.warning("the command line replaces settings of %s: %s", file, ", ".join(differing))


def check_rotations_file(manifest: "Manifest", rotations: Path | None) -> None:
    """Raises UserError if the run of `manifest` used a file of rotations and none is given now."""
    if (used := manifest.rotations_file) and rotations is None:
        raise UserError(
            f"the run of this recipe used the rotations in {used.file} (SHA-256 {used.sha256[:12]}…): "
            "name that file as `rotations`"
        )


def tell_other_input(before: "Manifest", now: "Manifest") -> None:
    """Logs a warning if the run whose manifest is `before` had other calibration tokens or rotations."""
    old, new = before.rotations_file, now.rotations_file
    changed = {
        "calibration tokens": before.calibration.sha256 != now.calibration.sha256,
        "rotations": old is not None and (new is None or old.sha256 != new.sha256),
    }
    for what, differ in changed.items():
        if differ:
            logger.warning("the %s differ from those of the run that is repeated: so does the result", what)
