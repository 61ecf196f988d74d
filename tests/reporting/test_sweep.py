"""Sweeps over small random models: figures, interruptions and mistakes."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from small_models import random_text, save_small_model, small_model

import drot
from drot.checkpoint.load import load, load_tokenizer
from drot.checkpoint.tables import gap_closed
from drot.cli import app as cli
from drot.config import Recipe
from drot.core.errors import UserError
from drot.core.files import WriteError
from drot.evaluation import evaluate as evaluation
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.evaluation.tasks import Score, Tasks
from drot.reporting import cells as runner_module
from drot.reporting.sweep import sweep
from drot.text.source import load_calibration

pytestmark = pytest.mark.slow

BASE = """
base:
  calibration: {{source: {folder}/text.txt, nsamples: 3, seqlen: 24}}
  rotation: {{steps: 2, hessians: {hessians}}}
texts: [{folder}/held.txt]
seqlen: 24
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with a small model and two texts."""
    folder = tmp_path_factory.mktemp("sweep")
    save_small_model(small_model("llama", num_hidden_layers=2), folder / "model")
    (folder / "text.txt").write_text(random_text(2000))
    (folder / "held.txt").write_text(random_text(600, seed=1))
    return folder


def grid_file(inputs: Path, tmp_path: Path, content: str, hessians: str = "sequential") -> Path:
    file = tmp_path / "grid.yaml"
    file.write_text(BASE.format(folder=inputs, hessians=hessians) + content)
    return file


def lines_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def recipe_of(inputs: Path, hessians: str = "sequential") -> Recipe:
    settings = {"source": str(inputs / "text.txt"), "nsamples": 3, "seqlen": 24}
    return Recipe().replace(**settings, steps=2, hessians=hessians)


def measured(inputs: Path, model) -> float:
    tokenizer = load_tokenizer(inputs / "model")
    return perplexity(model, load_eval_tokens(str(inputs / "held.txt"), tokenizer), seqlen=24)


def test_the_figures_are_those_of_prune_and_eval(inputs, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        "drot.pipeline.tokens.load_calibration",
        lambda *a, **k: read.append(1) or load_calibration(*a, **k),
    )
    file = grid_file(inputs, tmp_path, "grid: {mode: [none, full], sparsity: [2:4, 0.5]}")
    result = sweep(file, out=tmp_path / "out", model=inputs / "model")
    rows = lines_of(result.csv)
    assert [(row["mode"], row["sparsity"]) for row in rows] == [
        ("none", "2:4"), ("none", "0.5"), ("full", "2:4"), ("full", "0.5"),
    ]  # fmt: skip
    assert len(read) == 1  # all cells have the same calibration
    text = inputs / "held.txt"
    dense = measured(inputs, load(inputs / "model", device="cpu"))
    for row in rows:
        recipe = recipe_of(inputs).replace(mode=row["mode"], sparsity=row["sparsity"])
        own = drot.prune(inputs / "model", recipe, device="cpu")
        assert float(row[f"perplexity {text}"]) == measured(inputs, own.model)
        assert float(row[f"dense {text}"]) == dense
        assert float(row["zeros"]) == own.manifest.sparsity
        trained = [layer.rotation for layer in own.manifest.layers if layer.rotation]
        for name in ("entropy_before", "entropy_after"):
            expected = sum(getattr(record, name) for record in trained) / 2 if trained else None
            assert (float(row[name]) if row[name] else None) == expected
    plain, rotated = (float(rows[index][f"perplexity {text}"]) for index in (0, 2))
    gap = rows[2][f"gap closed {text}"]
    assert (float(gap) if gap else None) == gap_closed(dense, plain, rotated)
    assert rows[0][f"gap closed {text}"] == ""


def test_a_text_with_too_little_for_the_training_of_all_layers(inputs, tmp_path, caplog):
    """The cell is computed without it, as `drot prune` does."""
    (tmp_path / "short.txt").write_text(random_text(30))
    cells = f"cells: [{{distill_epochs: 1, source: {tmp_path}/short.txt}}]\n"
    found = sweep(grid_file(inputs, tmp_path, cells), model=str(inputs / "model"), out=tmp_path / "out")
    assert "of 9 sequences for the training of all layers, which is left out" in caplog.text
    (record,) = (json.loads(file.read_text()) for file in (tmp_path / "out" / "cells").iterdir())
    assert record["recipe"]["recovery"]["distill_epochs"] == 0 and len(lines_of(found.csv)) == 1


def test_of_a_short_text_all_layers_are_trained_as_often_as_in_a_run(inputs, tmp_path):
    (tmp_path / "short.txt").write_text(random_text(330))
    cells = f"cells: [{{distill_epochs: 1, nsamples: 6, source: {tmp_path}/short.txt}}]\n"
    found = sweep(grid_file(inputs, tmp_path, cells), model=str(inputs / "model"), out=tmp_path / "out")
    recipe = recipe_of(inputs).replace(source=f"{tmp_path}/short.txt", nsamples=6, distill_epochs=1)
    by_hand = drot.prune(inputs / "model", recipe, device="cpu")
    assert by_hand.manifest.distillation.passes > 1
    (row,) = lines_of(found.csv)
    assert float(row[f"perplexity {inputs / 'held.txt'}"]) == measured(inputs, by_hand.model)


def failing_at(number: int, error: BaseException):
    """drot.prune, whose call `number` raises `error`."""
    calls: list[int] = []

    def prune(*args, **options):
        calls.append(1)
        if len(calls) == number:
            raise error
        return drot.prune(*args, **options)

    return prune, calls


def test_a_second_call_runs_what_is_not_finished(inputs, tmp_path, monkeypatch):
    file = grid_file(inputs, tmp_path, "grid: {solve: [none, pcg, admm]}", "dense")
    whole = sweep(file, out=tmp_path / "whole", model=inputs / "model")
    prune, calls = failing_at(3, RuntimeError("fault"))
    monkeypatch.setattr(runner_module, "prune", prune)
    with pytest.raises(RuntimeError, match="fault"):
        sweep(file, out=tmp_path / "out", model=inputs / "model")
    assert len(lines_of(tmp_path / "out/sweep.csv")) == 2 and not (tmp_path / "out.lock").exists()
    result = sweep(file, out=tmp_path / "out", model=inputs / "model")
    assert (result.computed, len(calls)) == (1, 4)
    same = [column for column in lines_of(whole.csv)[0] if not column.startswith("seconds")]
    rows = [[row[column] for column in same] for row in lines_of(result.csv)]
    assert rows == [[row[column] for column in same] for row in lines_of(whole.csv)]
    assert sweep(file, out=tmp_path / "out", model=inputs / "model").computed == 0


def test_what_a_cell_depends_on_makes_it_new(inputs, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(inputs, folder)
    file = grid_file(folder, tmp_path, "cells: [{mode: none}]")

    def computed(**options) -> int:
        result = sweep(file, out=tmp_path / "out", model=folder / "model", **options)
        dense = load(folder / "model", device="cpu", dtype=options.get("dtype", "float32"))
        assert result.rows[0][f"dense {folder / 'held.txt'}"] == measured(folder, dense)
        return result.computed

    assert (computed(), computed()) == (1, 0)
    (folder / "held.txt").write_text(random_text(600, seed=2))
    assert (computed(), computed()) == (1, 0)
    (folder / "text.txt").write_text(random_text(2000, seed=3))
    assert (computed(), computed()) == (1, 0)
    save_small_model(small_model("llama", seed=1, num_hidden_layers=2), folder / "model")
    assert (computed(), computed()) == (1, 0)
    assert computed(dtype="bfloat16") == 1
    (record,) = [f for f in (tmp_path / "out/cells").glob("*.json") if '"bfloat16"' in f.read_text()]
    record.write_text(record.read_text().replace('"zeros": 0.5', '"zeros": 0.7'))  # a damaged record
    assert computed(dtype="bfloat16") == 1


def test_the_accuracy_of_tasks(inputs, tmp_path, monkeypatch):
    """A stand-in answers for lm_eval, which has its own tests."""
    answers = iter([0.9, 0.5, 0.8, 0.4, 0.7, 0.2])

    def answer(model, tokenizer, prepared, options):
        return {
            name: Score(accuracy=next(answers), stderr=None, metric="acc", fewshot=0)
            for name in prepared.tasks
        }

    monkeypatch.setattr(evaluation, "load_tasks", lambda names: Tasks(None, dict.fromkeys(names)))
    monkeypatch.setattr(evaluation, "run_tasks", answer)
    file = grid_file(inputs, tmp_path, "grid: {steps: [0, 1]}\ntasks: [piqa, boolq]")
    result = sweep(file, out=tmp_path / "out", model=inputs / "model")
    rows = lines_of(result.csv)
    assert [(float(row["accuracy piqa"]), float(row["accuracy boolq"])) for row in rows] == [
        (0.8, 0.4), (0.7, 0.2),
    ]  # fmt: skip
    assert all((row["dense accuracy piqa"], row["dense accuracy boolq"]) == ("0.9", "0.5") for row in rows)
    assert sweep(file, out=tmp_path / "out", model=inputs / "model").computed == 0


def test_what_the_model_refuses_is_listed(inputs, tmp_path):
    file = grid_file(inputs, tmp_path, "grid: {blocks: [1, 3]}\ncells: [{lr: -1}]")
    result = sweep(file, out=tmp_path / "out", model=inputs / "model")
    assert [each.label for each in result.skipped] == ["lr -1", "blocks 3, lr 0.3"]
    rows = lines_of(result.csv)
    assert rows[0]["skipped"] == "" and "blocks must divide the hidden size" in rows[2]["skipped"]
    with pytest.raises(UserError, match="no cell of .* fits .*: blocks 5: blocks must divide"):
        sweep(grid_file(inputs, tmp_path, "grid: {blocks: [5]}"), out=tmp_path / "o", model=inputs / "model")


def test_mistakes_leave_no_folder_changed(inputs, tmp_path):
    file = grid_file(inputs, tmp_path, "grid: {steps: [1]}")
    with pytest.raises(UserError, match="`model` is missing"):
        sweep(file, out=tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    with pytest.raises(UserError, match="is not the folder of a sweep"):
        sweep(file, out=tmp_path / "mine", model=inputs / "model")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]
    with pytest.raises(UserError, match="there is no such folder"):
        sweep(file, out=tmp_path / "out", model="./nope")
    file.write_text(file.read_text().replace("held.txt", "none.txt"))
    with pytest.raises(UserError, match="which is no such name and no file"):
        sweep(file, out=tmp_path / "out", model=inputs / "model")
    assert not (tmp_path / "out").exists()


def test_a_cell_without_a_finite_perplexity_is_a_row(inputs, tmp_path, monkeypatch, caplog):
    def ruined(*args, **options):
        result = drot.prune(*args, **options)
        for parameter in result.model.parameters():
            parameter.data.fill_(torch.nan)
        return result

    monkeypatch.setattr(runner_module, "prune", ruined)
    file = grid_file(inputs, tmp_path, "grid: {mode: [none, layer]}")
    result = sweep(file, out=tmp_path / "out", model=inputs / "model")
    assert [row[f"perplexity {inputs / 'held.txt'}"] for row in lines_of(result.csv)] == ["", ""]
    assert "has no figures" in caplog.text


def test_a_cell_whose_run_fails_does_not_end_the_sweep(inputs, tmp_path, monkeypatch, caplog):
    prune, calls = failing_at(2, UserError("the loss of layer 0 is not finite: lower `lr`"))
    monkeypatch.setattr(runner_module, "prune", prune)
    file = grid_file(inputs, tmp_path, "grid: {mode: [none, layer], sparsity: [2:4, 4:8]}")
    result = sweep(file, out=tmp_path / "out", model=inputs / "model")
    assert (result.computed, len(result.rows), len(calls)) == (3, 3, 4)
    (failed,) = result.skipped
    assert failed.refused and "4:8" in failed.label and failed.reason.endswith("not finite: lower lr")
    assert lines_of(result.csv)[-1]["skipped"] == failed.reason
    assert "the cell mode none, sparsity 4:8 ended" in caplog.text
    assert sweep(file, out=tmp_path / "out", model=inputs / "model").computed == 1
    prune, _ = failing_at(1, WriteError("cannot write: the disk is full"))
    monkeypatch.setattr(runner_module, "prune", prune)
    with pytest.raises(WriteError):
        sweep(file, out=tmp_path / "other", model=inputs / "model")


def test_no_cell_that_can_be_run_and_cells_that_are_equal_on_the_model(inputs, tmp_path, monkeypatch):
    equal = grid_file(inputs, tmp_path, "cells: [{mode: none}, {mode: none, seqlen: 24}]")
    result = sweep(equal, out=tmp_path / "equal", model=inputs / "model")
    assert len(result.rows) == 1
    assert all(not each.refused and "its run is that of" in each.reason for each in result.skipped)
    prune, _ = failing_at(1, UserError("no"))
    monkeypatch.setattr(runner_module, "prune", prune)
    with pytest.raises(UserError, match=r"no cell of .* could be run: .*: no"):
        sweep(equal, out=tmp_path / "failing", model=inputs / "model")


def test_the_command(inputs, tmp_path, monkeypatch, capsys):
    file = grid_file(inputs, tmp_path, "grid: {mode: [none, layer], steps: [1]}\ncells: [{lr: -1}]")
    arguments = ["sweep", str(file), "--out", str(tmp_path / "out"), "--model", str(inputs / "model")]
    prune, _ = failing_at(2, KeyboardInterrupt())
    monkeypatch.setattr(runner_module, "prune", prune)
    assert cli.run(arguments) == 130
    assert f"{tmp_path / 'out'} keeps 1 finished cell; to go on" in capsys.readouterr().err
    assert cli.run(arguments) == 0
    shown = capsys.readouterr()
    assert "sweeping, cell 2 of 2" in shown.err and "1 cell computed, 1 finished before" in shown.out
    assert "Not run: lr -1: lr must be a finite number" in shown.out
    assert cli.run([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [cell["mode"] for cell in data["cells"]] == ["none", "layer"] and data["computed"] == 0
    file.write_text("grid: {lr: [-1]}")
    assert cli.run(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert "lr -1: lr must be a finite number" in error and "--" not in error and "\n" not in error


def test_a_text_of_the_model_and_the_training_of_all_layers(inputs, tmp_path):
    """Cells of one calibration read one text of the model; what trains all layers is other text."""
    file = grid_file(inputs, tmp_path, "grid: {source: [own], nsamples: [8], distill_epochs: [0, 1]}")
    result = sweep(file, out=tmp_path / "out", model=inputs / "model")
    assert len(list((tmp_path / "out").glob("own_text_*.jsonl"))) == 1
    cells = [json.loads(cell.read_text()) for cell in (tmp_path / "out" / "cells").glob("*.json")]
    assert len({cell["calibration"] for cell in cells}) == 1
    plain, trained = (float(row[f"perplexity {inputs / 'held.txt'}"]) for row in lines_of(result.csv))
    assert plain != trained
    recipe = recipe_of(inputs).replace(source="own", nsamples=8, distill_epochs=1)
    by_hand = drot.prune(inputs / "model", recipe, device="cpu")
    assert trained == measured(inputs, by_hand.model)


def test_another_model_writes_its_own_text_and_a_sweep_that_has_no_more_than_that_goes_on(inputs, tmp_path):
    file, out = grid_file(inputs, tmp_path, "grid: {source: [own], nsamples: [8]}"), tmp_path / "out"
    sweep(file, out=out, model=inputs / "model")
    for name in ("cells", "dense.json", "sweep.csv"):
        shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()
    assert all(each.name.startswith("own_text_") for each in out.iterdir())
    torch.manual_seed(1)
    save_small_model(small_model("llama", num_hidden_layers=2), tmp_path / "other")
    sweep(file, out=out, model=tmp_path / "other")
    first, second = (each.read_text() for each in out.glob("own_text_*.jsonl"))
    assert first != second


def test_other_weights_at_the_same_path_write_another_text(inputs, tmp_path):
    file, out = grid_file(inputs, tmp_path, "grid: {source: [own], nsamples: [8]}"), tmp_path / "out"
    for seed in (0, 1):
        model = save_small_model(small_model("llama", seed=seed, num_hidden_layers=2), tmp_path / "model")
        assert sweep(file, out=out, model=model).computed == 1
    first, second = (each.read_text() for each in out.glob("own_text_*.jsonl"))
    assert first != second
