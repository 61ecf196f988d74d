"""Grid files: their combinations, what they refuse, and the grid that drot ships."""

from dataclasses import replace
from pathlib import Path

import pytest

from drot.config import Recipe, resolve
from drot.core.errors import UserError
from drot.reporting.grid import Cell, read_grid
from drot.reporting.rows import COLUMNS, rows_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/paper-ablations.yaml"


def grid_of(tmp_path: Path, text: str):
    (tmp_path / "grid.yaml").write_text(text)
    return read_grid(tmp_path / "grid.yaml")


def test_product_and_cells(tmp_path):
    grid = grid_of(
        tmp_path,
        "model: some/model\nbase: {pruning: {method: wanda}}\ntexts: held.txt\nseqlen: 64\n"
        "grid: {sparsity: [2:4, 0.5], steps: [10, 20]}\ncells: [{lr: 0.1}, {blocks: 2, sparsity: 4:8}]",
    )
    base = Recipe().replace(method="wanda")
    assert [cell.recipe for cell in grid.cells] == [
        base.replace(sparsity="2:4", steps=10),
        base.replace(sparsity="2:4", steps=20),
        base.replace(sparsity="0.5", steps=10),
        base.replace(sparsity="0.5", steps=20),
        base.replace(lr=0.1),
        base.replace(blocks=2, sparsity="4:8"),
    ]
    assert grid.fields == ("sparsity", "steps", "lr", "blocks")
    assert (grid.asked.model, grid.asked.texts, grid.asked.seqlen, grid.skipped) == (
        "some/model",
        ["held.txt"],
        64,
        [],
    )


def test_base_may_be_the_path_of_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("pruning: {method: magnitude}")
    grid = grid_of(tmp_path, f"base: {tmp_path}/recipe.yaml\ngrid: {{steps: [1]}}")
    assert grid.cells[0].recipe == Recipe().replace(method="magnitude", steps=1)


def test_refused_and_equal_combinations_are_listed(tmp_path):
    grid = grid_of(
        tmp_path, "grid: {mode: [none, layer], lr: [0.3, 4]}\ncells: [{mode: layer}, {mode: none, steps: 7}]"
    )
    assert [cell.label(("mode", "lr")) for cell in grid.cells] == ["mode none, lr 0.3", "mode layer, lr 0.3"]
    reasons = {each.label: (each.reason, each.refused) for each in grid.skipped}
    assert list(reasons) == ["mode none, lr 4", "mode layer, lr 4", "mode layer", "mode none, steps 7"]
    assert "lr must be a finite number above 0" in reasons["mode none, lr 4"][0]
    assert reasons["mode layer, lr 4"][1] is True
    assert reasons["mode layer"] == ("its run is that of the cell mode layer", False)
    assert reasons["mode none, steps 7"][1] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {stepz: [1]}", "the recipe has no field 'stepz': did you mean steps?"),
        ("grid: {steps: [1]}\ncells: [{mod: none}]", "the recipe has no field 'mod': did you mean mode?"),
        ("gird: {steps: [1]}", "a grid file has no field 'gird': did you mean grid?"),
        (
            "base: {prunning: {}}\ngrid: {steps: [1]}",
            "the recipe has no field 'prunning': did you mean pruning?",
        ),
        ("base: 3\ngrid: {steps: [1]}", "`base` must be the sections of a recipe"),
        ("grid: {steps: 1}", "`grid` must be lists of values"),
        ("grid: {steps: []}", "`grid` must be lists of values"),
        ("cells: {steps: 1}", "`cells` must be a list"),
        ("model: some/model", "it must hold grid or cells; got neither"),
        ("grid: {lr: [-1]}", "no combination is a recipe: lr -1: lr must be"),
        ("texts: []\ngrid: {steps: [1]}", "`texts` must be a list of texts"),
        ("seqlen: long\ngrid: {steps: [1]}", "`seqlen` must be a whole number of at least 2; got"),
        ("- 1", "must hold the keys model, base, grid"),
        ("grid: [", "is not valid YAML"),
        (
            "grid: {steps: [&a [1, 1], &b [*a, *a], &c [*b, *b], [*c, *c]]}",
            "steps [1, 1]: steps must be a whole number from 0 to 1000000; got [1, 1]",
        ),
        (f"grid: {{steps: {[*range(101)]}, seed: {[*range(100)]}}}", "at most 10000 combinations, got 10100"),
    ],
)
def test_mistakes_are_one_line(tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        grid_of(tmp_path, text)
    assert message in str(caught.value) and "grid.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_another_suffix(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_grid(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"the grid must be a \.yaml or \.json file"):
        read_grid(tmp_path / "grid.txt")


@pytest.mark.skipif(not EXAMPLE.is_file(), reason="needs the checkout")
def test_the_shipped_grid_is_the_papers():
    """Steps 100 to 4000 with rates 0.1 to 0.0001, the model that is not rotated, and 2, 4 and 8 blocks."""
    grid = read_grid(EXAMPLE)
    recipes, resolved = zip(*((cell.recipe, cell.resolved.pruning) for cell in grid.cells), strict=True)
    assert len(recipes) == 6 * 4 + 1 + 3 and grid.skipped == []
    assert {(r.rotation.steps, r.rotation.lr) for r in recipes[:24]} == {
        (steps, lr) for steps in (100, 200, 400, 800, 2000, 4000) for lr in (0.1, 0.01, 0.001, 0.0001)
    }
    assert [r.rotation.blocks for r in recipes[25:]] == [2, 4, 8]
    assert {(p.solve, p.target, str(p.sparsity)) for p in resolved} == {("none", "self", "0.5")}


def test_a_cell_that_leaves_the_solver_open_finds_its_baseline(tmp_path):
    """The grid of docs/choose.md: without a rotation, a solver that is left open is none."""
    file = tmp_path / "grid.yaml"
    grid = "grid: {mode: [none, layer], solve: [none, admm]}"
    file.write_text(f"{grid}\ncells: [{{blocks: 2}}, {{method: wanda}}]\n")
    grid = read_grid(file)
    assert baselines(grid.cells, grid.fields) == {
        "mode none, solve none, blocks 1, method sparsegpt": None,
        "mode none, solve admm, blocks 1, method sparsegpt": "mode none, solve none",
        "mode layer, solve none, blocks 1, method sparsegpt": "mode none, solve none",
        "mode layer, solve admm, blocks 1, method sparsegpt": "mode none, solve none",
        "mode layer, solve admm, blocks 2, method sparsegpt": "mode none, solve none",
        "mode full, solve admm, blocks 1, method wanda": None,
    }


def test_a_quality_sets_the_fields_that_a_cell_does_not_name(tmp_path):
    """The method alone is the baseline of a cell with a quality too."""
    grid = grid_of(
        tmp_path,
        "grid: {quality: [fast, best]}\ncells: [{quality: fast, solve: none}, {mode: none}, {mode: stock}]",
    )
    assert grid.fields == ("quality", "solve", "mode")
    found = [cell.recipe for cell in grid.cells]
    assert found[:2] == [Recipe().with_quality("fast"), Recipe().with_quality("best")]
    assert found[2] == Recipe().with_quality("fast").replace(solve="none")
    assert [cell.label(("quality", "mode")) for cell in grid.cells] == [
        "quality fast, mode full", "quality best, mode full", "quality fast, mode full", "mode none",
        "mode stock",
    ]  # fmt: skip
    assert set(baselines(grid.cells, grid.fields).values()) == {None, "mode none, solve none"}
    with pytest.raises(UserError, match="quality must be one of fast, balanced, best; got 'good'"):
        grid_of(tmp_path, "grid: {quality: [good]}")


@pytest.mark.parametrize("pruning", ["damping: 0.1", "block_size: 64", "token_weights: gradient"])
def test_the_method_alone_has_what_the_base_says_of_it(tmp_path, pruning):
    grid = grid_of(tmp_path, f"base: {{pruning: {{{pruning}}}}}\ngrid: {{mode: [none, full], solve: [none]}}")
    found = baselines(grid.cells, grid.fields)
    assert found == {"mode none, solve none": None, "mode full, solve none": "mode none, solve none"}


def test_a_quality_sets_the_steps_of_the_base_too(tmp_path):
    """As --quality beside --recipe."""
    base = "base: {rotation: {steps: 20}, pruning: {solve: none}}\n"
    grid = grid_of(tmp_path, f"{base}grid: {{quality: [fast, balanced]}}\ncells: [{{blocks: 2}}]")
    assert [cell.resolved.rotation.steps for cell in grid.cells] == [50, 200, 20]
    assert [cell.label(("quality",)) for cell in grid.cells] == ["quality fast", "quality balanced", "base"]


def test_a_model_with_short_sequences_has_a_baseline(tmp_path):
    """Its cells have another `seqlen` than a recipe for a model of any length."""
    grid = grid_of(tmp_path, "grid: {mode: [none, layer], solve: [none]}")
    cells = [replace(cell, resolved=resolve(cell.recipe, positions=128)) for cell in grid.cells]
    found = baselines(cells, grid.fields)
    assert found == {"mode none, solve none": None, "mode layer, solve none": "mode none, solve none"}


def baselines(cells: list[Cell], fields: tuple[str, ...]) -> dict[str, str | None]:
    """Cell → the cell against which its row gives the gap closed. Cell i has the perplexity 12 + i."""
    dense, figures = {"perplexity": {"text": 10.0}, "accuracy": {}}, dict.fromkeys(COLUMNS)
    finished = {
        str(index): (cell, figures | {"perplexity": {"text": 12.0 + index}})
        for index, cell in enumerate(cells)
    }
    found: dict[str, str | None] = {}
    for cell, row in zip(cells, rows_of(finished, dense, fields), strict=True):
        name, gap = cell.label(fields), row["gap closed text"]
        found[name] = None
        if gap is not None:  # (baseline - own) / (baseline - 10)
            baseline = (row["perplexity text"] - 10.0 * gap) / (1 - gap)
            found[name] = cells[round(baseline) - 12].label(("mode", "solve"))
    return found
