"""Opens the pages of a report in headless Chromium, as on a desk and on a phone, and takes pictures to be looked at.

    python -m tests.measure.look_at_report REPORT.html [--out DIR]

Checks in the browser's own account of the page that every picture has a size, that nothing but tables and code is
wider than the screen, and that nothing was fetched or refused. A person looks at the pictures.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
SCREENS = {"desk": (1280, 5000), "phone": (500, 8000)}  # a window of Chromium is 500 wide at least
DEADLINE_S = 120.0
# Chromium says these of itself, whatever it shows.
OF_ITS_OWN = re.compile(r"dbus|gpu|vaapi|vulkan|sandbox|zygote|font|ALSA|google_apis|task_policy", re.IGNORECASE)
SIZES = """<script>document.title = JSON.stringify({
  pictures: [...document.querySelectorAll('figure svg')].map(p => [p.clientWidth, p.clientHeight]),
  over: document.documentElement.scrollWidth - document.documentElement.clientWidth})</script>"""


def chromium() -> str:
    """Where it is.

    Raises:
        SystemExit: it is not there; says how to get it.
    """
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        sys.exit("error: chromium must be on PATH, and is not; install it (Debian: apt-get install chromium)")
    return found


def run(program: str, page: Path, size: tuple[int, int], *flags: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as profile:
        words = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
        ]
        words += [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", *flags, page.resolve().as_uri()]
        return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)


def measured(program: str, page: Path, size: tuple[int, int]) -> str:
    """What the page's sizes are: a copy that may run one script says so in its title."""
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.html"
        copy.write_text(text.replace("</body>", SIZES + "</body>"), encoding="utf-8")
        shown = run(program, copy, size, "--dump-dom").stdout
    title = re.search(r"<title>(.*?)</title>", shown)
    return title.group(1) if title else "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, metavar="REPORT.html")
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    program = chromium()
    arguments.out.mkdir(parents=True, exist_ok=True)
    is_good = True
    for name, size in SCREENS.items():
        picture = (arguments.out / f"{arguments.page.stem}-{name}.png").resolve()
        done = run(program, arguments.page, size, f"--screenshot={picture}")
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line or "ERROR" in line]
        said = [line for line in said if not OF_ITS_OWN.search(line)]
        sizes = measured(program, arguments.page, size)
        fits = '"over":0}' in sizes and "[0," not in sizes and ",0]" not in sizes
        is_good = is_good and fits and not said
        print(f"{picture}: {sizes}: {'good' if fits else 'TOO WIDE, OR A PICTURE WITHOUT SIZE'}")
        print("\n".join(said) or "  the browser complains of nothing")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
