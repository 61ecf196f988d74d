"""What `drot prune --recipe` says about the recipe in a file and about the run that it repeats."""

import logging
from pathlib import Path
from typing import Any

from drot.config import Recipe
from drot.errors import UserError

logger = logging.getLogger("drot")


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


def check_rotations_file(manifest: dict[str, Any], rotations: Path | None) -> None:
    """Raises UserError if the run of `manifest` used a file of rotations and none is given now."""
    if (used := manifest.get("rotations_file")) and rotations is None:
        raise UserError(
            f"the run of this recipe used the rotations in {used['file']} (SHA-256 {used['sha256'][:12]}…): "
            "name that file as `rotations`"
        )


def tell_other_input(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Logs a warning if the run whose manifest is `before` had other calibration tokens or rotations."""
    for entry, what in (("calibration", "calibration tokens"), ("rotations_file", "rotations")):
        old, new = ((manifest.get(entry) or {}).get("sha256") for manifest in (before, now))
        if old is not None and old != new:
            logger.warning("the %s differ from those of the run that is repeated: so does the result", what)
