"""In every picture two different lines, and two entries of the legend, differ in colour or in style."""

import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minidist.base.memory import account_memory
from minidist.collectives.algorithms import ALGORITHMS
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_reduce
from minidist.pipeline.schedules import get_schedule
from minidist.pipeline.timing import time_plan
from minidist.report import draw
from minidist.report.crossover import OTHERS, crossover
from minidist.report.frame import finish, line, new_figure
from minidist.report.frontier import frontier
from minidist.report.gantt import gantt
from minidist.report.loss_overlay import loss_overlay
from minidist.report.memory_over_time import memory_over_time
from minidist.report.palette import MEMORY, distinct
from minidist.report.staleness import staleness
from minidist.report.version_gantt import version_gantt
from minidist.report.zero_bars import COLOURS, zero_bars
from tests.cases import each

REPORT = Path(__file__).parents[2] / "minidist" / "report"


def look(artist):
    """What tells an artist from another one: its colours and its style."""
    parts = []
    for name in ("color", "facecolor", "linestyle", "marker", "hatch"):
        value = getattr(artist, f"get_{name}", lambda: None)()
        parts.append(str(value if value is None or isinstance(value, str) else np.round(value, 3).tolist()))
    return tuple(parts)


def same_look(figure):
    """Pairs of what has one colour and style: entries of a legend, and lines in one place with different data."""
    pairs = []
    for legend in figure.legends:
        entries = zip(legend.legend_handles, (text.get_text() for text in legend.get_texts()), strict=True)
        pairs += [(a, b) for (x, a), (y, b) in combinations(entries, 2) if look(x) == look(y)]
    # Lines without a group id are guides: the line of a rank, a vertical, the mark of an update.
    places = {}
    for axes in figure.axes:
        lines = [artist for artist in axes.get_lines() if artist.get_gid()]
        places.setdefault(tuple(np.round(axes.get_position().bounds, 3)), []).extend(lines)
    for lines in places.values():
        pairs += [(x.get_gid(), y.get_gid()) for x, y in combinations(lines, 2) if look(x) == look(y)]
    return pairs


def everything(comm):
    """A run with computing, messages, both streams and memory of every purpose."""
    with account_memory(timeline=True):
        comm.compute(seconds=1.0, name="forward")
        all_reduce(comm, np.ones(7), async_op=True).wait()
        comm.compute(seconds=1.0, name="backward")
        comm.sendrecv(np.ones(2), (comm.rank + 1) % comm.size, np.empty(2), (comm.rank - 1) % comm.size)
    purposes = [*MEMORY, "someone's own", "another one"]
    comm.trace.memory = [(float(t), dict.fromkeys(purposes, 8 * (t + 1))) for t in range(3)]


@pytest.fixture(scope="module")
def traces():
    world = SimWorld(2, links=LinkModel(alpha=1.0, beta=0.0))
    world.run(everything)
    return world.traces


def times_of(sides):
    return [
        {"bytes": size, "side": side, "algorithm": "ring", "median_s": (i + 1) * 1e-6 * size}
        for i, side in enumerate(sides)
        for size in (8, 64)
    ]


def run_of(name):
    return SimpleNamespace(
        consistency=name, gradients_per_second=1.0, staleness=[0, 1], curve=[(0, 2.0), (1, 1.0)], entropy=0.5
    )


PICTURES = {
    "crossover": lambda traces: crossover(times_of([*ALGORITHMS["all_reduce"], *OTHERS, "auto"])),
    "staleness": lambda traces: staleness([run_of(f"ssp:{i}") for i in range(9)]),
    "memory_over_time": memory_over_time,
    "loss_overlay": lambda traces: loss_overlay([3.0, 2.0], [3.0, 2.0], [0.0, 0.0]),
    "frontier": lambda traces: frontier(
        [{"memory": {"peak_bytes": n * 1e9}, "tokens_per_second": 100.0 / n} for n in (1, 2)]
    ),
    "gantt": lambda traces: gantt([time_plan(get_schedule("zb-v").plan(4, 4), spans=True)]),
    "version_gantt": lambda traces: version_gantt([time_plan(get_schedule("pipedream").plan(4, 12), spans=True)]),
    "zero_bars": lambda traces: zero_bars({"stage 1": {**dict.fromkeys(COLOURS, 1e9), "total": 8e9}}),
    "exponents": lambda traces: draw("exponents", traces, {"gradient_exponents": {"-20": 3, "-30": 1, "2": 1}}),
    "mesh_picture": lambda traces: draw("mesh", traces, {"config": {"dp": 2, "tp": 2}}),
    "bytes_by_purpose": lambda traces: draw("bytes-by-purpose", traces),
    "bytes_matrix": lambda traces: draw("bytes-matrix", traces),
    "run_gantt": lambda traces: draw("gantt", traces),
    "space_time": lambda traces: draw("space-time", traces),
    "streams": lambda traces: draw("lanes", traces),
}


@each("name", PICTURES)
def test_no_two_things_of_a_picture_have_the_same_look(name, traces):
    assert same_look(PICTURES[name](traces)) == []


def test_every_picture_with_a_legend_is_looked_at():
    drawing = {path.stem for path in REPORT.glob("*.py") if re.search(r"\bfinish\(\s*figure", path.read_text())}
    assert drawing - {"frame"} == {*PICTURES, "tiles"}  # of tiles the legend has each rank's own colour


def test_two_lines_of_one_colour_are_noticed():
    figure = new_figure(3, 2)
    axes = figure.add_subplot()
    for name in ("one", "two"):
        axes.plot([0, 1], [0, len(name)], color="#4477AA", gid=name)
    finish(figure, [line("#4477AA", "one"), line("#4477AA", "two"), line("#4477AA", "three", linestyle="--")], "")
    assert same_look(figure) == [("one", "two"), ("one", "two")]


def test_colours_are_distinct_and_too_many_are_refused():
    for count in (1, 6, 14, 20):
        colours = distinct(list(MEMORY.values())[:6], count)
        assert len(set(colours)) == len(colours) == count
    with pytest.raises(UsageError, match="at most 28 lines that can be told apart, and not 100"):
        distinct(list(MEMORY.values())[:6], 100)
