"""The table of a manifest, and the table of the time of a run."""

import io

import pytest
from rich.console import Console

from drot.cli import tables
from drot.config import Recipe, RotationConfig


@pytest.mark.parametrize("width", [80, 100])
def test_table_of_a_shared_rotation(monkeypatch, width):
    """The table shows dense Hessians, and the figures of the only training as means over the layers."""
    file = io.StringIO()
    monkeypatch.setattr(tables, "output", lambda: Console(file=file, width=width))
    linears = {"q_proj": {"sparsity": 0.5, "output_error": 0.25, "damping": 0.01}}
    layers = [{"layer": i, "linears": linears, "seconds": 0.1, "rotation": {"damping": {}}} for i in range(2)]
    trained = dict(loss_before=800.0, loss_after=600.0, entropy_before=16021.0, entropy_after=14180.0)
    manifest = {
        "recipe": Recipe(rotation=RotationConfig(mode="shared")).to_dict(),
        "calibration": {"shape": [2, 8]},
        "sparsity": 0.5,
        "relative_logit_error": 1e-6,
        "stock_architecture": True,
        "dtype": "float32",
        "device": "cpu",
        "seconds": {"total": 2.0},
        "shared_rotation": trained | {"loss_curve": [800.0, 700.0, 600.0], "seconds": 1.0},
        "layers": layers,
    }
    tables.print_manifest(manifest)
    text = file.getvalue()
    assert "dense Hessians" in " ".join(text.split())
    assert "shared training  2 steps, loss 400 -> 300, entropy 16021 -> 14180 a layer" in text
    assert max(map(len, text.splitlines())) <= width
    manifest["recipe"]["rotation"]["objective"] = "entropy"
    file.truncate(0)
    tables.print_manifest(manifest)
    assert "2 steps, entropy 16021 -> 14180 a layer" in file.getvalue()


def timed(peaks, work):
    """A manifest with the entries about time."""
    seconds = {"load": 1.0, "rotate": 6.0, "recover": 0.0, "total": 8.0}
    return {"seconds": seconds, "work": work, "peaks": peaks}


def rows_of(table):
    cells = [list(column.cells) for column in table.columns]
    return [list(row) for row in zip(*cells, strict=True)]


def test_table_of_the_time_against_the_peak_of_the_machine():
    """6e12 operations in fp32 take 2 s at the peak, 4e12 in bf16 take 1 s: half of the 6 s that they took."""
    peaks = {"float32": 3e12, "bfloat16": 4e12, "copy": 1e10}
    work = {"rotate": {"float32": 6e12, "bfloat16": 4e12}, "load": {"bytes": 5e8}}
    table = tables.times_table(timed(peaks, work))
    assert [column.header for column in table.columns] == ["phase", "seconds", "share", "rate", "of peak"]
    assert rows_of(table) == [
        ["rotate", "6.0", "75.0%", "1.67 TFLOP/s", "50.0%"],
        ["load", "1.0", "12.5%", "500 MB/s", "5.0%"],
        ["other", "1.0", "12.5%", "-", "-"],
        ["total", "8.0", "100.0%", "-", "-"],
    ]
    assert table.caption is None
    # float16 has the peak of bfloat16; fp64 has none
    assert rows_of(tables.times_table(timed(peaks, {"rotate": {"float16": 6e12}})))[0][-1] == "25.0%"
    assert rows_of(tables.times_table(timed(peaks, {"rotate": {"float64": 6e12}})))[0][-1] == "-"


def test_table_of_the_time_without_a_measured_peak():
    table = tables.times_table(timed(None, {"rotate": {"float32": 6e9}}))
    assert rows_of(table)[0] == ["rotate", "6.0", "75.0%", "1 GFLOP/s"]
    assert "drot info --measure" in table.caption
    older = {"seconds": {"total": 2.0}}
    assert tables.times_table(older) is None


@pytest.mark.parametrize("work", [{}, {"float32": 0.0}, {"float32": 1.0, "bfloat16": -1.0}])
def test_work_without_operations_has_no_rate_or_the_rate_0(work):
    """A manifest that was edited, found by the fuzz test."""
    assert tables.rate_text(work, 2.0) in ("-", "0 B/s")
