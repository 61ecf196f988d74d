"""The settings of a whole run, and the qualities."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from drot.config.calibration import CalibrationConfig
from drot.config.checks import is_a
from drot.config.pruning import PruningConfig, RecoveryConfig
from drot.config.rotation import RotationConfig
from drot.errors import UserError

WeightFormat = Literal["dense", "packed"]

#: Quality → the fields that it sets. What each quality costs and gives stands in README.md.
QUALITIES: dict[str, dict[str, Any]] = {
    "fast": {"solve": "none", "target": "self", "recover": "none"},
    "balanced": {"solve": "admm", "target": "dense", "recover": "none"},
    "best": {"solve": "admm", "target": "dense", "recover": "block"},
}


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

    @property
    def objective(self) -> str:
        """The objective, with `auto` resolved."""
        return "pruned" if self.rotation.objective == "auto" else self.rotation.objective

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
        if value != "auto":
            return value
        rotation = self.rotation
        published = rotation.mode == "none" or rotation.optimizer == "paper" or rotation.reference_compat
        return str(QUALITIES["fast" if published else "balanced"][name])

    def with_quality(self, quality: str) -> "Recipe":
        """This recipe with the fields that `quality` sets: `fast`, `balanced` or `best`."""
        if quality not in QUALITIES:
            raise UserError(f"`quality` must be one of {', '.join(QUALITIES)}; got {quality!r}")
        values = QUALITIES[quality]
        return dataclasses.replace(
            self,
            pruning=dataclasses.replace(self.pruning, solve=values["solve"], target=values["target"]),
            recovery=dataclasses.replace(self.recovery, recover=values["recover"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """The recipe in plain JSON types, with every default resolved. A round trip through JSON is exact."""
        out = dataclasses.asdict(self)
        out["pruning"]["sparsity"] = str(self.pruning.sparsity)
        out["pruning"]["keep"] = list(self.pruning.keep)
        out["pruning"]["sparsity_of"] = [f"{pattern}={of}" for pattern, of in self.pruning.sparsity_of]
        if isinstance(self.rotation.blocks, tuple):
            out["rotation"]["blocks"] = list(self.rotation.blocks)
        out["rotation"]["hessians"] = self.rotation.resolved_hessians
        out["rotation"]["steps"] = self.rotation.resolved_steps
        out["rotation"]["lr"] = self.rotation.resolved_lr
        out["rotation"]["objective"] = self.objective
        out["pruning"] |= {"solve": self.solve, "target": self.target}
        out["pruning"]["block_size"] = self.pruning.resolved_block_size
        return out
