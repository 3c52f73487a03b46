"""Space and time on the page of a run: the numbers of a trace as JSON, which a short script draws on a canvas.

The wheel and the buttons zoom, dragging moves, and what lies under the pointer is named below. A run of any size is
drawn with at most MAX_ITEMS bars and arrows: what is left out or put together is a sentence on the page.

Proved by: tests/report/test_canvas.py
"""

import html
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minidist.base.trace_file import only_steps, steps_of
from minidist.base.traces import Trace
from minidist.report.palette import NAMES, PALETTE, kind_of
from minidist.report.space_time import MAX_CALL_ARROWS, Rows, latest, operation_text, rows_of
from minidist.report.timeline import Pair, arrived, bands, compute_of, pairs, row_label, unanswered, waits, without

SCRIPT = Path(__file__).with_name("canvas.js").read_text(encoding="utf-8")  # zooms and moves along the axis of time
MAX_ITEMS, MAX_LINES = 24_000, 128  # bars and arrows, and the streams of the first ranks
TICKS = 4_000_000  # the whole width, in whole numbers: less than a pixel after 2,000-fold zoom
KINDS = ("F", "B", "I", "W", "recompute", "compute", "blocked", "transfer", "communication")

WORDS = {**NAMES, "communication": "messages"}


@dataclass
class Drawing:
    """What the script draws: lines from above, bars (line, kind, name, start, end), arrows from line to line.

    of_calls: the arrows of collective calls outside the main streams, where there are many. Each call is also a band,
    and the script draws the arrows where they can be read, else the band.
    """

    lines: list[str]
    bars: list[tuple[int, str, str, float, float]] = field(default_factory=list)
    arrows: list[tuple[int, int, float, float, int]] = field(default_factory=list)  # from, to, departure, arrival, B
    of_calls: list[tuple[int, int, float, float, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.bars) + len(self.arrows) + len(self.of_calls)


def space_and_time(traces: Sequence[Trace], source: str = "TRACE") -> str:
    """Return the part of a page: the sentences about what is drawn, the canvas and its numbers."""
    # All steps if they fit, else the last one; then bands instead of arrows, then slices of time.
    said = []
    shown, count = list(traces), steps_of(traces)
    items = sum(len(trace.messages) + len(trace.spans) for trace in traces)  # a bound that needs no pairs of messages
    if count > 1 and items > MAX_ITEMS:
        shown = only_steps(shown, count - 1, count)
        said.append(
            f"Drawn is the last of {count} steps, because all of them have too many messages for one page;"
            f" <code>minidist report {html.escape(source)} --steps 0:1 -o step.html</code> draws another one."
        )
    messages = pairs(shown)
    drawing, hidden = _drawing(shown, messages, folded=False)
    if len(drawing) > MAX_ITEMS:
        drawing, hidden = _drawing(shown, messages, folded=True)
        said.append("The messages of one collective call are one band on each of its lines.")
    if len(drawing) > MAX_ITEMS:
        drawing = _sliced(drawing)
        said.append(
            f"More than {MAX_ITEMS:,} bars and arrows do not fit on a page: each line is cut into slices of time, and a"
            " slice has the colour of what takes most of it; a message is part of a band."
        )
    if hidden:
        said.append(f"Drawn are the first {len(drawing.lines)} lines; {hidden} more are left out.")

    # A less-than sign in a name would end the element that the numbers stand in.
    numbers = json.dumps(_numbers(drawing), separators=(",", ":")).replace("<", "\\u003c")
    buttons = "".join(
        f'<button type="button" data-do="{do}" aria-label="{about}">{name}</button>'
        for do, name, about in (("in", "+", "zoom in"), ("out", "−", "zoom out"), ("all", "all", "show everything"))
    )
    used = {bar[1] for bar in drawing.bars} | ({"communication"} if drawing.arrows or drawing.of_calls else set())
    legend = "".join(
        f'<span class="key"><i style="background:{PALETTE[kind]}"></i>{WORDS[kind]}</span>'
        for kind in KINDS
        if kind in used
    )
    arrows = len(drawing.arrows) + len(drawing.of_calls)
    label = f"space and time: {len(drawing.lines)} lines, {len(drawing.bars)} bars, {arrows} arrows"
    return (
        f'<p class="about" id="space-time-said">{" ".join(said)}</p>'
        f'<figure id="space-time"><canvas tabindex="0" role="img" aria-label="{label}"></canvas>'
        f'<figcaption>{buttons}<span class="under"></span><div>{legend}</div></figcaption></figure>'
        f'<script type="application/json" id="space-time-data">{numbers}</script><script>\n{SCRIPT}</script>'
    )


def _drawing(traces: Sequence[Trace], messages: Sequence[Pair], folded: bool) -> tuple[Drawing, int]:
    """Return what is drawn, and how many lines are left out. folded: collective calls are bands, not arrows."""
    keys = list(rows_of(traces))
    rows = {key: number for number, key in enumerate(keys[:MAX_LINES])}
    drawing = Drawing([row_label(*key) for key in rows])
    _add_streams(drawing, traces, messages, rows)

    # Messages as arrows; where there are many, those of collective calls are bands, too, and where there are too many,
    # bands only.
    called = [pair for pair in messages if pair.send.operation != "message"]
    of_calls = [pair for pair in called if pair.send.lane != "main"]
    of_calls = of_calls if len(of_calls) > MAX_CALL_ARROWS else []
    for band in bands(called if folded else of_calls):
        if (band.rank, band.lane) in rows:
            row = rows[band.rank, band.lane]
            drawing.bars.append((row, "communication", band.name, band.start, band.end))
    single = [pair for pair in messages if pair.send.operation == "message"] if folded else messages
    _add_arrows(drawing, single, rows, {id(pair.send) for pair in of_calls})
    return drawing, len(keys) - len(rows)


def _add_streams(drawing: Drawing, traces: Sequence[Trace], messages: Sequence[Pair], rows: Rows) -> None:
    """Add what each stream computes, and where it waits and does not compute."""
    # After a deadlock each line says what it waits for, to the right edge.
    stuck = {(event.rank, event.lane): event for trace in traces for event in unanswered(trace.messages)}
    right = latest(traces) * (1.3 if stuck else 1) or 1e-6
    waiting = waits(messages, right)
    streams = {trace.rank: trace for trace in traces}
    for (rank, lane), row in rows.items():
        computing = compute_of(streams[rank].spans, lane)
        drawing.bars += [(row, kind_of(span.name), span.name, span.start, span.end) for span in computing]
        busy = [(span.start, span.end) for span in computing]
        for kind, intervals in zip(("blocked", "transfer"), waiting.get((rank, lane), ([], [])), strict=True):
            drawing.bars += [(row, kind, "", start, end) for start, end in without(intervals, busy)]
        if (rank, lane) in stuck:
            event = stuck[rank, lane]
            drawing.bars.append((row, "blocked", operation_text(event), event.start, right))


def _add_arrows(drawing: Drawing, messages: Sequence[Pair], rows: Rows, of_calls: set[int]) -> None:
    """Add the messages that have arrived. of_calls: the ids of the sends whose arrows are kept apart."""
    for send, receive in filter(arrived, messages):
        assert receive is not None
        tail, head = rows.get((send.rank, send.lane)), rows.get((receive.rank, receive.lane))
        if tail is not None and head is not None:
            departure = send.start if send.start >= 0 else send.posted
            arrows = drawing.of_calls if id(send) in of_calls else drawing.arrows
            arrows.append((tail, head, departure, receive.end, send.nbytes))


def _sliced(drawing: Drawing) -> Drawing:
    """Return each line in equal slices of time, with one bar for what takes most of a slice."""
    # Arrows become bands at both their ends first; those outside the main streams are bands already.
    bars = list(drawing.bars)
    for tail, head, start, end, _ in drawing.arrows:
        bars += [(row, "communication", "messages", start, end) for row in {tail, head}]
    low, high = min(bar[3] for bar in bars), max(bar[4] for bar in bars)
    slices = max(MAX_ITEMS // (2 * len(drawing.lines)), 1)
    width = (high - low) / slices or 1.0

    # taken[line, slice, is a band][kind]: seconds of each slice. Bands lie under the bars, so they are counted apart.
    taken: dict[tuple[int, int, bool], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row, kind, _, start, end in bars:
        for number in range(int((start - low) / width), min(int((end - low) / width), slices - 1) + 1):
            begin = low + number * width
            part = min(end, begin + width) - max(start, begin)
            taken[row, number, kind == "communication"][kind] += part

    # Neighbours of one kind are one bar.
    result = Drawing(drawing.lines)
    for (row, number, band), kinds in sorted(taken.items(), key=lambda entry: (entry[0][0], entry[0][2], entry[0][1])):
        kind = max(kinds, key=lambda name: kinds[name])
        start, last = low + number * width, result.bars[-1] if result.bars else None
        if last and last[:2] == (row, kind) and abs(last[4] - start) < 0.5 * width:
            result.bars[-1] = (*last[:4], start + width)
        elif kinds[kind] > 0 or band:
            result.bars.append((row, kind, "", start, start + width))
    return result


def _numbers(drawing: Drawing) -> dict[str, object]:
    """Return the drawing in whole numbers: bars and arrows one after the other, each start as the step from the last.

    Times are ticks from the first event; a name stands once in a table.
    """
    times = [time for bar in drawing.bars for time in bar[3:]]
    times += [time for arrow in (*drawing.arrows, *drawing.of_calls) for time in arrow[2:4]]
    begin, end = min(times, default=0.0), max(times, default=0.0)
    scale = TICKS / (end - begin) if end > begin else 1.0

    def tick(time: float) -> int:
        return round((time - begin) * scale)

    names: dict[str, int] = {}
    bars: list[int] = []
    last = 0
    for row, kind, name, start, stop in sorted(drawing.bars, key=lambda bar: bar[3]):
        number = names.setdefault(name[:60], len(names))
        bars += [row, KINDS.index(kind), number, tick(start) - last, tick(stop) - tick(start)]
        last = tick(start)

    def flat(arrows: Sequence[tuple[int, int, float, float, int]]) -> list[int]:
        result: list[int] = []
        last = 0
        for tail, head, start, stop, nbytes in sorted(arrows, key=lambda arrow: arrow[2]):
            result += [tail, head, tick(start) - last, tick(stop) - tick(start), nbytes]
            last = tick(start)
        return result

    return {
        "lines": drawing.lines,
        "kinds": [[PALETTE[kind], WORDS[kind]] for kind in KINDS],
        "names": list(names),
        "ticks": TICKS,
        "begin": begin,
        "seconds": 1 / scale if end > begin else 0.0,
        "bars": bars,
        "arrows": flat(drawing.arrows),
        "of_calls": flat(drawing.of_calls),
    }
