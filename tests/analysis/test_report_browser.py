"""Promise: in a real browser the page sorts, fits a phone, prints, and loads nothing outside of itself.

Needs Debian's `chromium`; skipped where it is not installed.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"),
]

PROBE = """<script>
addEventListener("load", () => {
  const table = document.querySelector("#summary table"), head = table.querySelectorAll("th button")[0];
  const column = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
  head.click(); const up = column(); head.click(); const down = column();
  const root = document.documentElement, outside = one => !one.name.startsWith("data:");
  const asked = performance.getEntriesByType("resource").filter(outside).map(one => one.name);
  const seen = {up, down, asked, wide: root.scrollWidth, screen: root.clientWidth};
  document.body.innerHTML = "PROBE" + JSON.stringify(seen);
});
</script>"""


@pytest.fixture
def page(ordinary_report, tmp_path) -> Path:
    """A copy, which a browser may write beside."""
    return Path(shutil.copy(ordinary_report, tmp_path))


def chromium(page: Path, *words: str) -> str:
    done = subprocess.run(
        [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000",
         f"--user-data-dir={page.parent / 'profile'}", *words, page.as_uri()],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    return done.stdout


def probed(page: Path, width: int) -> dict:
    copy = page.with_name(f"probe{width}.html")
    copy.write_text(page.read_text() + PROBE)
    dom = chromium(copy, f"--window-size={width},900", "--dump-dom")
    found = re.search(r"PROBE(\{.*\})", dom)
    assert found, dom[-500:]
    return json.loads(found[1])


def test_the_page_fits_its_window_sorts_and_stays_alone(page):
    seen = probed(page, 500)  # the narrowest window that this browser opens
    assert seen["wide"] <= seen["screen"]
    assert seen["up"] == sorted(seen["up"])
    assert seen["down"] == sorted(seen["up"], reverse=True)
    assert len(set(seen["up"])) == 3
    assert seen["asked"] == []


FRAME = """<body><iframe src="{page}" style="border: 0; width: 390px; height: 900px"></iframe><script>
addEventListener("load", () => {{
  const inner = document.querySelector("iframe").contentDocument, root = inner.documentElement;
  for (const one of inner.querySelectorAll("details")) one.open = true;
  const cropped = [...inner.querySelectorAll("td, img, .row, figcaption, h2")].filter(one => {{
    const box = one.getBoundingClientRect();
    return box.width && (box.right > root.clientWidth + 1 || box.left < -1);
  }});
  const names = cropped.map(one => one.outerHTML.slice(0, 80));
  const seen = {{wide: root.scrollWidth, screen: root.clientWidth, cropped: names}};
  document.body.textContent = "PROBE" + JSON.stringify(seen);
}});
</script>"""


def test_a_phone_shows_every_value_and_figure_whole(page):
    """In a frame of 390 pixels, because this browser opens no window as narrow."""
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.format(page=page.as_uri()))
    found = re.search(r"PROBE(\{.*\})", chromium(frame, "--allow-file-access-from-files", "--dump-dom"))
    assert found
    seen = json.loads(html.unescape(found[1]))
    assert seen["wide"] <= seen["screen"] <= 390
    assert seen["cropped"] == []


def test_folded_tables_are_printed_and_a_link_into_one_opens_it(page):
    probe = """<script>
      addEventListener("hashchange", () => {
        const [open, others] = ["costs", "runs"].map(id => document.querySelector(`#${id} details`).open);
        document.body.innerHTML = "PROBE" + JSON.stringify({open, others});
      });
      addEventListener("load", () => { location.hash = "costs"; });</script>"""
    copy = page.with_name("link.html")
    copy.write_text(page.read_text() + probe)
    found = re.search(r"PROBE(\{.*?\})", chromium(copy, "--dump-dom"))
    assert found
    assert json.loads(found[1]) == {"open": True, "others": False}
    closed = page.with_name("closed.html")
    text = page.read_text().replace('"beforeprint"', '"never"').replace("::details-content", "::nothing")
    closed.write_text(text)
    sizes = []
    for one in (page, closed):
        target = one.with_suffix(".pdf")
        chromium(one, f"--print-to-pdf={target}", "--no-pdf-header-footer")
        sizes.append(len(re.findall(rb"/Type\s*/Page\b", target.read_bytes())))
    assert sizes[0] > sizes[1] > 0
    assert sizes[0] >= 5
