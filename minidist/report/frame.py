"""The frame of every picture: a separate figure (no pyplot, no global state), a legend below, the command below that.

A reader should be able to draw every picture again. So the caption names a command that can be run with other numbers.

Proved by: tests/report/test_pictures.py
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.base.errors import UsageError, quoted
from minidist.base.files import writing
from minidist.comm.launching import writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = Any  # the first picture imports matplotlib, and no annotation does

CAPTION, LEGEND_ROW = 0.22, 0.2  # inches
MAX_CAPTION = 6  # lines: a longer command would leave no room for the picture
Style = dict[str, Any]  # keyword arguments of an artist
SUFFIXES = (".svg", ".pdf", ".png")
HTML = (".html", ".htm")
GENERATOR = '<meta name="generator" content="minidist">'  # by which a page is known that may be overwritten
# A browser refuses whatever a page would fetch.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
HEAD = f'{GENERATOR}<meta http-equiv="Content-Security-Policy" content="{POLICY}">'


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches that arranges its own margins."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_panel(width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure with one panel, and the panel, which has no box around the data."""
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    tidy(axes)
    return figure, axes


def finish(figure: Figure, handles: Iterable[Any], command: str, title: str = "") -> Figure:
    """Put the title above the first panel, and the legend and the caption below the picture; returns the figure."""
    if title:
        figure.axes[0].set_title(title, fontsize=10, loc="left")

    # How much room the caption and the legend need, as a part of the figure's height.
    handles = list(handles)
    lines = textwrap.wrap(
        f"drawn by:  {command}",
        int(15 * figure.get_figwidth()),
        break_on_hyphens=False,
        max_lines=MAX_CAPTION,
        placeholder=" ...",
    )
    columns = min(len(handles), 4) or 1
    height = float(figure.get_figheight())
    caption = CAPTION + 0.12 * (len(lines) - 1)
    below = (caption + LEGEND_ROW * -(-len(handles) // columns)) / height

    # The layout arranges the axes above that room.
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0.01, below, 0.98, 0.99 - below))  # type: ignore[call-arg]

    # The legend, then the caption under it.
    if handles:
        anchor = (0.5, caption / height)
        figure.legend(
            handles=handles,
            loc="lower center",
            bbox_to_anchor=anchor,
            ncols=columns,
            fontsize=8,
            frameon=False,
            borderaxespad=0,
        )
    style: Style = {"fontsize": 7, "color": "#555555", "family": "monospace", "ha": "center"}
    figure.text(0.5, 0.3 * CAPTION / height, "\n".join(lines), **style)

    # A dollar sign in a file's name is a character, not the beginning of a formula.
    for text in figure.findobj(lambda artist: hasattr(artist, "set_parse_math")):
        text.set_parse_math(False)  # type: ignore[attr-defined]
    return figure


def tidy(axes: Any) -> None:
    """Remove the box around the data."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def name_rows(axes: Any, names: Sequence[str], top: float = -0.5, **style: Any) -> None:
    """Name one row for each of `names`, the first on top. top: where the panel begins, above the middle of that row."""
    axes.set_yticks(range(len(names)), names, **style)
    axes.set_ylim(max(1, len(names)) - 0.5, top)


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis without formulas, which no text of a picture may be (`finish`)."""
    from matplotlib.ticker import NullFormatter

    axis.set_major_formatter(lambda value, place: f"{value:.0e}" if value < 0.1 or value > 1e9 else f"{value:,.10g}")
    axis.set_minor_formatter(NullFormatter())


def patch(colour: str, label: str) -> Any:
    """Return a legend entry: a filled box."""
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, edgecolor="#888888", linewidth=0.4, label=label)


def line(colour: str, label: str, **style: Any) -> Any:
    """Return a legend entry: a line."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, label=label, **style)


def visible(handles: Mapping[str, Any], drawn: Mapping[str, float], width: float) -> list[Any]:
    """Return the legend entries of what can be seen: bars that are together at least a thousandth of the picture wide.

    drawn: the sum of the widths of the bars of each kind, in the unit of `width`. Entries without bars are kept.
    """
    return [handle for kind, handle in handles.items() if drawn.get(kind, width) >= width / 1000]


def time_unit(longest: float) -> tuple[float, str]:
    """Return (factor, name) of the unit in which `longest` seconds is a number of at least 1."""
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if longest * factor >= 1:
            return factor, name
    return (1e9, "ns") if longest > 0 else (1e6, "µs")


def byte_text(nbytes: float) -> str:
    """Return 1,536 B, 24 kB, 1.2 MB: decimal units, as everywhere in minidist (GB = 1e9)."""
    for factor, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor and (nbytes >= 10_000 or nbytes % 100 == 0):
            return f"{nbytes / factor:.4g} {name}"
    return f"{nbytes:,.0f} B"


# By suffix: no date, and who has drawn it; and how the file says that, so that it is known and may be overwritten.
METADATA: dict[str, tuple[dict[str, Any], str]] = {
    ".svg": ({"Date": None, "Creator": "minidist"}, "<dc:title>minidist<"),
    ".pdf": ({"CreationDate": None, "Creator": "minidist"}, "/Creator (minidist)"),
    ".png": ({"Software": "minidist"}, "Software\0minidist"),
}


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as svg, pdf or png, by the suffix; the same figure gives the same file."""
    # Refused before anything is drawn or written.
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise UsageError(f"cannot save a picture as {quoted(path.name)}; end the name in one of {', '.join(SUFFIXES)}")
    metadata, mark = METADATA[path.suffix]
    writable(path, "--output", "", mark)

    with reproducible(), writing("the picture", path, "make room there, or choose another --output"):
        figure.savefig(path, metadata=metadata, dpi=150)
    return path


def reproducible(salt: str = "minidist") -> Any:
    """Return the context in which a figure gives the same SVG each time: without random ids, the text as text.

    salt: what the ids follow from; two figures of one page have different ones.
    """
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"})


def svg_text(figure: Figure, salt: str = "minidist") -> str:
    """Return the picture as SVG, with its XML declaration."""
    buffer = BytesIO()
    with reproducible(salt):
        figure.savefig(buffer, format="svg", metadata=METADATA[".svg"][0])
    return buffer.getvalue().decode()


def alt_text(figure: Figure) -> str:
    """Return the picture in words, from its own: its titles and the labels of its axes."""
    words = [figure.get_suptitle()] if figure.get_suptitle() else []
    for axes in figure.axes:
        title = " ".join(text for text in (axes.get_title(loc=side) for side in ("left", "center", "right")) if text)
        labels = " over ".join(text for text in (axes.get_ylabel(), axes.get_xlabel()) if text)
        words += [text for text in (title, labels) if text]
    return "; ".join(dict.fromkeys(" ".join(word.split()) for word in words)) or "a picture"


def svg(figure: Figure, alt: str) -> str:
    """Return the picture as SVG, which says itself in words what it shows; the same figure gives the same text."""
    text = svg_text(figure)
    text = text[text.index("<svg") :]  # without the XML declaration, so that it can stand in a page
    words = escape(alt, quote=False).replace('"', "&quot;")
    return text.replace("<svg", f'<svg role="img" aria-label="{words}"', 1).replace(">", f"><title>{words}</title>", 1)


def png(figure: Figure, dpi: int = 100) -> bytes:
    """Return the picture in 64 colours: a quarter of the bytes, because notebooks keep their pictures."""
    from PIL import Image

    # Drawn in full, then reduced to a palette; dithering would compress badly.
    full, small = BytesIO(), BytesIO()
    figure.savefig(full, format="png", dpi=dpi)
    Image.open(full).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()
