"""The built site, in a headless Chromium and as files: `make site-test`. Left out of `make test`: it takes a minute."""

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/site/html"
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("[0-9][0-9]*_*.ipynb"))
PAGES = [
    "index",
    "lessons/README",
    "docs/techniques",
    "api/minidist.core.collectives",
    "source/minidist/core/collectives/ring.py",
]
# What a browser loads by itself, without a click.
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
NOT_LOADED = {"canonical", "next", "prev", "search", "index", "author"}  # values of rel


class Page(HTMLParser):
    """What one page loads, links to, and can be linked at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if values.get("id"):
            self.anchors.add(values["id"])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        target = values.get(LOADING.get(tag, ""))
        if target and not (tag == "link" and values.get("rel") in NOT_LOADED):
            self.loads.append(target)


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    """Every page of the site."""
    # A folder of the theme has a template, which is no page.
    found = {path: Page(path) for path in sorted(SITE.rglob("*.html")) if "_static" not in path.parts}
    assert len(found) > 100, "the site is not built: make site"
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Debian's Chromium, driven by Playwright."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on this machine (Debian, Ubuntu: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install -e '.[site]'")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser):
    """A tab that ends the test when a page has an error or asks another host for something."""
    tab = browser.new_page(viewport={"width": 1400, "height": 1000})
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url))
    tab.on("requestfailed", lambda request: wrong.append(f"not loaded: {request.url}"))
    yield tab
    tab.close()
    assert wrong == []


def url(page: str) -> str:
    """The address of a page on the disk."""
    return (SITE / f"{page}.html").as_uri()


def test_every_link_inside_the_site_leads_to_a_page_and_a_place_on_it(pages):
    broken = []
    for path, page in pages.items():
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.relative_to(SITE)}: {link}")
    assert broken == []


def test_no_page_loads_anything_from_another_host(pages):
    loads = {f"{path.relative_to(SITE)}: {load}" for path, page in pages.items() for load in page.loads}
    styles = {
        f"{path.relative_to(SITE)}: {load}"
        for path in SITE.rglob("*.css")
        for load in re.findall(r"(?:url\(|@import\s)\s*[\"']?([^\"')\s]+)", path.read_text(encoding="utf-8"))
    }
    scripts = {
        f"{path.relative_to(SITE)}: {load}"
        for path in SITE.rglob("*.js")
        for load in re.findall(
            r"(?:fetch|import|importScripts|src\s*=|open)\s*\(?\s*[\"'`]((?:https?:)?//[^\"'`]+)",
            path.read_text(encoding="utf-8"),
        )
    }
    assert len(loads) > 1000
    assert [load for load in sorted(loads | styles | scripts) if re.search(r": (?:https?:)?//", load)] == []


def test_every_lesson_and_every_guide_has_a_page(pages):
    names = {path.relative_to(SITE).with_suffix("").as_posix() for path in pages}
    assert {f"lessons/{name}" for name in LESSONS} | {
        path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "docs").glob("*.md")
    } <= names


def test_the_address_of_the_lessons_folder_shows_the_lessons(tab):
    tab.goto(url("lessons/index"))
    tab.wait_for_url(url("lessons/README"), timeout=20_000)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_without_an_error_and_shows_its_pictures(tab, page):
    tab.goto(url(page))
    pictures = tab.evaluate("[...document.images].map(image => [image.alt, image.naturalWidth])")
    assert all(alt and not alt.endswith((".svg", ".png")) and width > 0 for alt, width in pictures), pictures
    if page in ("index", "lessons/README"):
        assert pictures


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_shows_its_pictures_and_its_exercise_and_leads_to_the_next_one(tab, name):
    tab.goto(url(f"lessons/{name}"))
    pictures = tab.evaluate("[...document.images].map(image => [image.alt, image.naturalWidth])")
    assert pictures
    assert all(alt and not alt.endswith((".svg", ".png")) and width > 0 for alt, width in pictures), pictures

    # Code is read without scrolling to the right, and has the colours of a program.
    cells = tab.evaluate(
        "[...document.querySelectorAll('.cell_input pre')].map(pre =>"
        " [pre.scrollWidth - pre.clientWidth, pre.innerText, pre.querySelectorAll('span.k, span.s2').length])"
    )
    exercise = [cell for cell in cells if re.search(rf'check\(f?"{name.partition("_")[0]}\.', cell[1])]
    assert exercise
    assert any(colours > 0 for _, _, colours in exercise)
    assert [text for too_wide, text, _ in cells if too_wide > 0] == []

    following = [*LESSONS, "glossary"][LESSONS.index(name) + 1]
    tab.click("a.right-next")
    tab.wait_for_url(url(f"lessons/{following}"), wait_until="load", timeout=20_000)


def test_the_search_finds_the_lesson_and_the_function_on_reduce_scatter(tab):
    tab.goto(url("index"))
    tab.keyboard.press("Control+k")
    tab.keyboard.type("reduce-scatter")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#search-results li a")
    found = tab.eval_on_selector_all("#search-results li a", "links => links.map(link => link.pathname + link.hash)")
    assert any(link.endswith("lessons/04_all_reduce_without_a_boss.html") for link in found)
    assert any(link.endswith("#minidist.core.collectives.reduce_scatter") for link in found)


def test_the_reference_describes_a_function_with_its_parameters(tab):
    tab.goto(url("api/minidist.core.collectives"))
    entry = tab.locator("dt[id='minidist.core.collectives.reduce_scatter'] + dd").inner_text()
    assert "Give rank r chunk r of the sum of all ranks’ arrays (flattened)" in entry
    assert "counts: elements of each rank’s chunk" in entry
    assert "`" not in entry
