"""`drot compare`: its figures are those of runs by hand, and go into manifest, report and table."""

import json
import shutil

import pytest
import torch
from small_models import random_text, random_tokens, save_small_model, small_model

import drot
from drot.checkpoint.convert import convert
from drot.checkpoint.manifest import read_manifest
from drot.checkpoint.tables import evaluation_figures, gap_closed
from drot.cli import app as cli
from drot.config import CalibrationConfig, Recipe, RotationConfig
from drot.evaluation.evaluate import evaluate
from drot.reporting.runs import measurements, read_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dense model and one that was pruned from it, with two texts."""
    folder = tmp_path_factory.mktemp("compare")
    save_small_model(small_model("llama"), folder / "dense")
    for name, seed in (("calibration.txt", 0), ("text.txt", 1)):
        (folder / name).write_text(random_text(900, seed=seed))
    calibration = CalibrationConfig(source=str(folder / "calibration.txt"), nsamples=4, seqlen=16)
    recipe = Recipe(rotation=RotationConfig(steps=3), calibration=calibration)
    drot.prune(folder / "dense", recipe, out=folder / "pruned", device="cpu")
    return folder


def compared(capsys, folder, *options):
    arguments = ["compare", folder / "pruned", "--ppl", folder / "text.txt", "--device", "cpu", *options]
    assert cli.run(list(map(str, arguments))) == 0
    return capsys.readouterr()


def test_the_figures_are_those_of_runs_by_hand(made, capsys):
    rows = json.loads(compared(capsys, made, "--json").out)["models"]
    assert [row["name"] for row in rows] == ["dense", "sparsegpt 2:4", "+ solver", "pruned"]
    recipe = read_manifest(made / "pruned").recipe
    plain = Recipe(rotation=RotationConfig(mode="none"), calibration=recipe.calibration)
    solved = Recipe(rotation=plain.rotation, pruning=recipe.pruning, calibration=recipe.calibration)
    for name, each in {"plain": plain, "solver": solved}.items():
        drot.prune(made / "dense", each, out=made / name, device="cpu")
    names = ["dense", "plain", "solver", "pruned"]
    text = str(made / "text.txt")
    found = evaluate([str(made / name) for name in names], ppl=[text], record=False, device="cpu")
    by_hand = [figures["perplexity"][text] for figures in found]
    assert [row["perplexity"][text] for row in rows] == pytest.approx(by_hand, rel=1e-6)
    share = gap_closed(by_hand[0], by_hand[1], by_hand[3])
    closed = [row["gap_closed"][text] for row in rows]
    assert closed[:2] == [None, None]
    assert closed[3] == (None if share is None else pytest.approx(share, rel=1e-4))
    (entry,) = read_manifest(made / "pruned").evaluations
    assert entry.baselines.dense[text] == rows[0]["perplexity"][text]
    assert entry.baselines.not_rotated[text] == rows[1]["perplexity"][text]
    assert entry.baselines.solver[text] == rows[2]["perplexity"][text]
    run = read_run(made / "pruned")
    (measured,) = measurements(run)
    assert (measured.unrotated, measured.solver) == (rows[1]["perplexity"][text], rows[2]["perplexity"][text])
    # a later measurement of the same kind keeps the baselines
    evaluate([str(made / "pruned")], ppl=[text], against=str(made / "dense"), device="cpu")
    (entry,) = read_manifest(made / "pruned").evaluations
    assert entry.baselines.solver and (
        closed[3] is None or any("gap closed" in name for name, _ in evaluation_figures(entry))
    )
    # and a later one with a task beside the text leaves them in the report
    options = dict(against=str(made / "dense"), tasks=["own"], device="cpu")
    evaluate([str(made / "pruned")], ppl=[text], **options)
    (measured,) = measurements(read_run(made / "pruned"))
    assert (measured.unrotated, measured.solver) == (rows[1]["perplexity"][text], rows[2]["perplexity"][text])


def test_two_texts_of_one_file_name_have_a_column_each(made, tmp_path, capsys):
    other = tmp_path / "text.txt"
    other.write_text(random_text(900, seed=7))
    shown = compared(capsys, made, "--no-record", "--ppl", other).out.replace("\n", "")
    assert "text.txt" in shown
    rows = json.loads(compared(capsys, made, "--no-record", "--ppl", other, "--json").out)["models"]
    for value in rows[1]["perplexity"].values():
        assert f"{value:.3f}" in shown


def test_a_calibration_text_that_is_gone_is_told_before_anything_is_measured(
    made, tmp_path, capsys, monkeypatch
):
    shutil.copytree(made, tmp_path / "made")
    file = made / "calibration.txt"
    monkeypatch.setattr("drot.reporting.compare.evaluate", lambda *args, **rest: pytest.fail("measured"))
    file.rename(made / "elsewhere.txt")
    try:
        assert cli.run(["compare", str(tmp_path / "made/pruned"), "--ppl", str(made / "text.txt")]) == 2
    finally:
        (made / "elsewhere.txt").rename(file)
    assert "must be read again: start in the folder where drot prune was started" in capsys.readouterr().err


def test_the_table_and_an_unchanged_manifest(made, capsys):
    before = (made / "pruned/drot.json").read_bytes()
    shown = compared(capsys, made, "--no-record").out
    assert "sparsegpt 2:4" in shown and "+ solver" in shown and "50%" in shown
    assert (made / "pruned/drot.json").read_bytes() == before


def test_another_dense_model_is_told(made, tmp_path, capsys, caplog):
    compared(capsys, made, "--no-record")
    save_small_model(small_model("llama", dtype=torch.bfloat16), tmp_path / "dense")
    calibration = CalibrationConfig(source=str(made / "calibration.txt"), nsamples=4, seqlen=16)
    recipe = Recipe(rotation=RotationConfig(steps=3), calibration=calibration)
    drot.prune(tmp_path / "dense", recipe, out=tmp_path / "pruned", device="cpu")  # in fp32
    shutil.copy(made / "text.txt", tmp_path)
    compared(capsys, tmp_path, "--no-record")
    assert "other weights" not in caplog.text
    save_small_model(small_model("llama", seed=1), tmp_path / "other")
    compared(capsys, made, "--no-record", "--model", tmp_path / "other")
    assert f"{tmp_path / 'other'} has other weights than the model that was pruned to" in caplog.text


def test_a_run_with_token_ids_and_a_folder_of_others_are_refused(made, tmp_path, capsys):
    drot.prune(
        small_model("llama"), Recipe(rotation=RotationConfig(mode="none")), out=tmp_path / "given",
        calibration=random_tokens(4, 16), device="cpu",
    )  # fmt: skip
    model = ["--model", str(made / "dense")]
    assert cli.run(["compare", str(tmp_path / "given")]) == 2
    assert "drot.json names no model: name the dense model as --model" in capsys.readouterr().err
    assert cli.run(["compare", str(tmp_path / "given"), *model]) == 2
    assert "was given token ids, so drot cannot prune with them again" in capsys.readouterr().err
    assert cli.run(["compare", str(made / "dense")]) == 2
    assert "holds no drot.json" in capsys.readouterr().err


def test_of_a_short_text_the_solver_trains_all_layers_as_often_as_the_run(made, tmp_path, capsys):
    (tmp_path / "short.txt").write_text(random_text(330))
    recipe = read_manifest(made / "pruned").recipe.replace(
        source=str(tmp_path / "short.txt"), distill_epochs=1, distill_nsamples=None, nsamples=6, seqlen=24
    )
    first = drot.prune(made / "dense", recipe, out=tmp_path / "pruned", device="cpu").manifest
    assert first.distillation.passes > 1
    (tmp_path / "text.txt").write_text((made / "text.txt").read_text())
    found = json.loads(compared(capsys, tmp_path, "--json").out)["models"][2]
    solved = first.recipe.replace(mode="none")
    drot.prune(made / "dense", solved, out=tmp_path / "solver", device="cpu")
    text = str(tmp_path / "text.txt")
    (by_hand,) = evaluate([str(tmp_path / "solver")], ppl=[text], record=False, device="cpu")
    assert found["perplexity"][text] == pytest.approx(by_hand["perplexity"][text], rel=1e-6)


def test_the_text_that_the_model_wrote_for_the_run_is_read_again(made, tmp_path, capsys, caplog):
    recipe = read_manifest(made / "pruned").recipe.replace(source="own", distill_epochs=1, nsamples=8)
    drot.prune(made / "dense", recipe, out=tmp_path / "pruned", device="cpu")
    (tmp_path / "text.txt").write_text((made / "text.txt").read_text())
    caplog.clear()
    solver = json.loads(compared(capsys, tmp_path, "--json").out)["models"][2]
    assert "calibration tokens differ" not in caplog.text
    solved = Recipe(
        rotation=RotationConfig(mode="none"), pruning=recipe.pruning, recovery=recipe.recovery,
        calibration=recipe.calibration,
    )  # fmt: skip
    drot.prune(made / "dense", solved, out=tmp_path / "solver", device="cpu")  # writes the text again
    text = str(tmp_path / "text.txt")
    (by_hand,) = evaluate([str(tmp_path / "solver")], ppl=[text], record=False, device="cpu")
    assert solver["perplexity"][text] == pytest.approx(by_hand["perplexity"][text], rel=1e-6)
    # a converted checkpoint takes the text along
    convert(tmp_path / "pruned", tmp_path / "converted/pruned", "packed")
    (tmp_path / "converted/text.txt").write_text((made / "text.txt").read_text())
    again = json.loads(compared(capsys, tmp_path / "converted", "--json").out)["models"][2]
    assert list(again["perplexity"].values()) == pytest.approx(list(solver["perplexity"].values()), rel=1e-6)
    assert "tokens differ" not in caplog.text
    (tmp_path / "pruned/own_text.jsonl").write_text(json.dumps({"text": random_text(900, seed=3)}))
    compared(capsys, tmp_path, "--no-record")
    assert "calibration tokens differ" in caplog.text
