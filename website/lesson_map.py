"""Draws which lesson builds on which, from the graph in lessons/README.md, as an SVG.

A lesson stands one row below the last of the lessons before it. An arrow that says nothing new is left out: where
06 needs 04 and 04 needs 00, no arrow goes from 00 to 06.
"""

import re
from functools import cache
from html import escape

WIDTH, HEIGHT, DOWN, ACROSS, LINE = 124, 40, 84, 134, 17  # pixels


def drawn(graph: str) -> str:
    """Return the picture of a graph in Mermaid's notation: `04["04 A title"]` and `00 --> 04`."""
    titles = dict(re.findall(r'(\w+)\["(.*?)"\]', graph))
    before: dict[str, set[str]] = {name: set() for name in titles}
    for start, end in re.findall(r"(\w+) --> (\w+)", graph):
        before[end].add(start)
    places = arranged(before)
    arrows = "".join(
        arrow(places[start], places[end])
        for end in titles
        for start in sorted(before[end] - set().union(*(ancestors(name, before) for name in before[end])))
    )
    boxes = "".join(box(title, *places[name]) for name, title in titles.items())
    width = max(x for x, _ in places.values()) + WIDTH // 2 + 5
    height = max(y for _, y in places.values()) + HEIGHT // 2 + 5
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="sans-serif" font-size="11"><title>The order of the lessons</title><defs><marker id="tip"'
        f' markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto"><path d="M0 0L7 3L0 6" fill="#777"/>'
        f'</marker></defs><rect width="100%" height="100%" fill="white"/>{arrows}{boxes}</svg>\n'
    )


def ancestors(name: str, before: dict[str, set[str]]) -> set[str]:
    """Return all lessons that a lesson builds on, directly or not."""
    return before[name].union(*(ancestors(other, before) for other in before[name]))


def arranged(before: dict[str, set[str]]) -> dict[str, tuple[int, int]]:
    """Return the centre of each lesson's box: rows by depth, and in a row below the mean of the lessons before it."""

    @cache
    def depth(name: str) -> int:
        return 1 + max(map(depth, before[name]), default=-1)

    rows: list[list[str]] = [[] for _ in range(1 + max(map(depth, before)))]
    for name in before:
        rows[depth(name)].append(name)
    widest = max(map(len, rows)) * ACROSS
    places: dict[str, tuple[int, int]] = {}
    for number, row in enumerate(rows):
        row.sort(key=lambda name: sum(places[other][0] for other in before[name]) / (len(before[name]) or 1))
        step = widest / len(row)
        places |= {name: (round((i + 0.5) * step), 25 + DOWN * number) for i, name in enumerate(row)}
    return places


def arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return a line from below one box to above another one."""
    (x, y), (to_x, to_y) = start, end
    y, to_y = y + HEIGHT // 2, to_y - HEIGHT // 2
    bend = (to_y - y) // 2
    return (
        f'<path d="M{x} {y}C{x} {y + bend} {to_x} {to_y - bend} {to_x} {to_y}" fill="none" stroke="#777"'
        ' marker-end="url(#tip)"/>'
    )


def box(title: str, x: int, y: int) -> str:
    """Return a box with a title of at most two lines."""
    lines = [""]
    for word in title.split():
        if len(lines[-1]) + len(word) > LINE and len(lines) < 2:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    text = "".join(
        f'<text x="{x}" y="{y + 4 + 14 * i - 7 * (len(lines) - 1)}" text-anchor="middle">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    corner = f'x="{x - WIDTH // 2}" y="{y - HEIGHT // 2}"'
    return f'<rect {corner} width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#eef3fa" stroke="#4477aa"/>{text}'
