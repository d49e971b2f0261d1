"""Opens the pages of a report in headless Chromium, in the sizes of a desktop and a phone, and takes screenshots.

    python -m tests.measure.look_at_report REPORT.html [--out DIR]

Checks in the browser's layout of the page that every picture has a size, that no two labels of a picture overlap, that
no label is smaller than 12 pixels, that only code is wider than the screen, and that nothing was fetched or refused.
The screenshots are for a person; tests/unit/tools/report/test_page.py makes the same checks.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SCREENS = {"desk": (1200, 5000), "phone": (500, 8000)}  # a window without a screenshot is 500 wide at least
DEADLINE_S = 120.0
FONT_SIZE = 10  # of a label, in the units of its picture
# Messages of Chromium that do not depend on the page.
UNRELATED = re.compile(r"dbus|gpu|vaapi|vulkan|sandbox|zygote|font|ALSA|google_apis|task_policy|latency", re.IGNORECASE)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
)
NOT_THERE = "chromium must be on PATH, and is not; install it (Debian: apt-get install chromium)"
# A label is a group of paths with its text in a comment. Edges may touch, by less than a pixel.
ACCOUNT = """<script>
const labels = picture => [...picture.querySelectorAll('g[id*="-text_"]')].map(label => {
  const {left, right, top, bottom} = label.getBoundingClientRect();
  const comment = [...label.childNodes].find(node => node.nodeType === Node.COMMENT_NODE);
  return {text: comment ? comment.data.trim() : label.id, left, right, top, bottom};
});
const overlaps = found => found.flatMap((a, i) => found.slice(i + 1).filter(b =>
  Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1
).map(b => [a.text, b.text]));
const outside = (found, box) => found.filter(l =>
  l.left < box.left - 1 || l.right > box.right + 1 || l.top < box.top - 1 || l.bottom > box.bottom + 1
).map(l => l.text);
document.title = JSON.stringify({
  pictures: [...document.querySelectorAll('figure svg')].map(picture => {
    const found = labels(picture), box = picture.getBoundingClientRect();
    return {name: picture.getAttribute('aria-label'), width: box.width, height: box.height,
            scale: box.width / (picture.viewBox.baseVal.width || box.width || 1),
            labels: found.map(label => label.text), overlaps: overlaps(found), outside: outside(found, box)};
  }),
  cut: [...document.querySelectorAll('.wide')].filter(box => box.scrollWidth > box.clientWidth)
    .map(box => box.querySelector('tr').lastElementChild.textContent + ' by ' + (box.scrollWidth - box.clientWidth)),
  scrolls: [...document.querySelectorAll('.picture')].filter(box => box.scrollWidth > box.clientWidth)
    .map(box => box.querySelector('svg').getAttribute('aria-label')),
  screen: document.documentElement.clientWidth,
  over: document.documentElement.scrollWidth - document.documentElement.clientWidth})</script>"""


def find_chromium() -> str | None:
    """Where it is."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def run(program: str, page: Path, size: tuple[int, int], *flags: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [program, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        words += [*flags, page.resolve().as_uri()]
        return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)


def page_layout(program: str, page: Path, size: tuple[int, int]) -> dict[str, Any]:
    """The pictures of the page with their sizes and labels, which a script in a copy of the page measures."""
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.html"
        copy.write_text(text.replace("</body>", ACCOUNT + "</body>"), encoding="utf-8")
        shown = run(program, copy, size, "--dump-dom").stdout
    title = re.search(r"<title>(.*?)</title>", shown, flags=re.DOTALL)
    found: dict[str, Any] = json.loads(html.unescape(title.group(1))) if title else {}
    return found


def faults(layout: dict[str, Any]) -> list[str]:
    """The faults of a page in its layout, a sentence each."""
    found = ["there is no picture"] if not layout["pictures"] else []
    if layout["over"] > 0:
        found.append(f"the page is {layout['over']} pixels wider than the screen")
    found += [f"the column {title} pixels is outside of its table's frame" for title in layout["cut"]]
    found += [f"{name}: wider than its frame" for name in layout["scrolls"]]
    for one in layout["pictures"]:
        if one["scale"] * FONT_SIZE < 12:
            found.append(f"{one['name']}: text of {one['scale'] * FONT_SIZE:.1f} pixels")
        if not (one["width"] > 0 and one["height"] > 0 and one["labels"]):
            found.append(f"{one['name']}: {one['width']} by {one['height']} pixels, {len(one['labels'])} labels")
        found += [f"{one['name']}: {a!r} and {b!r} overlap" for a, b in one["overlaps"]]
        found += [f"{one['name']}: {text!r} leaves the picture" for text in one["outside"]]
    return found


def browser_messages(program: str, page: Path, size: tuple[int, int], *flags: str) -> list[str]:
    """Open the page and return the browser's messages: errors of scripts, and what it refused or could not fetch."""
    lines = run(program, page, size, *flags).stderr.splitlines()
    return [line for line in lines if ("CONSOLE" in line or "ERROR" in line) and not UNRELATED.search(line)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, metavar="REPORT.html")
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    program = find_chromium()
    if program is None:
        sys.exit(f"error: {NOT_THERE}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    is_good = True
    for name, size in SCREENS.items():
        picture = (arguments.out / f"{arguments.page.stem}-{name}.png").resolve()
        messages = browser_messages(program, arguments.page, size, f"--screenshot={picture}")
        layout = page_layout(program, arguments.page, size)
        wrong = faults(layout)
        is_good = is_good and not wrong and not messages
        print(
            f"{picture}: {len(layout['pictures'])} pictures, {sum(len(p['labels']) for p in layout['pictures'])} labels"
        )
        print("\n".join(f"  {one}" for one in [*wrong, *messages]) or "  no fault and no message of the browser")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
