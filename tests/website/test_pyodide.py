"""Simulated ranks in Pyodide, under Node and in a headless Chromium: `make pyodide-test`.

Pyodide comes from the npm registry, with Python and without NumPy: see pyodide_programs.py.
"""

import functools
import http.server
import io
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from tests.base.fiber_scenarios import SCENARIOS

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
PYODIDE = ROOT / "build/pyodide/node_modules/pyodide"
# Loads Python and the archive, and returns what the program prints.
RUN = """
async (loadPyodide, archive) => {
    const lines = [];
    const python = await loadPyodide({ stdout: (line) => lines.push(line) });
    python.unpackArchive(archive, "zip");
    await python.runPythonAsync("import tests.website.pyodide_programs as programs; programs.main()");
    return lines;
}
"""


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    """Skip without Pyodide."""
    if not PYODIDE.is_dir():
        pytest.skip("Pyodide is not installed: make pyodide-test")


@pytest.fixture(scope="module")
def archive() -> bytes:
    """The package and the programs."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in (*ROOT.glob("minidist/**/*.py"), *ROOT.glob("tests/base/*.py"), *ROOT.glob("tests/website/*.py")):
            archive.write(path, path.relative_to(ROOT))
    return content.getvalue()


@pytest.fixture(scope="module")
def expected() -> str:
    """What CPython's greenlets give."""
    # In a separate process: here NumPy is the real one.
    command = [sys.executable, "-m", "tests.website.pyodide_programs"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return next(line for line in lines if line.startswith("results"))


def check(lines: list[str], expected: str) -> None:
    assert lines[: len(SCENARIOS)] == [f"passed {scenario.__name__}" for scenario in SCENARIOS]
    assert lines[len(SCENARIOS)] == expected
    print(lines[-1])


def test_under_node(tmp_path, archive, expected):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    options = subprocess.run([node, "--v8-options"], capture_output=True, text=True, check=True).stdout
    flags = [flag for flag in ("--experimental-wasm-stack-switching", "--experimental-wasm-jspi") if flag in options]
    (tmp_path / "archive.zip").write_bytes(archive)
    (tmp_path / "host.mjs").write_text(
        f"import {{ loadPyodide }} from {str(PYODIDE / 'pyodide.mjs')!r};\n"
        'import { readFileSync } from "node:fs";\n'
        f"const run = {RUN};\n"
        'for (const line of await run(loadPyodide, new Uint8Array(readFileSync("archive.zip")))) console.log(line);\n'
    )
    done = subprocess.run([node, *flags, "host.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    check(done.stdout.splitlines(), expected)


def test_in_chromium(tmp_path, archive, expected):
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on this machine (Debian, Ubuntu: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install -e '.[site]'")

    # A browser loads no modules from file: addresses, so this machine serves the folder to itself.
    (tmp_path / "pyodide").symlink_to(PYODIDE)
    (tmp_path / "archive.zip").write_bytes(archive)
    (tmp_path / "index.html").write_text("<!doctype html><title>Simulated ranks</title>")
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
            tab = browser.new_page()
            tab.goto(f"http://127.0.0.1:{server.server_port}/index.html")
            lines = tab.evaluate(
                "async () => { const { loadPyodide } = await import('/pyodide/pyodide.mjs');"
                f" return await ({RUN})(loadPyodide, await (await fetch('/archive.zip')).arrayBuffer()); }}"
            )
            browser.close()
        server.shutdown()
    check(lines, expected)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def guess_type(self, path):
        return "text/javascript" if path.endswith(".mjs") else super().guess_type(path)

    def log_message(self, *arguments):
        pass
