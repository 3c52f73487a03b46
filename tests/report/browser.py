"""A real browser, headless, to look at a page: what it says on its console, how large its figures are, a screenshot."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MEASURE = """
<script>
addEventListener("load", async () => {
  const boxes = [...document.querySelectorAll("figure")].map(f => {
    const box = f.firstElementChild.getBoundingClientRect();
    let marks = f.querySelectorAll("path, text, use").length;
    const image = f.querySelector("img");
    if (image) marks = image.naturalWidth;
    return {id: f.id, width: box.width, height: box.height, marks};
  });
  const facts = {boxes, wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
                 loaded: performance.getEntriesByType("resource").map(entry => entry.name), extra: await window.extra};
  const place = document.createElement("pre");
  place.id = "measured";
  place.textContent = JSON.stringify(facts);
  document.body.append(place);
});
</script>
"""


def browser():
    """The path of a browser; skips the test where there is none."""
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path
    pytest.skip(f"no browser on this machine: none of {', '.join(NAMES)}")
    raise AssertionError


def run(folder, *arguments, size="1200,3400"):
    """Start the browser with a separate profile; returns its process."""
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-extensions",
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--v=0",
        f"--window-size={size}",
        *arguments,
    ]
    # The browser's socket is below its temporary folder, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(dir="/tmp" if Path("/tmp").is_dir() else None) as short:
        environment = {**os.environ, "TMPDIR": short}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert answer.returncode == 0, answer.stderr
    return answer


def look(page: Path, folder: Path, script="", size="1200,3400", dark=False):
    """(facts measured in the browser, lines on its console).

    script: an element that may set `window.extra`, a separate fact. dark: with the user's wish for a dark page.
    """
    copy = folder / "measured.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", script + MEASURE + "</body>"), encoding="utf-8")
    mode = ["--blink-settings=preferredColorScheme=0"] if dark else []
    answer = run(folder, "--virtual-time-budget=2000", *mode, "--dump-dom", copy.as_uri(), size=size)
    found = re.search(r'<pre id="measured">(.*?)</pre>', answer.stdout, re.DOTALL)
    return json.loads(unescape(found[1])) if found else None, console_of(answer)


def screenshot(page: Path, folder: Path, target: Path):
    """(the PNG of the page, lines on its console)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    answer = run(folder, f"--screenshot={target}", page.as_uri())
    return target, console_of(answer)


def console_of(answer):
    """What the page wrote to its console, errors among it."""
    return [line for line in answer.stderr.splitlines() if "CONSOLE" in line]
