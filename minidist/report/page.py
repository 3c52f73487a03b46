"""One self-contained page about a run, without network: a file under 2 MB to open, keep or send.

    what was run and where · the mesh · who computed and waited when · memory over time · bytes from rank to rank ·
    bytes by purpose and the closed form · the loss

A section whose data the trace does not have says so, and which command records them.

Proved by: tests/report/test_page.py
"""

import base64
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minidist.base.files import writing
from minidist.base.trace_file import only_steps, steps_of
from minidist.base.traces import Trace
from minidist.comm.launching import writable
from minidist.core.base.errors import UsageError
from minidist.report.bytes_by_purpose import table_of
from minidist.report.draw import Header, draw, incomplete_sentence
from minidist.report.frame import GENERATOR, HEAD, Figure, byte_text, png, svg_text

MAX_SVG = 400_000  # bytes of one figure; a larger one is on the page as an image
# Whose messages and computing are drawn; of more a picture of this width shows nothing.
MAX_RANKS, MAX_ITEMS = 16, 6_000

# The two modes differ in paper, ink and what lies between them; every other colour is the same in both.
STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")

# What is neither a text nor one of these has a colour that means something.
NEUTRAL = {"#ffffff": "paper", "#000000": "ink", "#f0f0f0": "idle", "#999999": "faint", "#555555": "faint"}


def write_page(path: str | Path, traces: Sequence[Trace], header: Header, source: str = "") -> Path:
    """Write the page of a run; returns the path. source: the trace's file name, for the captions."""
    path = Path(path)
    writable(path, "--output", "<!doctype html>", mark=GENERATOR)
    text = page(traces, header, source)
    with writing("the page", path, "make room there, or choose another --output"):
        path.write_text(text, encoding="utf-8")
    return path


def page(traces: Sequence[Trace], header: Header, source: str = "") -> str:
    """Return the page as HTML."""
    if not traces:
        raise UsageError("a page of no traces; pass those of a run, such as world.traces")
    # Time is drawn for the last step alone: several steps on one axis are too narrow to read.
    last, which = _last_step(traces)
    of_first = f", of the first {MAX_RANKS} of {len(last)} ranks" if len(last) > MAX_RANKS else ""
    command = str(header.get("command") or "")
    caption = f"minidist report {source or 'TRACE'}"

    def picture(kind: str, of: Sequence[Trace], **more: Any) -> str:
        # The page says once, at its top, when the trace is incomplete.
        made = {**header, "command": f"{caption} --picture {kind}", "incomplete": None}
        return _figure(lambda: draw(kind, of, made, **more), f"{kind} of {command or 'a run'}", kind)

    # The sections, in the order of the page: title, what it is about, and what it shows.
    parts = [
        (
            "Mesh",
            "The last axis is the fastest: its neighbours have neighbouring numbers, and should have the fastest link.",
            picture("mesh", traces),
        ),
        (
            "Gantt",
            f"What each rank computed, and red: where it waited for another one{which}. Time is "
            + ("virtual." if header.get("world") != "mpi" else "that of the ranks' clocks."),
            picture("gantt", last),
        ),
        (
            "Space and time",
            f"The same with the messages as arrows{of_first}. To zoom, open what <code>{html.escape(caption)}"
            " --picture perfetto</code> writes in ui.perfetto.dev.",
            _space_and_time(last[:MAX_RANKS], picture),
        ),
        (
            "Memory over time",
            "Bytes alive on each rank by purpose; the mark is the peak, which decides whether a job fits.",
            (
                picture("memory", traces)
                if any(trace.memory for trace in traces)
                else "<p>The trace has no account of memory over time; only runs that record one have it.</p>"
            ),
        ),
        (
            "Bytes from rank to rank",
            "Payload bytes of the whole run; a row sends, a column receives.",
            picture("bytes-matrix", traces),
        ),
        (
            "Bytes by purpose",
            "All ranks together, counted from the messages, next to the closed form.",
            _table(traces, header) + picture("bytes-by-purpose", traces),
        ),
        (
            "Loss",
            _about_loss(header),
            picture("loss", traces) if header.get("losses") else "<p>The trace has no losses.</p>",
        ),
    ]
    return _document(traces, header, parts)


def _last_step(traces: Sequence[Trace]) -> tuple[list[Trace], str]:
    count = steps_of(traces)
    if count < 2:
        return list(traces), ""
    return only_steps(list(traces), count - 1, count), f", in the last of {count} steps"


def _space_and_time(traces: Sequence[Trace], picture: Callable[..., str]) -> str:
    items = sum(len(trace.messages) + len(trace.spans) for trace in traces)
    if items > MAX_ITEMS:
        return f"<p>{items:,} messages and computations do not fit into a picture of this width.</p>"
    return picture("space-time", traces)


def _about_loss(header: Header) -> str:
    if header.get("reference_losses"):
        return (
            "The parallel run and one device. Two curves that lie on each other prove little; the difference of the"
            " weights does."
        )
    return "Of this run alone; the trace of <code>minidist compare --trace</code> also has that of one device."


def _figure(make: Callable[[], Figure], label: str, kind: str) -> str:
    try:
        # A picture that the trace has no data for is a sentence on the page, which says how to record them.
        figure = make()
    except UsageError as error:
        return f"<p>{html.escape(str(error))}</p>"
    drawn, natural = _svg(figure, kind), round(96 * figure.get_figwidth())
    if len(drawn.encode()) > MAX_SVG:
        image = base64.b64encode(png(figure, dpi=110)).decode()
        drawn = f'<img alt="{html.escape(label)}" src="data:image/png;base64,{image}">'
    style = f"--natural: {natural}px"
    size = ' class="small"' if natural <= 500 else ""  # small enough to be shrunk to a phone's width
    return f'<figure id="{kind}"{size} role="img" aria-label="{html.escape(label)}" style="{style}">{drawn}</figure>'


def _svg(figure: Figure, salt: str) -> str:
    """Return the figure inline: its ids differ from those of the page's other figures, its neutrals are the page's."""
    text = svg_text(figure, f"minidist {salt}")

    # White letters on a bar stay white; paper, axes and the grey between them follow the mode.
    def neutral(tag: re.Match[str]) -> str:
        names = {"#555555": "faint"} if tag[0].startswith("<text") else NEUTRAL
        return re.sub(
            r"(fill|stroke): (#[0-9a-f]{6})",
            lambda m: f"{m[1]}: var(--{names[m[2]]})" if m[2] in names else m[0],
            tag[0],
        )

    text = re.sub(r"<[a-z][^>]*style=[^>]*>", neutral, text[text.index("<svg") :])

    # A tenth of a point is less than can be seen, and saves a third of the bytes.
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\d+\.\d)\d+", r"\1", path[0]), text)


def _table(traces: Sequence[Trace], header: Header) -> str:
    # The same numbers as the bars, exact, with a verdict in each row.
    rows = []
    for purpose, volume in (header.get("bytes_by_purpose") or table_of(traces, header.get("closed_form"))).items():
        measured, closed = volume["measured"], volume.get("closed_form")
        mark = "" if closed is None else ("equal" if closed == measured else '<span class="different">DIFFERENT</span>')
        if mark and header.get("incomplete"):
            mark = "not comparable: messages are missing"
        name = html.escape(purpose)
        rows.append(
            f"<tr><td>{name}</td><td>{measured:,}</td><td>{'' if closed is None else f'{closed:,}'}</td>"
            f"<td>{mark}</td></tr>"
        )
    if not rows:
        return "<p>Nothing was sent.</p>"
    head = "<tr><th>purpose</th><th>measured, B</th><th>closed form, B</th><th></th></tr>"
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _document(traces: Sequence[Trace], header: Header, parts: Sequence[tuple[str, str, str]]) -> str:
    # One line of facts about the whole run.
    sent = [message.nbytes for trace in traces for message in trace.sent()]
    facts = [
        f"{len(traces)} rank{'s' * (len(traces) != 1)}",
        f"world: {header.get('world', 'unknown')}",
        f"{steps_of(traces)} steps",
        f"{len(sent):,} messages, {byte_text(sum(sent))}",
    ]
    if header.get("losses"):
        facts.append(f"loss {header['losses'][0]:.4f} to {header['losses'][-1]:.4f}")

    missing = incomplete_sentence(header)
    warning = f'<p class="different">{html.escape(missing[0].upper() + missing[1:])}.</p>' if missing else ""

    # The command is the user's text, so it is escaped.
    title = html.escape(str(header.get("command") or "A run of minidist"))
    names = [(name.lower().replace(" ", "-"), name) for name, _, _ in parts]
    nav = "".join(f'<a href="#section-{slug}">{name}</a>' for slug, name in names)
    sections = "".join(
        f'<section id="section-{slug}"><h2>{name}</h2><p class="about">{about}</p>{body}</section>'
        for (slug, name), (_, about, body) in zip(names, parts, strict=True)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width">{HEAD}'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>\n{STYLE}</style></head><body>'
        f"<h1><code>{title}</code></h1><p>{' · '.join(facts)}</p>{warning}<nav>{nav}</nav>{sections}</body></html>\n"
    )
