"""A run as a page to step through: one message per key, the arrays of every rank, and what each rank computes.

    from minidist.report.stepper import show, step

    show(step(main, 4))              of a program: main(comm) on 4 simulated ranks, with the values of its small arrays
    show(world)                      of any world that has run, or show(traces): messages and computations
    show(as_traces(timing))          of a pipeline schedule

The page is one HTML file without a request. It plays by itself, or step by step: the arrow keys, a slider and buttons;
each step is also a sentence, which a screen reader speaks.

Proved by: tests/report/test_stepper.py
"""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.files import writing
from minidist.base.traces import Trace
from minidist.comm.launching import writable
from minidist.core.base.errors import UsageError
from minidist.report.frame import GENERATOR, HEAD
from minidist.report.palette import PALETTE, RANKS, kind_of
from minidist.report.stepper_world import NEVER, KeptArray, Place, StepWorld, step
from minidist.report.timeline import arrived, pairs

__all__ = ["Stepper", "show", "step"]

SCRIPT, STYLE = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("stepper.js", "stepper.css"))
MAX_STEPS, MAX_RANKS, MAX_SPANS = 400, 32, 2_000
ROW, CELLS = 26, 24  # pixels of a line of cells; cells in a line
MAX_NAME = 16  # letters of a variable, next to its cells


@dataclass(frozen=True)
class Stepper:
    """The page, and what it draws. In a notebook it shows itself; `write` makes a file of it."""

    data: dict[str, Any]
    about: str = ""

    @property
    def page(self) -> str:
        """The page as HTML."""
        return _document(self.data, self.about)

    def said(self) -> str:
        """The page in words: what a notebook shows where there is no browser."""
        steps = len(self.data["steps"])
        return f"{self.about} {steps} steps on {self.data['ranks']} ranks; open the notebook in Jupyter.".strip()

    def _repr_html_(self) -> str:
        # A separate frame keeps the page's script and style apart from the notebook's.
        return (
            f'<iframe srcdoc="{html.escape(self.page)}" sandbox="allow-scripts" title="steps of a run"'
            f' style="width: 100%; height: {_height(self.data)}px; border: 0"></iframe>'
        )

    def write(self, path: str | Path) -> Path:
        """Write the page into a file, which any browser opens, or a moving picture into a .gif; returns the path."""
        path = Path(path)
        if is_gif := path.suffix == ".gif":
            from minidist.report.stepper_gif import gif
        writable(path, "the stepper's file", "GIF89a" if is_gif else "<!doctype html>", "" if is_gif else GENERATOR)
        with writing("the steps", path, "make room there, or choose another file"):
            path.write_bytes(gif(self.data, ROW, _height(self.data) - 120) if is_gif else self.page.encode())
        return path


def show(run: Any, title: str = "") -> Stepper:
    """Return the stepper of a run: a world that has run, or its traces.

    Of the first MAX_STEPS messages and MAX_RANKS ranks; what is left out is a sentence on the page. Raises UsageError
    for a run without a message and without a computation.
    """
    traces: Sequence[Trace] = getattr(run, "traces", run)
    steps, arrays = _steps(run, traces)
    spans = [span for trace in traces for span in trace.spans if span.category == "compute" and span.end > span.start]
    spans.sort(key=lambda span: (span.start, span.rank))
    if not steps and not spans:
        raise UsageError("the run has sent no message and recorded no computation; there is nothing to step through")

    # A page that is too large to look at is cut, and says so.
    ranks = min(max(len(traces), 1), MAX_RANKS)
    counts = [(len(steps), MAX_STEPS, "messages"), (len(spans), MAX_SPANS, "computations")]
    counts.append((len(traces), MAX_RANKS, "ranks"))
    said = [f"the first {most} of {count} {what}" for count, most, what in counts if count > most]
    steps = [s for s in steps[:MAX_STEPS] if max(s["from"], s["to"]) < ranks]
    spans = [s for s in spans[:MAX_SPANS] if s.rank < ranks]
    data = {
        "ranks": ranks,
        # Without messages, the times at which a computation starts.
        "steps": steps or [{"time": time} for time in sorted({span.start for span in spans})[:MAX_STEPS]],
        "arrays": arrays[:ranks],
        "spans": [[s.rank, s.name, PALETTE[kind_of(s.name)], s.start, s.end] for s in spans],
        "colours": RANKS,
        "row": ROW,
        "cells": CELLS,
    }
    about = title + (f" Drawn are {' and '.join(said)}." if said else "")
    return Stepper(data, about.strip())


def _steps(run: Any, traces: Sequence[Trace]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Return the messages in the order in which they arrive, and the arrays of each rank with their values."""
    # Of any trace: the pairs of its messages, without arrays.
    if not isinstance(run, StepWorld):
        found = sorted(filter(arrived, pairs(traces)), key=lambda pair: pair.receive.end if pair.receive else 0.0)
        return [_step(send, receive, None, None) for send, receive in found], [[] for _ in traces]

    # Of a StepWorld: the steps by the time of arrival, and what changed with each.
    matching = run.matching
    order = sorted(range(len(matching.steps)), key=lambda number: matching.steps[number].receive.end)
    place = {-1: -1, **{number: at for at, number in enumerate(order)}, NEVER: NEVER}
    # Of each rank, the number of each shown array -> its place on the page.
    shown: list[dict[int, int]] = []
    for row in matching.arrays:
        numbers = [number for number, kept in enumerate(row) if kept.shown]
        shown.append({number: at for at, number in enumerate(numbers)})
    steps = []
    for number in order:
        send, receive, source, target = matching.steps[number]
        steps.append(_step(send, receive, _shown(source, shown[send.rank]), _shown(target, shown[receive.rank])))
    arrays = []
    for rank, row in enumerate(matching.arrays):
        sources = [(at, step["source"]) for at, step in enumerate(steps) if step["from"] == rank and step["source"]]
        sent = [
            [(at, first, stop) for at, (one, first, stop) in sources if one == own] for own in range(len(shown[rank]))
        ]
        arrays.append([_values(row[number], place, sent[at]) for number, at in shown[rank].items()])
    return steps, arrays


def _shown(place: Place | None, numbers: dict[int, int]) -> list[int] | None:
    return None if place is None or place.number not in numbers else [numbers[place.number], place.first, place.stop]


def _step(send: Any, receive: Any, source: list[int] | None, target: list[int] | None) -> dict[str, Any]:
    return {
        "from": send.rank,
        "to": receive.rank,
        "bytes": send.nbytes,
        "what": "message" if send.operation == "message" else send.operation,
        "time": receive.end,
        "source": source,
        "target": target,
    }


def _values(kept: KeptArray, place: dict[int, int], sent: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Return what the page needs of an array: its name or type, and step -> its elements as short texts.

    sent: (step, first, stop) of each message from it. An element whose value is not known yet has the text "".
    """
    # What has been sent was there before; two messages that arrive at the same time may have been drawn in any order.
    since = [place[int(step)] for step in kept.since]
    for at, first, stop in sent:
        since[first:stop] = [min(step, at - 1) for step in since[first:stop]]

    held = {place[step]: values for step, values in kept.values.items()}
    changes, values = [], held[-1]
    for at in sorted({-1, *held, *since} - {NEVER}):
        values = held.get(at, values)
        changes.append([at, [_text(v) if at >= known else "" for v, known in zip(values, since, strict=True)]])
    shape = ", ".join(map(str, kept.array.shape))
    return {"about": kept.name[:MAX_NAME] or f"{kept.array.dtype}[{shape}]", "changes": changes}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def _height(data: dict[str, Any]) -> int:
    """Return the height of the page: the lines of each rank's arrays, a line for its computations, and the controls."""
    lines = data["ranks"] if data["spans"] else 0
    if "from" in data["steps"][0]:
        sizes = [[len(array["changes"][0][1]) for array in row] for row in data["arrays"]]
        lines += sum(1 + sum(1 + (size - 1) // CELLS for size in row) for row in sizes)
    return 170 + ROW * lines


def _document(data: dict[str, Any], about: str) -> str:
    # A less-than sign in a name would end the element that the numbers stand in.
    numbers = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    buttons = "".join(
        f'<button type="button" data-do="{do}" aria-label="{about}" title="{about}">{name}</button>'
        for do, name, about in (
            ("first", "|◀", "first step (Home)"),
            ("back", "◀", "one step back (left arrow)"),
            ("play", "▶▶", "play or pause (space)"),
            ("on", "▶", "one step on (right arrow)"),
            ("last", "▶|", "last step (End)"),
        )
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{HEAD}'
        f"<title>{html.escape(about) or 'steps'}</title><style>\n{STYLE}</style></head><body>"
        + (f"<p>{html.escape(about)}</p>" if about else "")
        + f'<div class="controls">{buttons}<input type="range" min="0" value="0" aria-label="step"></div>'
        '<p class="said" role="status" aria-live="polite"></p><div class="drawn"></div>'
        f'<script type="application/json" id="data">{numbers}</script><script>\n{SCRIPT}</script></body></html>'
    )
