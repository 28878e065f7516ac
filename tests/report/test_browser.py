"""A report in a real headless Chromium: it renders without a console message, at two widths, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape

import pytest

from deep_offload.report import report_html
from deep_offload.report_run import read_run
from tests.report.run_files import whole_run, write_run

image = pytest.importorskip("matplotlib.image", reason="reports are drawn by matplotlib")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")

# Runs in a copy of the page that allows scripts, in a frame as narrow as a phone (windows are not), and leaves what it
# found in the title of the page around it.
PROBE = """<script>addEventListener("load", () => {
const box = element => element.getBoundingClientRect();
const texts = [...document.querySelectorAll("svg text")].filter(t => box(t).width > 0);
parent.document.title = JSON.stringify({
  width: innerWidth, scroll: document.documentElement.scrollWidth,
  charts: [...document.querySelectorAll("svg")].filter(s => box(s).width > 250 && box(s).height > 100).length,
  smallest: Math.min(...texts.map(t => parseFloat(getComputedStyle(t).fontSize)
    * box(t.closest("svg")).width / t.closest("svg").viewBox.baseVal.width)),
  ink: getComputedStyle(document.body).color, paper: getComputedStyle(document.body).backgroundColor,
  chartInk: getComputedStyle(texts[0]).fill,
}); });</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("report") / "run", whole_run())
    path = folder / "report.html"
    path.write_text(report_html(read_run(folder)))
    return path


def chromium(*words: str) -> subprocess.CompletedProcess:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)


def scheme(is_dark: bool) -> str:
    return f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"


def brightness(color: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", color)[:3])) / 3


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_renders(page, tmp_path, width, is_dark):
    """The page itself gives no console message, and its picture has the right size, background and content."""
    shot = tmp_path / "shot.png"
    result = chromium(scheme(is_dark), f"--window-size={width},1600", f"--screenshot={shot}", page.as_uri())
    assert "CONSOLE" not in result.stderr, result.stderr
    pixels = image.imread(shot)[..., :3]
    assert pixels.shape[1] == width
    assert (pixels[2, 2].mean() < 0.2) == is_dark
    assert pixels.std() > 0.03


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_is_readable(page, tmp_path, width, is_dark):
    """Nothing sticks out sideways, every chart has a size, letters are 8 pixels or more, and contrast is strong."""
    html = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text()).replace("</body>", PROBE + "</body>")
    probed = tmp_path / "probed.html"
    probed.write_text(
        "<!doctype html><html><head><meta name='color-scheme' content='light dark'></head><body>"
        f'<iframe width={width} height=1600 style="border: 0" srcdoc="{escape(html, quote=True)}"></iframe>'
    )
    result = chromium(scheme(is_dark), "--window-size=1400,1700", "--dump-dom", probed.as_uri())
    title = re.search(r"<title>(.*?)</title>", result.stdout, re.DOTALL)
    found = json.loads(title[1])
    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["charts"] == 8
    assert found["smallest"] >= 8
    assert abs(brightness(found["ink"]) - brightness(found["paper"])) > 150
    assert (brightness(found["paper"]) < 60) == is_dark
    assert abs(brightness(found["chartInk"]) - brightness(found["paper"])) > 150


def test_a_broken_page_is_seen(tmp_path):
    """An image from a network under the page's own policy shows as a console message."""
    broken = tmp_path / "broken.html"
    broken.write_text(
        "<!doctype html><meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
        "<img src='http://example.invalid/x.png'>"
    )
    result = chromium(f"--screenshot={tmp_path / 'shot.png'}", broken.as_uri())
    assert "CONSOLE" in result.stderr
