"""A picture by its name, for the command line and for pages.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.traces import Trace
from minidist.report.bytes_by_purpose import bytes_by_purpose, table_of
from minidist.report.bytes_matrix import bytes_matrix
from minidist.report.exponents import exponent_histogram
from minidist.report.frame import Figure
from minidist.report.loss_overlay import loss_curve, loss_overlay
from minidist.report.memory_over_time import memory_over_time
from minidist.report.mesh_picture import mesh_of, mesh_picture
from minidist.report.palette import PALETTE
from minidist.report.run_gantt import run_gantt
from minidist.report.space_time import space_time
from minidist.report.streams import streams

Header = Mapping[str, Any]
MAX_RANKS = 2_048


def _bytes_by_purpose(traces: Sequence[Trace], header: Header, **keywords: Any) -> Figure:
    table = header.get("bytes_by_purpose") or table_of(traces, header.get("closed_form"))
    return bytes_by_purpose(table, **keywords)


def _loss(traces: Sequence[Trace], header: Header, **keywords: Any) -> Figure:
    if not header.get("losses"):
        raise UsageError("the picture of the loss needs losses in the header of the trace: one number per step")
    if not header.get("reference_losses"):
        return loss_curve(header["losses"], **keywords)
    two, quantity = (header["losses"], header["reference_losses"]), header.get("quantity", "loss")
    figure = loss_overlay(*two, header.get("max_difference"), quantity=quantity, **keywords)
    figure.axes[0].set_xlabel(header.get("counted", "step"))
    return figure


def _exponents(traces: Sequence[Trace], header: Header, **keywords: Any) -> Figure:
    counts, scale = header.get("gradient_exponents") or {}, header.get("loss_scale") or 2.0**16
    return exponent_histogram(counts, scale=scale, **keywords)


KINDS: dict[str, Callable[..., Figure]] = {
    "space-time": lambda traces, header, **keywords: space_time(
        traces, most_seconds=header.get("most_seconds", 0), labels=header.get("labels"), **keywords
    ),
    "bytes-matrix": lambda traces, header, **keywords: bytes_matrix(traces, **keywords),
    "bytes-by-purpose": _bytes_by_purpose,
    "loss": _loss,
    "gantt": lambda traces, header, **keywords: run_gantt(traces, **keywords),
    "mesh": lambda traces, header, **keywords: mesh_picture(mesh_of(header, traces), **keywords),
    "memory": lambda traces, header, **keywords: memory_over_time(
        traces, most_bytes=header.get("most_bytes", 0), marks=header.get("marks", ()), **keywords
    ),
    "exponents": _exponents,
    "lanes": lambda traces, header, **keywords: streams(traces, most_seconds=header.get("most_seconds", 0), **keywords),
}


def draw(kind: str, traces: Sequence[Trace], header: Header | None = None, **keywords: Any) -> Figure:
    """Return the picture `kind` (one of KINDS) of a run.

    header: the first line of the trace file. Read here: `command` (the caption), `title`, or `name` (of the run, before
    the picture's own title), `closed_form` (purpose -> bytes of all ranks), `bytes_by_purpose`, `losses`,
    `reference_losses`, `max_difference` (one per step), `quantity` (what is drawn in place of losses), `counted` (on
    the axis of the loss, in place of steps), `gradient_exponents`, `loss_scale`, `most_bytes` (of the axis of memory,
    at least), `marks` (of that picture: the event after which each part begins, and its name), `most_seconds` (of the
    axis of space-time and lanes, at least), `labels` (on the messages of space-time: rank -> texts), and `incomplete`,
    which is written above the picture.
    keywords: those of the picture's own function, such as `rank=` of lanes or `purpose=` of bytes-matrix.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no picture {quoted(kind)}{nearest(kind, KINDS)}; there are {', '.join(KINDS)}")

    # A row for each rank, and a cell for each pair, is too much from here on; the others show the first ranks, or sums.
    if kind in ("space-time", "bytes-matrix") and len(traces) > MAX_RANKS:
        raise UsageError(
            f"the picture {kind} of {len(traces):,} ranks cannot be read; it shows at most {MAX_RANKS:,}: take"
            " --picture bytes-by-purpose, gantt or lanes"
        )

    # The caption is a command that draws the picture again.
    header = header or {}
    keywords.setdefault("command", header.get("command") or f"minidist report TRACE --picture {kind}")
    keywords.setdefault("title", header.get("title", ""))
    figure = KINDS[kind](traces, header, **keywords)
    if header.get("name"):
        _prefix_title(figure, header["name"])
    if header.get("incomplete"):
        figure.suptitle(incomplete_sentence(header), fontsize=9, color=PALETTE["blocked"], parse_math=False)
    return figure


def _prefix_title(figure: Figure, name: str) -> None:
    """Write the run's name before the title of the first panel that has one."""
    for axes in figure.axes:
        for side in ("left", "center", "right"):
            title = axes.get_title(loc=side)
            if title:
                axes.set_title(f"{name}: {title}", loc=side, fontsize=10, parse_math=False)
                return


def incomplete_sentence(header: Header) -> str:
    """Return what a reader must know of a trace with missing events; "" for a whole one."""
    why = header.get("incomplete")
    return f"this trace is incomplete: {why}" if why else ""
