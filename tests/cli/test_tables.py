"""The table of a manifest, and the table of the time of a run."""

import io

import pytest
from made_manifests import made_manifest
from rich.console import Console

from drot.cli import tables
from drot.config import Recipe


@pytest.mark.parametrize("objective", ["pruned", "entropy"])
@pytest.mark.parametrize("width", [80, 100])
def test_table_of_a_shared_rotation(monkeypatch, width, objective):
    """The table shows dense Hessians, and the figures of the only training as means over the layers."""
    file = io.StringIO()
    monkeypatch.setattr(tables, "output", lambda: Console(file=file, width=width))
    manifest = made_manifest(Recipe().replace(mode="shared", objective=objective), layers=2)
    trained = manifest.shared_rotation
    trained.loss_before, trained.loss_after, trained.loss_curve = 800.0, 600.0, [800.0, 700.0, 600.0]
    trained.entropy_before, trained.entropy_after = 16021.0, 14180.0
    tables.print_manifest(manifest)
    text = file.getvalue()
    assert "dense Hessians" in " ".join(text.split())
    loss = "" if objective == "entropy" else "loss 400 -> 300, "
    assert f"shared training  2 steps, {loss}entropy 16021 -> 14180 a layer" in text
    assert max(map(len, text.splitlines())) <= width


def test_table_of_the_time():
    """The longest phase first, without phases that took no time."""
    table = tables.times_table(
        made_manifest(seconds={"load": 1.0, "rotate": 6.0, "recover": 0.0, "total": 8.0})
    )
    cells = [list(column.cells) for column in table.columns]
    assert [column.header for column in table.columns] == ["phase", "seconds", "share"]
    assert [list(row) for row in zip(*cells, strict=True)] == [
        ["rotate", "6.0", "75.0%"],
        ["load", "1.0", "12.5%"],
        ["other", "1.0", "12.5%"],
        ["total", "8.0", "100.0%"],
    ]


def test_numbers_have_three_digits():
    assert [tables.scaled(value, "B/s") for value in (0.5, 12345.0, 999.6e9, 3e12)] == [
        *("0.5 B/s", "12.3 kB/s", "1000 GB/s", "3 TB/s")
    ]
