"""Measured bytes and those of the formula: two bars that must be equally long, for each purpose.

Proved by: tests/report/test_pictures.py
"""

from collections.abc import Mapping, Sequence

from minidist.base.traces import Trace, sent_by_purpose
from minidist.report.frame import Figure, byte_text, finish, name_rows, new_panel, patch
from minidist.report.palette import PALETTE

Table = Mapping[str, Mapping[str, float | None]]


def table_of(
    traces: Sequence[Trace], closed_form: Mapping[str, float] | None = None
) -> dict[str, dict[str, float | None]]:
    """Return {purpose: {"measured": bytes sent by all ranks, "closed_form": those of the formula, or None}}."""
    measured, _ = sent_by_purpose(traces)
    formula = closed_form or {}

    # A purpose of the formula that was never measured is a row too: it would be a missing message.
    names = dict.fromkeys([*measured, *formula])
    return {name: {"measured": measured.get(name, 0), "closed_form": formula.get(name)} for name in names}


def bytes_by_purpose(table: Table, *, title: str = "", command: str = "") -> Figure:
    """Draw `table`, as `minidist train --json` prints it under bytes_by_purpose, or from `table_of`."""
    # One row per purpose, with two bars each.
    figure, axes = new_panel(8, 1.7 + 0.6 * max(1, len(table)))
    widest = max([1.0, *(float(value) for row in table.values() for value in row.values() if value is not None)])
    for y, (_, row) in enumerate(table.items()):
        for key, place, colour in (
            ("measured", -0.18, PALETTE["communication"]),
            ("closed_form", 0.18, PALETTE["other"]),
        ):
            value = row.get(key)
            if value is None:
                axes.text(0.01 * widest, y + place, "no closed form given", va="center", fontsize=7, color="#777777")
                continue
            axes.barh(y + place, value, height=0.32, color=colour, gid=key)
            axes.text(value + 0.01 * widest, y + place, f"{value:,.0f} B", va="center", fontsize=8)

    name_rows(axes, list(table))
    axes.set(xlim=(0, 1.15 * widest), xlabel="bytes sent")
    axes.xaxis.set_major_formatter(lambda value, place: byte_text(value))

    # The title says how many rows agree with their formula.
    known = [row for row in table.values() if row.get("closed_form") is not None]
    equal = sum(row["measured"] == row["closed_form"] for row in known)
    verdict = f": {equal} of {len(known)} equal their closed form" if known else ""
    handles = [patch(PALETTE["communication"], "measured"), patch(PALETTE["other"], "closed form")]
    return finish(figure, handles, command, title or f"bytes sent by purpose{verdict}")
