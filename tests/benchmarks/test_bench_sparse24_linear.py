"""benchmarks/bench_sparse24_linear.py at a tiny shape: its aims, its rows and their table, but no speed."""

import csv
import importlib
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_sparse24_linear.py"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout")]
AVX512, H100, H200 = "AMD EPYC, AVX512", "NVIDIA H100 80GB HBM3", "NVIDIA H200"
DOWN = (4096, 14336, "bfloat16")


@pytest.mark.parametrize(
    ("on", "device", "weight", "aims"),
    [
        (AVX512, "cpu", DOWN, {1: (2.0, 2.0), 16: (1.0, 1.0), 64: (1.0, 1.0)}),
        (AVX512, "cpu", (1536, 576, "bfloat16"), {1: (1.4, 1.4)}),
        (AVX512, "cpu", (4096, 14336, "float32"), {1: (1.4, 1.4)}),
        ("AMD EPYC, AVX2", "cpu", DOWN, {1: (1.4, 1.4), 16: (1.0, 1.0)}),
        (H100, "cuda", DOWN, {1: (1.55, 1.4), 4: (1.55, 1.4), 16: (1.0, 1.0), 2048: (1.2, 1.2)}),
        (H200, "cuda", DOWN, {1: (1.55, 1.35), 4: (1.55, 1.35), 16: (1.0, 1.0), 2048: (1.2, 1.2)}),
    ],
)
def test_aims(
    on: str,
    device: str,
    weight: tuple[int, int, str],
    aims: dict[int, tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without and with a rotation."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    aim = runpy.run_path(str(SCRIPT))["aim"]
    assert {n: tuple(aim(on, device, weight, n, rotate) for rotate in (False, True)) for n in aims} == aims


def test_the_fusion_is_compared_and_old_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--device cpu --threads 1 --shape 64 64 --tokens 2 --repeats 2"
    results = tmp_path / "results"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options.split(), "--csv", str(results)])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "sparse24_linear" in (printed := capsys.readouterr().out) and " x not fused" in printed
    file = results / "sparse24_linear.csv"
    rows = list(csv.DictReader(file.open()))
    case = "64x64 bfloat16, 2 tokens"
    pairs = [("linear", case), ("sparse24_linear", case)]
    rotated = [(name, f"{case}, rotation") for name in ("linear", "sparse24_linear", "not fused")]
    assert [(row["function"], row["case"]) for row in rows] == pairs + rotated

    recorded = (SCRIPT.parent / "results" / "sparse24_linear.csv").read_text().splitlines()
    assert file.read_text().splitlines()[0] == recorded[0]
    file.write_text("\n".join([*recorded, *file.read_text().splitlines()[1:]]) + "\n")
    figures = importlib.import_module("figures")
    monkeypatch.setattr(importlib.import_module("_rows"), "FOLDER", tmp_path)
    lines = figures.TABLES["sparse24_linear"]().splitlines()
    (old,) = [
        line for line in lines if line.startswith("| 4096x14336 bfloat16, 4 tokens, rotation | 2 threads |")
    ]
    (new,) = [line for line in lines if line.startswith(f"| {case}, rotation |")]
    assert "× linear" in old and "not fused" not in old
    assert "× linear, " in new and new.endswith(" × not fused |")
