"""The sizes of a gradient's entries, and what float16 can hold of them: why a loss is scaled.

The picture is figure 3 of Micikevicius et al., "Mixed precision training", ICLR 2018: most entries lie to the left of
what float16 can hold, and its large numbers are not used at all. A loss scale moves the window, not the entries.

Proved by: tests/report/test_pictures.py
"""

import math
from collections.abc import Mapping

from minidist.base.exponents import LARGEST, NORMAL, SMALLEST, by_exponent, flushed_share
from minidist.core.base.errors import UsageError
from minidist.report.frame import Figure, finish, new_panel, patch
from minidist.report.palette import PALETTE

HELD, FLUSHED = PALETTE["B"], PALETTE["blocked"]


def exponent_histogram(counts: Mapping[str, int], *, scale: float = 1.0, title: str = "", command: str = "") -> Figure:
    """Draw the histogram of exponents.

    counts: as `base.exponents.count_exponents` makes them, of gradients that are not scaled. scale: the loss scale
    drawn. Bars: the share of entries of each power of two; red ones are zero in float16 at this scale. Shaded: what
    float16 holds at this scale, lighter where it is subnormal.
    """
    # powers[e]: entries of 2^e <= |x| < 2^(e+1). A scale of 2^shift moves float16's window by shift to the left.
    powers = by_exponent(counts)
    if not powers:
        raise UsageError(
            "there is no gradient entry to count; record the trace of a training job (minidist train --trace FILE)"
        )
    total, shift = sum(powers.values()), math.frexp(scale)[1] - 1

    figure, axes = new_panel(8, 3.6)

    # The window of float16: its subnormals, then its normal numbers.
    axes.axvspan(SMALLEST - shift - 1, NORMAL - shift, color="#E8EEF4", zorder=0, gid="subnormal")
    axes.axvspan(NORMAL - shift, LARGEST + 1 - shift, color="#C9D8E8", zorder=0, gid="normal")

    # One bar per power of two, red where float16 rounds it to zero at this scale.
    for exponent, count in powers.items():
        colour = HELD if exponent + shift >= SMALLEST - 1 else FLUSHED
        axes.bar(exponent + 0.5, count / total, width=0.9, color=colour, gid=f"2^{exponent}", zorder=2)

    # Wide enough for all bars and for the whole window.
    left, right = min(min(powers), SMALLEST - shift - 1) - 1, max(max(powers) + 1, LARGEST + 1 - shift) + 1
    axes.set(xlim=(left, right), xlabel="power of two", ylabel="share of entries")

    # The title names the share that is lost, without and with the scale.
    shares = f"flushed to zero in float16: {flushed_share(counts):.1%} at scale 1"
    if scale != 1:
        shares += f", {flushed_share(counts, scale):.1%} at scale {scale:,.0f}"
    at = "" if scale == 1 else f" at scale {scale:,.0f}"
    handles = [
        patch(HELD, "entries that float16 holds"),
        *([patch(FLUSHED, "entries that become zero")] if flushed_share(counts, scale) >= 0.001 else []),
        patch("#C9D8E8", f"float16's normal numbers{at}"),
        patch("#E8EEF4", "its subnormals"),
    ]
    return finish(figure, handles, command, f"{title or 'gradient entries by size'}: {shares}")
