"""A smaller demo: the rotation reduces the damage of pruning, in the table and in the saved checkpoint."""

import dataclasses
import io
import json
import re

import pytest
import torch
from rich.console import Console
from runs import assert_patterns

import drot
from drot.checkpoint.load import load_tokenizer
from drot.cli import app as cli
from drot.cli import demo as command
from drot.cli import output as stdout
from drot.config import PruningConfig
from drot.core.errors import UserError
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.sweep.demo import CALIBRATION, HELD_OUT, DemoResult, DemoRow, run_demo

pytestmark = pytest.mark.slow
SMALL, WINDOWS = dataclasses.replace(CALIBRATION, nsamples=8, seqlen=256), 8


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    pytest.importorskip("matplotlib", reason="the demo's report needs matplotlib")
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, run_demo(out, steps=12, calibration=SMALL, windows=WINDOWS)


def test_rotation_undoes_most_of_the_damage(demo):
    _, result = demo
    dense, pruned, solved, rotated = result.rows
    assert dense.perplexity < rotated.perplexity < solved.perplexity < pruned.perplexity
    for row in (solved, rotated):
        assert row.gap_closed == pytest.approx(
            (pruned.perplexity - row.perplexity) / (pruned.perplexity - dense.perplexity)
        )
    assert rotated.gap_closed > 0.5 and result.rotation_helped
    assert pruned.sparsity == rotated.sparsity == pytest.approx(0.5, abs=1e-3)


def test_the_saved_checkpoint_is_the_model_of_the_table(demo):
    out, result = demo
    model = drot.load(out, device="cpu", dtype="float32")
    tokens = load_eval_tokens(str(HELD_OUT), load_tokenizer(out))[: WINDOWS * 256]
    assert perplexity(model, tokens, seqlen=256) == pytest.approx(result.rows[-1].perplexity, rel=1e-6)
    assert_patterns(model, PruningConfig(sparsity="2:4"))
    assert torch.isfinite(model(tokens[None, :64]).logits).all()


def test_the_report_has_the_figures_of_the_table(demo):
    out, result = demo
    dense, pruned, solved, rotated = (f"{row.perplexity:.3f}" for row in result.rows)
    assert result.report == out / "report.html"
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", result.report.read_text())[:5]
    assert cells == [dense, pruned, solved, rotated, f"{result.rows[-1].gap_closed:.0%}"]


def test_without_matplotlib_the_report_is_left_out(monkeypatch, tmp_path, capsys):
    row = DemoRow(name="dense", perplexity=10.0)
    result = DemoResult(rows=[row], sentence="It helped.", rotation_helped=True)
    monkeypatch.setattr("drot.sweep.demo.run_demo", lambda out, progress: result)
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
    monkeypatch.setattr("drot.sweep.demo.load_tokenizer", lambda *args: pytest.fail("work began"))
    with pytest.raises(UserError, match=r"out\.partial was left by an interrupted demo"):
        run_demo(tmp_path / "out")


def test_table(monkeypatch):
    """The user sees three rows and a sentence."""
    file = io.StringIO()
    for module in (command, stdout):
        monkeypatch.setattr(module, "output", lambda: Console(file=file, width=100))
    rows = [DemoRow(name="dense", perplexity=10.0), DemoRow(name="pruned", perplexity=14.0, sparsity=0.5)]
    rows.append(DemoRow(name="rotated", perplexity=11.0, gap_closed=0.75, sparsity=0.5, seconds=3.0))
    command.print_demo(DemoResult(rows=rows, sentence="It helped.", rotation_helped=True))
    text = file.getvalue()
    for cell in ("10.000", "14.000", "11.000", "75%", "50%", "3.0", "It helped."):
        assert cell in text
