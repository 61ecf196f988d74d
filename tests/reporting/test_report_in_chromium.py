"""The page in headless Chromium: it renders, has no error, requests nothing and never scrolls sideways."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from drot.reporting.write import report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --v=0"
)
#: A page that shows another page in a frame and then notes in its title how wide the frame and its content
#: are. Chromium's own window cannot be as narrow as a phone.
FRAME = """<!doctype html><title></title><iframe width="{width}" height="900" style="border: 0"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument;
  document.title = [page.documentElement.scrollWidth, frame.clientWidth].join(" ");
}};
frame.srcdoc = {page};
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is on the path"),
]


@pytest.fixture(scope="module")
def page(pruned, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("chromium") / "r.html"
    return report(pruned["rotated"], out=out, linears=["layers.0.*"]).page


@pytest.fixture
def chromium(tmp_path):
    """Runs Chromium on a page; returns stdout and the messages on its console."""

    def run(page: Path, *arguments: str) -> tuple[str, list[str]]:
        done = subprocess.run(
            [CHROMIUM, *OPTIONS.split(), f"--user-data-dir={tmp_path / 'new'}", *arguments, page.as_uri()],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return run


def test_it_renders_without_an_error_or_a_request(page, chromium):
    dom, console = chromium(page, "--dump-dom")
    assert console == []
    assert len(re.findall(r'<details class="linear"', dom)) == 7


def test_a_request_would_be_seen(page, chromium, tmp_path):
    """The policy of the page refuses what it would load, and the console names it."""
    cases = {
        '<img src="http://127.0.0.1:9/none.png">': "http://127.0.0.1:9/none.png",
        "<script>document.title = 1</script>": "inline script",
    }
    for hostile, named in cases.items():
        other = tmp_path / "hostile.html"
        other.write_text(page.read_text().replace("</main>", f"{hostile}</main>"))
        dom, console = chromium(other, "--dump-dom")
        assert any("Content Security Policy" in line and named in line for line in console), console
        assert "<title>1</title>" not in dom


@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_is_wider_than_the_window(page, chromium, tmp_path, width):
    text = page.read_text().replace('<details class="facts">', "<details open>")
    framed = tmp_path / "framed.html"
    framed.write_text(FRAME.format(width=width, page=json.dumps(text).replace("</", "<\\/")))
    dom, _ = chromium(framed, "--dump-dom", "--window-size=1400,1000")
    content, window = map(int, re.search(r"<title>(\d+) (\d+)</title>", dom).groups())
    assert content <= window == width


def test_light_dark_and_print_differ(page, chromium, tmp_path):
    images = {}
    for theme, options in {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}.items():
        file = tmp_path / f"{theme}.png"
        chromium(page, f"--screenshot={file}", "--window-size=800,600", *options)
        histogram = pytest.importorskip("PIL.Image").open(file).convert("L").histogram()
        images[theme] = sum(grey * count for grey, count in enumerate(histogram)) / sum(histogram)
    assert images["light"] > 200 and images["dark"] < 60
    pdf = tmp_path / "page.pdf"
    chromium(page, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    assert pdf.read_bytes().startswith(b"%PDF") and pdf.stat().st_size > 20000
