"""Pictures and files from a trace: what moved, when, between whom, and what it cost in memory.

    figure = draw("space-time", world.traces)        a matplotlib Figure; KINDS lists the names
    save(figure, "ring.svg")                          svg, pdf or png, by the suffix
    show(step(main, 4))                               a page to step through, message by message, in a notebook
    write_perfetto("ring.json", world.traces)         for ui.perfetto.dev or chrome://tracing

matplotlib is imported when the first picture is drawn, never before, and pyplot not at all.
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports
from minidist.report.draw import KINDS, draw

if TYPE_CHECKING:
    from minidist.report.frame import save
    from minidist.report.notebook import show
    from minidist.report.perfetto import write_perfetto
    from minidist.report.stepper_world import step

__all__ = ["KINDS", "draw", "save", "show", "step", "write_perfetto"]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
