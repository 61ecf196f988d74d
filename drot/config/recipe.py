"""The settings of a whole run, and the qualities."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic_core import to_jsonable_python

from drot.config.calibration import CalibrationConfig
from drot.config.pruning import PruningConfig, RecoveryConfig
from drot.config.recipe_file import read_sections
from drot.config.rotation import FAST_STEPS, RotationConfig, with_point
from drot.config.settings import fields_of, settings, values_of
from drot.core.checks import is_a, shortened
from drot.core.errors import UserError

WeightFormat = Literal["dense", "packed"]

#: the fields of a pruning by a method alone, as it was published
ONE_SHOT = {"solve": "none", "target": "self", "recover": "none", "distill_epochs": 0}
#: passes of `best` over further sequences of the text, which train all layers together
DISTILL_EPOCHS = 1
#: how many of these sequences there are for each of the calibration
DISTILL_TEXT = 3
#: Quality → the fields that it sets. docs/choose.md says what each costs and gives.
QUALITIES: dict[str, dict[str, Any]] = {
    "fast": ONE_SHOT | {"solve": "pcg"},
    "balanced": {"solve": "admm", "target": "dense", "recover": "none", "distill_epochs": 0},
    "best": {"solve": "admm", "target": "dense", "recover": "none", "distill_epochs": DISTILL_EPOCHS},
}
#: the sections of a recipe by their names
SECTIONS: dict[str, type] = {
    "rotation": RotationConfig,
    "pruning": PruningConfig,
    "recovery": RecoveryConfig,
    "calibration": CalibrationConfig,
}
#: field of a recipe → its section
SECTION_OF = {field: name for name, section in SECTIONS.items() for field in fields_of(section)}


@settings
class Recipe:
    """All settings that affect the result of `drot.prune`, as the user wishes them.

    Values such as `auto` and None leave the choice to `resolve` (drot/config/resolve.py).
    """

    rotation: RotationConfig = RotationConfig()
    pruning: PruningConfig = PruningConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    calibration: CalibrationConfig = CalibrationConfig()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **more: Any) -> Self:
        """The recipe of a dict of sections and fields, as `to_dict` returns it. Missing fields are defaults.

        Raises UserError that names the field, for an unknown field and for a wrong value.

        more: fields that stand in no section, of a subclass.
        """
        is_a("data", data, Mapping)
        parts: dict[str, Any] = {}
        for name, values in data.items():
            make: Any = fields_of(cls)[known_field(name, SECTIONS, "the recipe")].annotation
            if not isinstance(values, Mapping):
                raise UserError(f"{name} must hold the fields of a section; got {shortened(values)}")
            known = fields_of(make)
            fields = {known_field(key, known, name): value for key, value in values.items()}
            parts[name] = make(**fields)
        return cls(**parts, **more)

    @classmethod
    def from_file(cls, path: str | Path) -> "Recipe":
        """The recipe in a .yaml or .json file, in a drot.json, or in the folder of a checkpoint.

        Raises UserError for a file that is missing or broken, and for a field that is unknown or wrong.
        """
        return read_recipe(path)[0]

    def replace(self, **fields: Any) -> "Recipe":
        """This recipe with other values for fields of its sections, as in `replace(sparsity="4:8", lr=0.1)`.

        No two sections have a field of the same name. `mode` may be a point: stock, light or full. Raises
        UserError for a name that no section has.
        """
        parts = {name: values_of(getattr(self, name)) for name in SECTIONS}
        for name, value in with_point(fields).items():
            parts[SECTION_OF[known_field(name, SECTION_OF, "the recipe")]][name] = value
        return Recipe(**{name: section(**parts[name]) for name, section in SECTIONS.items()})

    def with_quality(self, quality: str) -> "Recipe":
        """This recipe with the fields that `quality` sets: `fast`, `balanced` or `best`.

        `fast` also sets the training steps of the optimizer `fast`, if the recipe rotates and sets none.
        """
        if quality not in QUALITIES:
            raise UserError(f"`quality` must be one of {', '.join(QUALITIES)}; got {shortened(quality)}")
        fields, rotation = dict(QUALITIES[quality]), self.rotation
        trains = rotation.mode != "none" and rotation.optimizer == "fast"
        if quality == "fast" and trains and rotation.steps is None:
            fields["steps"] = FAST_STEPS["shared" if rotation.layers_per_rotation > 1 else rotation.mode]
        return self.replace(**fields)

    def asked(self, quality: str | None, **fields: Any) -> "Recipe":
        """This recipe with `fields`, and with those that `quality` sets of the others, if it is given.

        A quality also sets the steps of the optimizer `fast`: to its own, or to the default.
        """
        recipe = self.replace(**fields)
        if quality is None:
            return recipe
        if "steps" not in fields and recipe.rotation.optimizer == "fast":
            recipe = recipe.replace(steps=None)
        return recipe.with_quality(quality).replace(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Section → field → value, in plain JSON types. The way back through `from_dict` is exact."""
        written: dict[str, Any] = to_jsonable_python(self, include=set(SECTIONS))
        return written


def read_recipe(path: str | Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe in `path`, and the manifest that holds it; {} if the file is a recipe and no manifest.

    path: a .yaml, .yml or .json file with a recipe, a drot.json, or the folder of a checkpoint.

    Raises UserError for a file that is missing or broken, and for a field that is unknown or wrong.
    """
    file, sections, manifest = read_sections(path)
    try:
        return Recipe.from_dict(sections), manifest
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def known_field(name: Any, known: Any, where: str) -> str:
    """`name`, if it is in `known`. Raises UserError that names the nearest name in `known`."""
    if name in known:
        return str(name)
    near = difflib.get_close_matches(str(name), list(known), 1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    raise UserError(f"{where} has no field {shortened(name)}: {hint}")
