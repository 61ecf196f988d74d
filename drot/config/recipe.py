"""The settings of a whole run, and the qualities."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from drot.config.calibration import CalibrationConfig
from drot.config.pruning import DAMPING, PUBLISHED_DAMPING, PruningConfig, RecoveryConfig
from drot.config.rotation import TRAINING_TOKENS, RotationConfig
from drot.core.checks import is_a, shortened
from drot.core.errors import UserError

WeightFormat = Literal["dense", "packed"]

#: Quality → the fields that it sets. What each quality costs and gives stands in README.md.
QUALITIES: dict[str, dict[str, Any]] = {
    "fast": {"solve": "none", "target": "self", "recover": "none"},
    "balanced": {"solve": "admm", "target": "dense", "recover": "none"},
    "best": {"solve": "admm", "target": "dense", "recover": "block"},
}
#: Training steps of the quality `fast` with the optimizer `fast`. What fewer and more
#: steps cost and give stands in benchmarks/README.md.
FAST_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings that affect the result of `drot.prune`."""

    rotation: RotationConfig = field(default_factory=RotationConfig)
    pruning: PruningConfig = field(default_factory=PruningConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def __post_init__(self) -> None:
        for part in dataclasses.fields(self):
            is_a(part.name, getattr(self, part.name), part.default_factory)  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        """The recipe of a dict of sections and fields, as `to_dict` returns it. Missing fields are defaults.

        Raises UserError that names the field, for an unknown field and for a wrong value.
        """
        parts = {}
        sections = {section.name: section.default_factory for section in dataclasses.fields(cls)}
        for name, values in data.items():
            make: Any = sections[known_field(name, sections, "the recipe")]
            if not isinstance(values, Mapping):
                raise UserError(f"{name} must hold the fields of a section; got {shortened(values)}")
            known = [part.name for part in dataclasses.fields(make)]
            parts[name] = make(**{known_field(key, known, name): value for key, value in values.items()})
        return cls(**parts)

    @classmethod
    def from_file(cls, path: str | Path) -> "Recipe":
        """The recipe in a .yaml or .json file, in a drot.json, or in the folder of a checkpoint.

        Raises UserError as `read_recipe` of drot/config/recipe_file.py does.
        """
        from drot.config.recipe_file import read_recipe

        return read_recipe(path)[0]

    def replace(self, **fields: Any) -> "Recipe":
        """This recipe with other values for fields of its sections, as in `replace(sparsity="4:8", lr=0.1)`.

        No two sections have a field of the same name. Raises UserError for a name that no section has.
        """
        parts = {section.name: getattr(self, section.name) for section in dataclasses.fields(self)}
        changes: dict[str, dict[str, Any]] = {name: {} for name in parts}
        for name, value in fields.items():
            changes[SECTION_OF[known_field(name, SECTION_OF, "the recipe")]][name] = value
        for section, values in changes.items():
            parts[section] = dataclasses.replace(parts[section], **values)
        return Recipe(**parts)

    def for_format(self, format: str, *, rotations_given: bool = False) -> "Recipe":
        """This recipe with the fields resolved whose `auto` depends on the format (RotationConfig)."""
        rotation = self.rotation.for_format(format, rotations_given=rotations_given)
        return dataclasses.replace(self, rotation=rotation)

    @property
    def objective(self) -> str:
        """The objective, with `auto` resolved."""
        return "pruned" if self.rotation.objective == "auto" else self.rotation.objective

    @property
    def damping(self) -> float:
        """`damping` of the pruning, with None resolved."""
        if self.pruning.damping is not None:
            return self.pruning.damping
        return PUBLISHED_DAMPING if self._published else DAMPING

    @property
    def damping_average(self) -> str:
        """`damping_average` of the pruning, with None resolved."""
        return self.pruning.damping_average or ("mean" if self._published else "median")

    @property
    def training_tokens(self) -> int:
        """`training_tokens` of the rotation, with None resolved."""
        if self.rotation.training_tokens is not None:
            return self.rotation.training_tokens
        return 0 if self._published else TRAINING_TOKENS

    def training_nsamples(self, nsamples: int, seqlen: int, hidden_size: int) -> int:
        """How many of the calibration sequences train the rotations (`training_tokens`)."""
        if not self.training_tokens:
            return nsamples
        return min(nsamples, -(-self.training_tokens * hidden_size // seqlen))

    @property
    def solve(self) -> str:
        """`solve` of the pruning, with `auto` resolved."""
        return self._resolved("solve")

    @property
    def target(self) -> str:
        """`target` of the pruning, with `auto` resolved."""
        return self._resolved("target")

    @property
    def reads_calibration(self) -> bool:
        """Whether a run of `drot.prune` reads calibration text.

        Magnitude pruning of a model that is not rotated needs the weights alone. It reads a text that is not
        the default, for the figure `output_error`.
        """
        weights_alone = (
            self.rotation.mode == "none"
            and self.pruning.method == "magnitude"
            and (self.solve, self.target, self.recovery.recover) == ("none", "self", "none")
        )
        return not weights_alone or self.calibration.source != CalibrationConfig.source

    def _resolved(self, name: str) -> str:
        """A field of the pruning; for `auto` the value of `balanced`, or of `fast` for a published method."""
        value = str(getattr(self.pruning, name))
        return value if value != "auto" else str(QUALITIES["fast" if self._published else "balanced"][name])

    @property
    def _published(self) -> bool:
        """Whether the run reproduces a published method."""
        rotation = self.rotation
        return rotation.mode == "none" or rotation.optimizer == "paper" or rotation.reference_compat

    def with_quality(self, quality: str) -> "Recipe":
        """This recipe with the fields that `quality` sets: `fast`, `balanced` or `best`.

        `fast` also sets the training steps of the optimizer `fast`, if the recipe rotates and sets none.
        """
        if quality not in QUALITIES:
            raise UserError(f"`quality` must be one of {', '.join(QUALITIES)}; got {shortened(quality)}")
        fields, rotation = dict(QUALITIES[quality]), self.rotation
        trains = rotation.mode != "none" and rotation.optimizer == "fast"
        if quality == "fast" and trains and rotation.steps is None:
            fields["steps"] = FAST_STEPS
        return self.replace(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The recipe in plain JSON types, with every default resolved. A round trip through JSON is exact."""
        out = dataclasses.asdict(self)
        out["pruning"]["sparsity"] = str(self.pruning.sparsity)
        out["pruning"]["keep"] = list(self.pruning.keep)
        out["pruning"]["sparsity_of"] = [f"{pattern}={of}" for pattern, of in self.pruning.sparsity_of]
        if isinstance(self.rotation.blocks, tuple):
            out["rotation"]["blocks"] = list(self.rotation.blocks)
        out["rotation"]["hessians"] = self.rotation.resolved_hessians
        out["rotation"]["boundary"] = self.rotation.resolved_boundary
        out["rotation"]["steps"] = self.rotation.resolved_steps
        out["rotation"]["lr"] = self.rotation.resolved_lr
        out["rotation"]["training_tokens"] = self.training_tokens
        out["rotation"]["objective"] = self.objective
        out["pruning"] |= {"solve": self.solve, "target": self.target}
        out["pruning"] |= {"damping": self.damping, "damping_average": self.damping_average}
        out["pruning"]["block_size"] = self.pruning.resolved_block_size
        return out


#: field of a recipe → its section
SECTION_OF = {
    field.name: section.name
    for section in dataclasses.fields(Recipe)
    for field in dataclasses.fields(section.default_factory)  # type: ignore[arg-type]
}


def known_field(name: Any, known: Any, where: str) -> str:
    """`name`, if it is in `known`. Raises UserError that names the nearest name in `known`."""
    if name in known:
        return str(name)
    near = difflib.get_close_matches(str(name), list(known), 1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    raise UserError(f"{where} has no field {shortened(name)}: {hint}")
