"""The table of a manifest, and the table of the time of a run."""

import io

import pytest
from made_manifests import made_manifest
from rich.console import Console

from drot.checkpoint.manifest import write_manifest
from drot.checkpoint.tables import Table, times_table
from drot.cli import app
from drot.cli import output as tables
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
    loss = "" if objective == "entropy" else "loss 400 → 300, "
    assert f"shared training  2 steps, {loss}entropy 16021 → 14180 a layer" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_terminal_without_the_characters_shows_their_escapes(tmp_path, monkeypatch):
    write_manifest(tmp_path, made_manifest())
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr("sys.argv", ["drot", "info", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        app.main()
    stdout.seek(0)
    assert ended.value.code == 0 and r"900 \u2192 800" in stdout.read()


def test_table_of_the_time():
    """The longest phase first, without phases that took no time."""
    manifest = made_manifest(seconds={"load": 1.0, "rotate": 6.0, "recover": 0.0, "total": 8.0})
    table = times_table(manifest)
    assert table.headings == ["phase", "seconds", "share"]
    assert table.cells == [
        ["rotate", "6.0", "75.0%"],
        ["load", "1.0", "12.5%"],
        ["other", "1.0", "12.5%"],
        ["total", "8.0", "100.0%"],
    ]


def test_numbers_have_three_digits():
    assert [tables.three_digits(value) for value in (0.5, 12.345, 999.6, 3.0)] == ["0.5", "12.3", "1000", "3"]


@pytest.mark.parametrize("width", [30, 40, 60, 100])
def test_no_table_cuts_a_word_off(monkeypatch, width):
    """What is too long for a narrow terminal is folded: a verdict, the name of a file, and even a number."""
    file = io.StringIO()
    monkeypatch.setattr(tables, "output", lambda: Console(file=file, width=width))
    name, verdict = (
        "layers-0-" + "a-long-name-of-a-file-" * 3 + "end.safetensors",
        "0.48 x, slower than dense",
    )
    row = {"file": name, "tokens/s": "123456.789", "loss": "17414 → 15115", "against dense": verdict}
    tables.print_table(Table("", [row, row | {"file": "short"}]))
    tables.print_facts([("file", name)])
    text = file.getvalue()
    shown = "".join(each for each in text if each.isalnum())
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    columns = zip(*(line.split("│") for line in text.splitlines() if "│" in line), strict=True)
    joined = ["".join("".join(column).split()) for column in columns]
    for cell in row.values():
        assert any("".join(cell.split()) in column for column in joined), cell
    assert "".join(each for each in name if each.isalnum()) in shown  # of the facts
    if width == 100:
        assert "123456.789" in text and "17414 → 15115" in text
