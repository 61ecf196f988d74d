"""Reading a grid file: the recipes of a sweep."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from drot.config import Recipe, ResolvedRecipe, resolve
from drot.config.recipe import SECTION_OF, known_field, read_recipe
from drot.config.recipe_file import SUFFIXES, settings_in
from drot.config.rotation import point_of
from drot.config.settings import fields_of, settings
from drot.core.checks import is_a, shortened
from drot.core.errors import UserError

#: most combinations of a grid: far more than anybody runs
MOST_CELLS = 10_000


@dataclass(frozen=True)
class Cell:
    """One recipe of a sweep: as the grid wishes it, and as it runs.

    asked: field → value, of the fields that the grid names for this cell.
    """

    recipe: Recipe
    resolved: ResolvedRecipe
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def value(self, field: str) -> Any:
        """The value of a field of the resolved recipe, in plain JSON types.

        `mode` and `quality` are as the grid names them. A cell without them has the name of its point, and no
        quality.
        """
        if field == "quality" or (field == "mode" and field in self.asked):
            return self.asked.get(field)
        if field == "mode" and (point := point_of(self.recipe.rotation)):
            return point
        return self.resolved.to_dict()[SECTION_OF[field]][field]

    def label(self, fields: tuple[str, ...]) -> str:
        """The values of `fields`, as in `steps 100, lr 0.01`."""
        values = {field: self.value(field) for field in fields}
        shown = ", ".join(f"{field} {value}" for field, value in values.items() if value is not None)
        return shown or "base"


@dataclass(frozen=True)
class Skipped:
    """A combination of fields and values, `label`, that is not run.

    refused: whether it is no recipe for the model; otherwise its run is that of another cell.
    """

    label: str
    reason: str
    refused: bool = True


#: names, each once; a single name needs no list
Names = Annotated[
    list[str],
    BeforeValidator(lambda names: [names] if isinstance(names, str) else names),
    AfterValidator(lambda names: list(dict.fromkeys(names))),
]


@settings
class GridFile:
    """The keys of a grid file, which `read_grid` describes."""

    model: str | None = None
    base: str | dict[Any, Any] = Field(
        default_factory=dict, title="the sections of a recipe, or the path of a recipe"
    )
    grid: dict[Any, Annotated[list[Any], Field(min_length=1)]] = Field(
        default_factory=dict, title="lists of values, as in steps: [100, 400]"
    )
    cells: list[dict[Any, Any]] = Field(
        default_factory=list, title="a list of fields with values, as in - steps: 100"
    )
    texts: Names = Field(default=["wikitext2"], min_length=1, title="a list of texts, such as [wikitext2]")
    tasks: Names = Field(default_factory=list, title="a list of tasks, such as [paper]")
    seqlen: int | None = Field(default=None, ge=2)
    text_column: str = "text"


@dataclass(frozen=True)
class Grid:
    """The recipes of a grid file.

    asked: the content of the file.
    fields: the fields of a recipe that the file varies, in its order.
    cells: the recipes, each once.
    skipped: the combinations that no recipe allows, and those whose run equals that of another cell.
    """

    asked: GridFile
    fields: tuple[str, ...]
    cells: list[Cell]
    skipped: list[Skipped]


def read_grid(path: str | Path) -> Grid:
    """The grid in a .yaml, .yml or .json file.

    Its keys are `model`; `base`, the sections of a recipe or the path of a recipe or of a checkpoint; `grid`,
    field → list of values, of which every combination is a cell; `cells`, a list of further cells, each as
    field → value; `texts` and `tasks`, for the perplexity and the accuracy, as in
    `drot.evaluation.evaluate`; `seqlen`, the tokens in a window of a text, by default `default_seqlen` of the
    model; and `text_column`. A field is one of a recipe, such as `steps`, or `quality`, which sets those that
    a cell does not name (`Recipe.asked`). The others have their values in `base`. Paths are relative
    to the current folder.

    Raises UserError for a file that is missing or broken, for an unknown key or field, and for a grid whose
    combinations are all refused.
    """
    is_a("grid", path, str, Path)
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise UserError(f"the grid must be a .yaml or .json file; got {str(file)!r}")
    data, keys = settings_in(file), list(fields_of(GridFile))
    if not isinstance(data, dict):
        got = "nothing" if data is None else type(data).__name__
        raise UserError(f"{file} must hold the keys {', '.join(keys)}; got {got}")
    try:
        for key in data:
            known_field(key, keys, "a grid file")
        return _grid(GridFile(**{key: value for key, value in data.items() if value is not None}))
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _grid(asked: GridFile) -> Grid:
    combinations = list(_combinations(asked))
    fields = tuple(dict.fromkeys(field for combination in combinations for field in combination))
    base = read_recipe(asked.base)[0] if isinstance(asked.base, str) else Recipe.from_dict(asked.base)
    cells, skipped = _cells(base, combinations)
    if not cells:
        raise UserError(f"no combination is a recipe: {skipped[0].label}: {skipped[0].reason}")
    return Grid(asked, fields, cells, skipped)


def _combinations(asked: GridFile) -> Iterator[dict[str, Any]]:
    """The values of each cell, by field: the product of `grid`, and then `cells`."""
    grid, cells = asked.grid, asked.cells
    if not grid and not cells:
        raise UserError("it must hold grid or cells; got neither")
    for field in (*grid, *(field for cell in cells for field in cell)):
        known_field(field, (*SECTION_OF, "quality"), "the recipe")
    if (count := math.prod(map(len, grid.values())) + len(cells)) > MOST_CELLS:
        raise UserError(f"grid must have at most {MOST_CELLS} combinations, got {count}: leave values out")
    if grid:
        for choice in itertools.product(*grid.values()):
            yield dict(zip(grid, choice, strict=True))
    yield from cells


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
            recipe = base.asked(**{"quality": None} | values)
            cell = Cell(recipe, resolve(recipe), values)
        except UserError as error:
            skipped.append(Skipped(label, str(error).replace("`", "")))
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
