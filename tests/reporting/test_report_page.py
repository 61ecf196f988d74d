"""`drot report`: the written page and files, its figures, and the refusal of wrong input."""

import json
import re
import shutil
import sys
import zipfile

import numpy as np
import pytest
from runs import one_shot, prune
from small_models import small_model

import drot
from drot.checkpoint.manifest import accept_files
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.reporting.drawing import SERIES
from drot.reporting.runs import REMOVED_IMPORTANCE, read_run

pytestmark = pytest.mark.slow
#: everything that a page could load or open
REFERENCES = re.compile(r"""(?:src|href|action|data|poster|srcset)=["']?([^"'\s>]+)|url\(([^)]*)\)""")


@pytest.fixture(scope="module")
def page(pruned, tmp_path_factory) -> str:
    """A page with the linears of one attention."""
    out = tmp_path_factory.mktemp("page") / "r.html"
    report = drot.report(pruned["rotated"], out=out, linears=["layers.0.self_attn.*"])
    assert len(report.linears) == 4 and report.page == out
    return out.read_text()


def test_the_page_is_whole_and_loads_nothing(page):
    found = {match[1] or match[2] for match in REFERENCES.finditer(page)}
    outside = {reference for reference in found if not reference.startswith(("data:", "#"))}
    assert outside == {"https://arxiv.org/abs/2505.23049"}  # a link
    assert "default-src 'none'" in page
    assert len(page) < 40e3 * (4 + 2 * 4)  # of the charts


def test_names_are_escaped(page):
    assert "<b>some" not in page
    assert "someone/&lt;b&gt;some model" in page


def test_structure_for_screen_readers(page):
    assert '<html lang="en">' in page and page.count("<h1>") == 1
    assert page.count("<figure") == page.count("<figcaption>") == page.count("<img ") == 4 + 2 * 4
    assert page.count("<table") == page.count("<caption>") == 5
    # a drawing is hidden from them, and its caption says what it shows
    assert page.count(' alt="">') == page.count("<img ")
    assert all(
        len(caption) >= 30 for caption in re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    )


def test_words_have_the_means_of_the_manifest(page, pruned):
    run = read_run(pruned["rotated"])
    shares = [
        linear.one_shot.after.removed_importance
        for layer in run.manifest.layers
        for linear in layer.linears.values()
    ]
    assert run.mean(REMOVED_IMPORTANCE[1]) == pytest.approx(sum(shares) / 21)
    assert f" to {sum(shares) / 21:.1%} (mean over the linears)" in page


def test_series_differ_by_more_than_colour():
    assert len({str(dash) for _, dash, _ in SERIES}) == len({marker for *_, marker in SERIES}) == len(SERIES)


def test_a_run_without_its_maps_of_importance(pruned, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(pruned["rotated"] / "drot.json", folder)
    report = drot.report(folder)
    assert report.page == folder / "report.html" and report.linears == []
    assert "<figure" in report.page.read_text()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("layers.0.self_attn.q_proj.map_before", np.zeros((2, 2))),
        ("layers.0.self_attn.q_proj.histogram_before", np.zeros((2, 3), np.int64)),
        ("../q_proj.map_before", np.zeros((2, 2), np.float16)),
    ],
)
def test_maps_that_drot_did_not_write_are_refused(pruned, tmp_path, name, array):
    folder = shutil.copytree(pruned["rotated"], tmp_path / "run")
    np.savez(folder / "drot-figures.npz", **{name: array})
    with pytest.raises(UserError, match="not the file that drot.json describes: it has .* copy it again"):
        drot.report(folder)
    accept_files(folder)  # as a stranger does, who writes the manifest too
    with pytest.raises(UserError, match="which drot did not write: copy the checkpoint again"):
        drot.report(folder)


def test_chosen_linears(pruned, tmp_path):
    patterns = ["layers.1.mlp.up_proj", "layers.0.*.q_proj"]
    report = drot.report(pruned["plain"], out=tmp_path / "r.html", linears=patterns)
    assert sorted(report.linears) == ["layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"]
    assert report.page.read_text().count('<details class="linear"') == 2


def test_linears_of_experts(tmp_path):
    """Those of routed and of shared experts have maps too."""
    prune(small_model("deepseek_v3"), one_shot(down_rotation="none"), out=tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert len(run.linears) == sum(len(layer.linears) for layer in run.manifest.layers)
    chosen = ["layers.1.mlp.experts.0.gate_proj", "layers.1.mlp.shared_experts.gate_proj"]
    report = drot.report(tmp_path / "run", out=tmp_path / "r.html", linears=chosen)
    assert sorted(report.linears) == chosen


def test_many_linears_are_left_out_and_the_page_says_so(pruned, tmp_path, monkeypatch):
    monkeypatch.setattr("drot.reporting.write.linear_charts", lambda run, linear: [])
    monkeypatch.setattr("drot.reporting.write.charts_of", lambda run: [])
    folders = {name: shutil.copytree(pruned[name], tmp_path / name) for name in pruned}
    assert len(drot.report(folders["plain"], linears=["down_proj"]).linears) == 3
    report = drot.report(folders["plain"])
    assert len(report.linears) == 7 and "Shown is layer 0 of 3, with the linear" in report.page.read_text()
    run = read_run(folders["rotated"])
    changes = run.ratios(*REMOVED_IMPORTANCE)
    layer, role = min(changes, key=changes.__getitem__)
    report = drot.report(folders["rotated"])
    assert {int(name.split(".")[1]) for name in report.linears} == {layer}
    assert report.linears[0].split(".")[1::2] == [str(layer), role]
    assert len(drot.report(folders["rotated"], linears=["*"]).linears) == 21


def test_wrong_input_is_refused(pruned, tmp_path, monkeypatch):
    run = pruned["rotated"]
    (tmp_path / "empty").mkdir()
    cases = [
        (tmp_path / "no", {}, "does not exist: name a folder that drot prune wrote"),
        (tmp_path / "empty", {}, "holds no drot.json"),
        (run, {"linears": ["nothing"]}, "`linears` must match a linear, such as layers.0"),
        (run, {"out": tmp_path}, "`out` must be a file, got the folder"),
        (run, {"out": tmp_path / "r.pdf"}, "`out` must be an HTML file, as in report.html"),
    ]
    for folder, options, message in cases:
        with pytest.raises(UserError, match=re.escape(message)):
            drot.report(folder, **({"out": tmp_path / "r.html"} | options))
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    manifest = json.loads((broken / "drot.json").read_text())
    (broken / "drot.json").write_text(json.dumps(manifest | {"layers": [{"layer": 0}]}))
    with pytest.raises(UserError, match=r"lacks layers.0.linears: it was edited"):
        drot.report(broken)
    shutil.copy(run / "drot.json", broken)
    (broken / "drot-figures.npz").write_bytes(b"PK\x03\x04 cut off")
    accept_files(broken)
    with pytest.raises(UserError, match=r"drot-figures.npz is not a complete npz file"):
        drot.report(broken)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"^a report needs the package matplotlib: pip install 'matplotlib"):
        drot.report(run)
    assert not list(tmp_path.glob("**/*.html*"))


def test_figures_that_need_more_memory_than_there_is_are_refused(pruned, tmp_path):
    """A header of a few bytes can claim an array of any size."""
    folder = shutil.copytree(pruned["plain"], tmp_path / "run")
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000000000,), }"
    with zipfile.ZipFile(folder / "drot-figures.npz", "w") as file:
        length = (len(header) + 1).to_bytes(2, "little")
        file.writestr("layers.0.q_proj.map_before.npy", b"\x93NUMPY\x01\x00" + length + header + b"\n")
    accept_files(folder)
    with pytest.raises(UserError, match="is not a complete npz file"):
        drot.report(folder)


def test_figures_that_inflate_are_refused_before_they_do(pruned, tmp_path, monkeypatch):
    folder = shutil.copytree(pruned["plain"], tmp_path / "run")
    np.savez_compressed(
        folder / "drot-figures.npz",
        **{"layers.0.self_attn.q_proj.map_before": np.zeros((1000, 1000), np.float16)},
    )
    accept_files(folder)
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda *_: pytest.fail("it was inflated"))
    with pytest.raises(UserError, match="drot-figures.npz is not a complete npz file .an array is too large"):
        drot.report(folder)


def test_command(pruned, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert (
        cli.run(["report", str(pruned["plain"]), "--out", str(out), "--linears", "down_proj", "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed["page"] == str(out) and len(printed["linears"]) == 3 and out.exists()
    assert cli.run(["report", str(tmp_path)]) == 2
    assert "drot: " in capsys.readouterr().err
