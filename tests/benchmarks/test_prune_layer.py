"""benchmarks/bench_prune_layer.py at a tiny shape: its rows and its lines, but no speed."""

import csv
import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_prune_layer.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout")
@pytest.mark.slow
def test_a_tiny_layer_is_measured_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--device cpu --shape tiny --nsamples 4 --seqlen 32 --repeats 2 --steps 3 --paper-steps 2"
    options += " --quality fast best"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options.split(), "--csv", str(tmp_path)])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    with (tmp_path / "prune_layer.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"].partition(":")[0], row["function"]) for row in rows] == [
        ("training of a layer", "drot, 3 steps"),
        ("training of a layer", "paper"),
        ("whole layer", "drot"),
        ("whole layer", "paper"),
    ] * 2
    assert [row["case"].rpartition(" ")[2] for row in rows] == ["fast"] * 4 + ["best"] * 4
    step = float(re.search(r"2000 steps, scaled up from the median of 2 \((\S+) ms a step\)", printed)[1])
    assert float(rows[1]["median_us"]) == pytest.approx(2000 * 1e3 * step, rel=0.05)
    training, layer = float(rows[0]["median_us"]), float(rows[2]["median_us"])
    assert training > 0 and layer > 0
    line = re.search(r"2 layers x (\S+) s \+ (\S+) s = (\S+) minutes a model", printed)
    seconds, once, minutes = map(float, line.groups())
    assert seconds == pytest.approx(layer / 1e6, abs=0.006)
    assert minutes == pytest.approx((2 * seconds + once) / 60, abs=0.06)
    for phase in ("load", "check", "calibrate", "rotate", "prune", "save"):
        assert re.search(rf"^  {phase} +\S+ s +\d+%  and \S+ s a model$", printed, re.MULTILINE), printed
    assert printed.count("peak memory, process:") == 2
    one_step = float(re.search(r"^  one step of drot: (\S+) ms$", printed, re.MULTILINE)[1])
    assert one_step > 0
    assert re.search(r"^  Hessians of all inputs: \S+ s$", printed, re.MULTILINE)
    assert "target" not in printed.rpartition("scaled up")[2]  # a tiny shape has no aims


@pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout")
@pytest.mark.slow
def test_figures_against_the_aims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    against_aim = runpy.run_path(str(SCRIPT))["against_aim"]
    assert against_aim("llama-3-8b", "whole layer", 5.5) == "  target 5.5 s: met"
    assert against_aim("llama-3-8b", "one step", 0.011) == "  target 0.01 s: MISSED"
    assert against_aim("llama-3-70b", "peak memory", 29e9).endswith(": met")
    assert against_aim("llama-3-70b", "peak memory", 31e9).endswith(": MISSED")
    assert against_aim("small", "whole layer", 1.0) == against_aim("llama-3-70b", "one step", 1.0) == ""
