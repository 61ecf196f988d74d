"""Reading a grid file: the recipes of a sweep."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drot.config import Recipe, ResolvedRecipe, resolve
from drot.config.recipe import SECTION_OF, known_field, read_recipe
from drot.config.recipe_file import SUFFIXES, settings_in
from drot.core.checks import is_a, shortened
from drot.core.errors import UserError

#: the keys of a grid file
KEYS = ("model", "base", "grid", "cells", "texts", "tasks", "seqlen", "text_column")
#: most combinations of a grid: far more than anybody runs
MOST_CELLS = 10_000


@dataclass(frozen=True)
class Cell:
    """One recipe of a sweep: as the grid wishes it, and as it runs."""

    recipe: Recipe
    resolved: ResolvedRecipe

    def value(self, field: str) -> Any:
        """The value of a field of the resolved recipe, in plain JSON types."""
        return self.resolved.to_dict()[SECTION_OF[field]][field]

    def label(self, fields: tuple[str, ...]) -> str:
        """The values of `fields`, as in `steps 100, lr 0.01`."""
        return ", ".join(f"{field} {self.value(field)}" for field in fields)


@dataclass(frozen=True)
class Skipped:
    """A combination of fields and values, `label`, that is not run.

    refused: whether it is no recipe for the model; otherwise its run is that of another cell.
    """

    label: str
    reason: str
    refused: bool = True


@dataclass(frozen=True)
class Grid:
    """The content of a grid file.

    model: name on the hub or folder of the model; None if the file names none.
    fields: the fields of a recipe that the file varies, in its order.
    cells: the recipes, each once.
    skipped: the combinations that no recipe allows, and those whose run equals that of another cell.
    texts, tasks: texts for the perplexity and tasks for the accuracy, as in `drot.evaluation.evaluate`.
    seqlen: tokens in a window of a text; None is `default_seqlen` of the model.
    """

    model: str | None
    fields: tuple[str, ...]
    cells: list[Cell]
    skipped: list[Skipped]
    texts: list[str]
    tasks: list[str]
    seqlen: int | None
    text_column: str


def read_grid(path: str | Path) -> Grid:
    """The grid in a .yaml, .yml or .json file.

    Its keys are `model`; `base`, the sections of a recipe or the path of a recipe or of a checkpoint; `grid`,
    field → list of values, of which every combination is a cell; `cells`, a list of further cells, each as
    field → value; `texts`, `tasks`, `seqlen` and `text_column`. A field is one of a recipe, such as `steps`.
    Fields that a cell does not name have their values in `base`. Paths are relative to the current folder.

    Raises UserError for a file that is missing or broken, for an unknown key or field, and for a grid whose
    combinations are all refused.
    """
    is_a("grid", path, str, Path)
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise UserError(f"the grid must be a .yaml or .json file; got {str(file)!r}")
    data = settings_in(file, "grid")
    if not isinstance(data, dict):
        raise UserError(f"{file} must hold the keys {', '.join(KEYS)}; got {type(data).__name__}")
    try:
        return _grid(data)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _grid(data: dict[Any, Any]) -> Grid:
    for key in data:
        known_field(key, KEYS, "a grid file")
    values = {key: data[key] for key in data if data[key] is not None}
    is_a("model", values.get("model"), str, or_none=True)
    is_a("seqlen", values.get("seqlen"), int, or_none=True)
    is_a("text_column", values.get("text_column", "text"), str)
    texts, tasks = _names(values, "texts", "wikitext2"), _names(values, "tasks", "paper")
    combinations = list(_combinations(values))
    fields = tuple(dict.fromkeys(field for combination in combinations for field in combination))
    cells, skipped = _cells(_base(values.get("base", {})), combinations)
    if not cells:
        raise UserError(f"no combination is a recipe: {skipped[0].label}: {skipped[0].reason}")
    return Grid(
        values.get("model"), fields, cells, skipped, texts, tasks,
        values.get("seqlen"), values.get("text_column", "text"),
    )  # fmt: skip


def _names(values: dict[str, Any], key: str, example: str) -> list[str]:
    """The texts or tasks of a grid file, each once. A single name needs no list; texts need at least one."""
    names = values.get(key, ["wikitext2"] if key == "texts" else [])
    names = [names] if isinstance(names, str) else names
    listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not listed or (key == "texts" and not names):
        raise UserError(f"{key} must be a list of {key}, such as [{example}]; got {shortened(names)}")
    return list(dict.fromkeys(names))


def _base(base: Any) -> Recipe:
    if isinstance(base, str):
        return read_recipe(base)[0]
    if not isinstance(base, Mapping):
        raise UserError(
            f"base must hold the sections of a recipe, or the path of a recipe; got {shortened(base)}"
        )
    return Recipe.from_dict(base)


def _combinations(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The values of each cell, by field: the product of `grid`, and then `cells`."""
    grid, cells = values.get("grid", {}), values.get("cells", [])
    if not isinstance(grid, Mapping) or not all(isinstance(each, list) and each for each in grid.values()):
        raise UserError(f"grid must hold lists of values, as in steps: [100, 400]; got {shortened(grid)}")
    if not isinstance(cells, list) or not all(isinstance(cell, Mapping) for cell in cells):
        raise UserError(
            f"cells must be a list of fields with values, as in - steps: 100; got {shortened(cells)}"
        )
    if not grid and not cells:
        raise UserError("it must hold grid or cells; got neither")
    for field in (*grid, *(field for cell in cells for field in cell)):
        known_field(field, SECTION_OF, "the recipe")
    if (count := math.prod(map(len, grid.values())) + len(cells)) > MOST_CELLS:
        raise UserError(f"grid must have at most {MOST_CELLS} combinations, got {count}: leave values out")
    if grid:
        for choice in itertools.product(*grid.values()):
            yield dict(zip(grid, choice, strict=True))
    yield from map(dict, cells)


def _cells(base: Recipe, combinations: list[dict[str, Any]]) -> tuple[list[Cell], list[Skipped]]:
    """The cells whose runs differ, and the combinations that are no cell of their own."""
    cells: dict[str, Cell] = {}
    skipped = []
    for values in combinations:
        label = ", ".join(
            f"{field} {shortened(value) if isinstance(value, list | dict) else value}"
            for field, value in values.items()
        )
        try:
            recipe = base.replace(**values)
            cell = Cell(recipe, resolve(recipe))
        except UserError as error:
            skipped.append(Skipped(label, str(error)))
            continue
        key = str(effective(cell.resolved))
        if key in cells:
            same = cells[key].label(tuple(values))
            skipped.append(Skipped(label, f"its run is that of the cell {same}", refused=False))
        else:
            cells[key] = cell
    return list(cells.values()), skipped


def effective(recipe: ResolvedRecipe) -> dict[str, Any]:
    """The settings that a run reads, in plain JSON types: without a rotation, none of its training."""
    settings = recipe.to_dict()
    if recipe.rotation.mode == "none":
        compat = recipe.rotation.reference_compat  # it changes the recorded importance
        settings["rotation"] = {"mode": "none", "reference_compat": compat}
    return settings
