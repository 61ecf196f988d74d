"""The hooks of the documentation's site: equations in their paragraphs, and the tables of the options."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the checkout")
markdown = pytest.importorskip("markdown", reason="the site needs the extra docs")
EXTENSIONS = ["md_in_html", "attr_list", "tables"]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("latex2mathml", reason="the site needs the extra docs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_paragraph_that_begins_with_an_equation_stays_whole(hooks: ModuleType) -> None:
    text = "$$a = b$$\n\n$S$ is the *importance*. It chooses $P$\nfor a given $S$.\n"
    page = markdown.markdown(hooks.on_page_markdown(text), extensions=EXTENSIONS)
    (paragraph,) = re.findall(r"<p>(.*?)</p>", page, re.DOTALL)
    assert paragraph.count("<math") == 3 and "<em>importance</em>" in paragraph
    assert page.index('class="equation"') < page.index("<p>")


def test_the_tables_of_options_show_no_backslash(hooks: ModuleType) -> None:
    page = markdown.markdown(hooks.commands(), extensions=EXTENSIONS)
    cells = [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", page, re.DOTALL)]
    assert "--method [magnitude&#124;wanda&#124;sparsegpt]" in cells
    assert not [cell for cell in cells if "\\" in cell]
    assert all(
        row.count("<td>") == 2 for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL) if "<td>" in row
    )
