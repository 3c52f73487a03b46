"""Gives each picture in a lesson's output its alternative text, which is the title of the SVG.

MyST-NB reads no alternative text from an output, and puts the file's name there.
"""

import re
from html import unescape
from pathlib import Path
from typing import Any

TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)


def describe(app: Any, doctree: Any) -> None:
    """Set `alt` of the pictures of one page."""
    from docutils import nodes

    for image in doctree.findall(nodes.image):
        file = Path(app.srcdir) / image["uri"]
        if image["uri"].endswith(".svg") and image.get("alt", image["uri"]).endswith(".svg") and file.exists():
            title = TITLE.search(file.read_text())
            if title:
                image["alt"] = unescape(title[1])


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-read", describe)
    return {"parallel_read_safe": True}
