"""A figure, or the page to step through a run, in the cell of a notebook.

Proved by: tests/report/test_pictures.py, tests/report/test_stepper.py
"""

import importlib
import sys
from typing import Any

from minidist.report.frame import alt_text, png, svg


def show(figure: Any, alt: str = "") -> None:
    """Display the figure where there is a notebook, as SVG with a text for those who cannot see it.

    A run, such as `step(main, 4)` or the traces of a world, is displayed as a page to step through (`stepper`).

    Does nothing in a script, which has `save`. A PNG goes along for readers that show no SVG of a notebook that was not
    run by themselves. alt: the picture in words; by default its titles and labels.
    """
    interactive = sys.modules.get("IPython")
    if interactive is None or interactive.get_ipython() is None:
        return
    notebook: Any = importlib.import_module("IPython.display")
    if not hasattr(figure, "savefig"):
        from minidist.report.stepper import show as steps

        page = steps(figure, alt)
        notebook.display({"text/html": page._repr_html_(), "text/plain": page.said()}, raw=True)
        return
    alt = alt or alt_text(figure)
    pictures = {"image/svg+xml": svg(figure, alt), "image/png": png(figure), "text/plain": alt}
    notebook.display(pictures, raw=True, metadata={"image/png": {"alt": alt}})
