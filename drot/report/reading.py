"""What a report reads of a checkpoint: its manifest, its figures, and means of them."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from drot.core.errors import UserError
from drot.manifest.importance import load_figures
from drot.manifest.manifest import read_manifest
from drot.model.families import ROLES


@dataclass(frozen=True)
class Run:
    """One run that `drot prune` has written.

    name: the name of its folder, with parents where several runs would have the same name.
    manifest: the content of its drot.json.
    figures: `layers.<i>.<linear>.<kind>` → array (pipeline/figures.py); {} for a run of an older drot.
    """

    name: str
    manifest: dict[str, Any]
    figures: dict[str, np.ndarray]

    @property
    def recipe(self) -> dict[str, Any]:
        return self.manifest["recipe"]

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The records of the layers."""
        return self.manifest["layers"]

    @property
    def rotated(self) -> bool:
        return self.recipe["rotation"]["mode"] != "none"

    @cached_property
    def linears(self) -> list[str]:
        """The names of the linears that have figures, such as `layers.0.self_attn.q_proj`."""
        ends = ".map_before"
        return [name.removesuffix(ends) for name in self.figures if name.endswith(ends)]

    def trainings(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Layer and record of each training of a layer's rotation."""
        for layer in self.layers:
            if "loss_curve" in layer.get("rotation", {}):
                yield layer["layer"], layer["rotation"]

    def curves(self, key: str) -> dict[str, list[Any]]:
        """`layer <i>`, or `all layers` for a shared rotation → a curve of its training; [] without the curve.

        key: `loss_curve`, the loss at each step, or `entropy_curve`, pairs of a step and the entropy.
        """
        if shared := self.manifest.get("shared_rotation"):
            return {"all layers": shared.get(key, [])}
        return {f"layer {layer}": record.get(key, []) for layer, record in self.trainings()}

    def pruned(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Layer, role and record of each linear that was pruned."""
        for layer in self.layers:
            for role, linear in layer["linears"].items():
                if linear["sparsity"] > 0:
                    yield layer["layer"], role, linear


#: a figure of a linear's record
Figure = Callable[[dict[str, Any]], float | None]


def one_shot(basis: str, key: str) -> Figure:
    """The figure `key` of one-shot pruning, `before` or `after` the rotation."""
    return lambda linear: linear.get("one_shot", {}).get(basis, {}).get(key)


def final_error(linear: dict[str, Any]) -> float | None:
    """The output error of a linear as it was written."""
    return linear["output_error"]


def layer_means(run: Run, figure: Figure) -> dict[int, float]:
    """Layer → mean of a figure over its pruned linears; layers without the figure are left out."""
    found: dict[int, list[float]] = {}
    for layer, _, linear in run.pruned():
        if (value := figure(linear)) is not None:
            found.setdefault(layer, []).append(value)
    return {layer: statistics.fmean(values) for layer, values in found.items()}


def mean(run: Run, figure: Figure) -> float | None:
    """The mean of a figure over all pruned linears; None without a figure."""
    values = [value for *_, linear in run.pruned() if (value := figure(linear)) is not None]
    return statistics.fmean(values) if values else None


def ratios(run: Run, above: Figure, below: Figure) -> dict[tuple[int, str], float]:
    """(layer, role) → quotient of two figures of a linear, where both are there."""
    found = {}
    for layer, role, linear in run.pruned():
        first, second = above(linear), below(linear)
        if first is not None and second:
            found[layer, role] = first / second
    return found


def roles_of(keys: Iterator[tuple[int, str]] | dict[tuple[int, str], float]) -> list[str]:
    """The roles among (layer, role) pairs, in the order of ROLES."""
    present = {role for _, role in keys}
    return [role for role in ROLES if role in present]


def read_runs(folders: list[Path]) -> list[Run]:
    """The runs in `folders`. Raises UserError for a folder that is no checkpoint of drot, or named twice."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise UserError("each folder must be named once: leave out the repeated one")
    parts = 1
    while len({folder.parts[-parts:] for folder in resolved}) < len(resolved):
        parts += 1
    runs = []
    for folder, full in zip(folders, resolved, strict=True):
        if not folder.is_dir():
            reason = "is a file" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {reason}: name a folder that drot prune wrote")
        runs.append(Run("/".join(full.parts[-parts:]), read_manifest(folder), load_figures(folder)))
    return runs
