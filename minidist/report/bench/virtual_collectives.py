"""Which algorithm is best where: virtual seconds of every algorithm at every size, and what "auto" chooses.

Meta arrays (a shape and no data), so 64 MiB on each of 64 ranks cost no memory; the virtual clock is exact, so
nothing is repeated. Where two lines of the picture cross, the best choice changes: that is the crossover.

Proved by: tests/bench/test_collectives.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import MAX_COUNT, MAX_SWEPT_RANKS, check_ranks
from minidist.collectives import bus_factor
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.auto import cheapest, virtual_seconds
from minidist.comm.sim.links import LinkModel

SIZES = tuple(2**exponent for exponent in range(0, 27, 2))  # 1 B to 64 MiB


def bench_virtual_collectives(
    operation: str = "all_reduce", ranks: int = 16, links: LinkModel | None = None, sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """Return {environment, rows}: a row per size and algorithm, "auto" last; `ratio` is to the best fixed choice."""
    if operation not in ALGORITHMS:
        raise UsageError(
            f"no collective {quoted(operation)}{nearest(operation, ALGORITHMS)}; one of {', '.join(sorted(ALGORITHMS))}"
        )
    check_ranks(ranks, most=MAX_SWEPT_RANKS)
    if min(sizes) < 0 or max(sizes) > MAX_COUNT:
        raise UsageError(f"bench collectives --sizes {quoted(list(sizes))}; an array has 0 to {MAX_COUNT:,} bytes")
    links = links or LinkModel()

    # The virtual clock is exact, so every algorithm runs once per size, and "auto" is timed like the others.
    rows = []
    for nbytes in sizes:
        seconds = {
            name: virtual_seconds(operation, name, ranks, nbytes, links) for name in sorted(ALGORITHMS[operation])
        }
        best = min(seconds.values())
        chosen = cheapest(operation, nbytes, ranks, links.alpha, links.beta, links.overhead)
        seconds["auto"] = virtual_seconds(operation, "auto", ranks, nbytes, links)
        for name, time in seconds.items():
            # A single rank sends nothing, in no time.
            bandwidth = nbytes / time / 1e9 if time else None
            rows.append(
                {
                    "name": f"{operation}/{name}, {nbytes} B, {ranks} virtual ranks",
                    "ratio": time / best if best else 1.0,
                    "median_s": time,
                    "rounds": 1,
                    "bytes": nbytes,
                    "side": name,
                    "algorithm": chosen if name == "auto" else name,
                    "algbw": bandwidth,
                    "busbw": bandwidth and bandwidth * bus_factor(operation, ranks),
                }
            )
    clock = {
        "operation": operation,
        "ranks": ranks,
        "alpha": links.alpha,
        "beta": links.beta,
        "overhead": links.overhead,
        "clock": "virtual",
    }
    return {"environment": clock, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Format virtual microseconds, a line per size and a column per algorithm; a star marks the best."""
    rows, clock = result["rows"], result["environment"]
    names = list(dict.fromkeys(row["side"] for row in rows))
    widths = {name: max(len(name), 8) + 2 for name in names}
    lines = [
        (
            f"{clock['operation']} on {clock['ranks']} ranks, alpha {clock['alpha']:g} s, beta {clock['beta']:g} s per"
            f" byte, overhead {clock['overhead']:g} s: virtual microseconds"
        ),
        f"{'bytes':>11s}" + "".join(name.rjust(widths[name]) for name in names) + "  auto / best",
    ]

    # One line per size; a star marks the fastest fixed algorithm.
    for nbytes in dict.fromkeys(row["bytes"] for row in rows):
        line = {row["side"]: row for row in rows if row["bytes"] == nbytes}
        cells = "".join(
            f"{'*' if row['ratio'] == 1 and name != 'auto' else ''}{1e6 * row['median_s']:.1f}".rjust(widths[name])
            for name, row in line.items()
        )
        lines.append(f"{nbytes:11,d}{cells}  {line['auto']['ratio']:.3f} {line['auto']['algorithm']}")
    return "\n".join(lines)
