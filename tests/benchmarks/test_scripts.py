"""Scripts in benchmarks/ whose figures are cited: each runs to its end at a small size, and prints rows."""

import runpy
import sys
from pathlib import Path

import pytest

from drot.reporting.demo import DEMO

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BENCHMARKS.exists(), reason="needs the checkout")]
FEW = f"--calibration {DEMO.calibration} --nsamples 2 --seqlen 64"


@pytest.mark.parametrize(
    ("command", "row"),
    [
        ("optimizers.py --layers 0 --steps 2 --lr 0.3 --optimizer fast", "layer 0  pruned   fast"),
        ("optimizers.py --synthetic 128 --steps 2 --optimizer adam spectral fast", "spectral     2 steps"),
        (f"down_factors.py {DEMO.model} {FEW} --steps 2 --layer 0 --only 6", "Givens"),
        ("bench_rotation_step.py --sizes 64 --repeats 1", "gradient error"),
        ("bench_nm_mask.py --rows 64 --columns 64 --repeats 1", "stable sort"),
        ("bench_swiglu_rotate.py --width 256 --repeats 1", "x torch"),
        ("bench_experts.py --hidden 64 --width 64 --experts 4 --chosen 2 --repeats 1", "x dense"),
    ],
    ids=lambda text: text.split()[0] if ".py" in text else "",
)
def test_a_script_runs(command, row, monkeypatch, capsys):
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert row in capsys.readouterr().out
