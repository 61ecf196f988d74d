"""A smaller demo: the rotation reduces the damage of pruning, in the table and in the saved checkpoint."""

import dataclasses
import json
import re

import pytest
from runs import assert_patterns

import drot
from drot.checkpoint.load import load_tokenizer
from drot.cli import app as cli
from drot.config import PruningConfig
from drot.core.errors import UserError
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.reporting.compare import ComparedModel, Comparison
from drot.reporting.demo import CALIBRATION, HELD_OUT, DemoResult, run_demo

pytestmark = pytest.mark.slow
SMALL = dataclasses.replace(CALIBRATION, nsamples=4, seqlen=128)


def test_a_demo(tmp_path):
    """One test, so that no two processes run it."""
    pytest.importorskip("matplotlib", reason="the demo's report needs matplotlib")
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text(HELD_OUT.read_text()[:4000])
    result = run_demo(out, steps=8, calibration=SMALL, held_out=text)
    rotation_undoes_most_of_the_damage(text, result)
    the_saved_checkpoint_is_the_model_of_the_table(out, text, result)
    the_report_has_the_figures_of_the_table(out, text, result)


def rotation_undoes_most_of_the_damage(text, result):
    dense, pruned, solved, rotated = (row.perplexity[str(text)] for row in result.comparison.models)
    assert dense < rotated < solved < pruned
    for row, value in zip(result.comparison.models[2:], (solved, rotated), strict=True):
        assert row.gap_closed[str(text)] == pytest.approx((pruned - value) / (pruned - dense))
    assert result.comparison.models[-1].gap_closed[str(text)] > 0.5 and result.rotation_helped
    assert (
        result.comparison.models[1].sparsity
        == result.comparison.models[-1].sparsity
        == pytest.approx(0.5, abs=1e-3)
    )


def the_saved_checkpoint_is_the_model_of_the_table(out, text, result):
    model = drot.load(out, device="cpu", dtype="float32")
    found = perplexity(model, load_eval_tokens(str(text), load_tokenizer(out)), seqlen=SMALL.seqlen)
    assert found == pytest.approx(result.comparison.models[-1].perplexity[str(text)], rel=1e-6)
    assert_patterns(model, PruningConfig(sparsity="2:4"))


def the_report_has_the_figures_of_the_table(out, text, result):
    assert result.report == out / "report.html"
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", result.report.read_text())[:5]
    figures = [f"{row.perplexity[str(text)]:.3f}" for row in result.comparison.models]
    assert cells == [*figures, f"{result.comparison.models[-1].gap_closed[str(text)]:.0%}"]


def test_without_matplotlib_the_report_is_left_out(monkeypatch, tmp_path, capsys):
    row = ComparedModel(
        name="dense", perplexity={"t": 10.0}, gap_closed={"t": None}, sparsity=0.0, seconds=None
    )
    result = DemoResult(
        comparison=Comparison(models=[row], figures={"texts": {}}),
        sentence="It helped.",
        rotation_helped=True,
    )
    monkeypatch.setattr("drot.reporting.demo.run_demo", lambda out, progress: result)
    assert cli.run(["demo", "--out", str(tmp_path / "out")]) == 0
    assert "The report is left out: it needs matplotlib (pip install 'matplotlib" in capsys.readouterr().out
    assert cli.run(["demo", "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] is None


def test_a_folder_with_files_is_not_touched(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an empty folder"):
        run_demo(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_the_folder_of_an_interrupted_demo_is_named_at_once(tmp_path, monkeypatch):
    """The error comes before any work, and not after the minutes of the first two models."""
    (tmp_path / "out.partial").mkdir()
    monkeypatch.setattr("drot.reporting.demo.prune", lambda *args, **options: pytest.fail("work began"))
    with pytest.raises(UserError, match=r"out\.partial was left by an interrupted demo"):
        run_demo(tmp_path / "out")
