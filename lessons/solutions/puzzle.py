"""Our solutions of the puzzles: what stands in the place of each blank; they are not a part of the package."""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.course.lesson.puzzles import filled
from minidist.course.puzzle import find

FILLS = {
    # messages
    "m01": ["comm.send(x, 1)", "comm.recv(x, 0)"],
    "m02": ["comm.recv(x, 1)", "comm.send(x, 0)"],
    "m03": ["comm.recv(incoming, other)", "comm.send(x, other)"],
    "m04": ["comm.sendrecv(x, other, incoming, other)"],
    "m05": ["comm.irecv(incoming, other)", "comm.isend(x, other)"],
    "m06": ["comm.send(x[:half], 1)", "comm.recv(x[:half], 0)"],
    "m07": ["comm.recv(x, comm.rank - 1)", "comm.send(x, comm.rank + 1)"],
    "m08": ["comm.send(table[other], other)", "comm.recv(row, 0)"],
    "m09": ["comm.send(x, 0)", "comm.recv(table[other], other)"],
    "m10": ["comm.recv(before, comm.rank - 1)", "x += before"],
    "m11": ["comm.sendrecv(x, (comm.rank + 2) % comm.size, incoming, (comm.rank - 2) % comm.size)"],
    "m12": ["comm.recv(x, ANY)", "comm.send(x, 0)"],
    "m13": ["(rank - step) % n", "(rank - 1 - step) % n"],
    "m14": ["comm.send(x, comm.rank + distance)", "comm.recv(x, comm.rank - distance)"],
    "m15": ["comm.rank ^ distance", "np.maximum(x, incoming, out=x)"],
    # memory
    "b01": ['d.free("a0")'],
    "b02": ['d.free(f"a{i - 1}")'],
    "b03": ['d.make("p1")\nd.make("a1")\nd.free("p1")\nd.make("g1")'],
    "b04": ['d.free(f"a{i - 1}")', 'd.free(f"g{i}")'],
    "b05": ['d.update(i)\nd.free(f"w{i}")'],
    "b06": ['d.make("a1")', 'd.free("a1")'],
    "b07": ["i % 2 == 0", "i % 2 == 0"],
    "b08": ['d.free(f"a{i}")\nd.update(i)\nd.free(f"w{i}")'],
    "b09": ['d.free(f"p{i}")\nd.free(f"a{i - 1}")'],
    "b10": ['d.make(f"p{i}")', 'd.free(f"p{i}")\nd.free(f"g{i}")'],
    "b11": [
        "weights[comm.rank * size : (comm.rank + 1) * size]",
        "gradient[comm.rank * size : (comm.rank + 1) * size]",
    ],
    "b12": ["reduce_scatter(comm, gradient)"],
    "b13": ["optimizer /= n", "gradients /= n", "weights /= n"],
    "b14": ['d.out(f"a{i - 1}")', 'd.back(f"a{i - 1}")'],
    "b15": ['d.back(f"a{i - 2}")'],
    # schedules
    "s01": ['"B0"'],
    "s02": ['"F0", "B0", "F1", "B1", "F2", "B2"'],
    "s03": ['"F0", "B0"'],
    "s04": ['"F0", "F1", "B1", "B0"'],
    "s05": ['"F2"'],
    "s06": ['"F0", "B0", "F1", "B1"'],
    "s07": ["min(m, p - 1 - s)"],
    "s08": ['if ahead + i < m:\n    order.append(f"F{ahead + i}")\norder.append(f"B{i}")'],
    "s09": ['[f"{kind}{i}" for i in range(m) for kind in "FB"]'],
    "s10": ["3 * (m + p - 1)"],
    "s11": ["(p - 1) / m"],
    "s12": ["max(1, 4 * (p - 1))"],
    "s13": ["min(m, p - s)"],
    "s14": [
        '"F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"',
        '"F0", "F1", "B0", "B1", "F2", "F3", "B2", "B3"',
    ],
    "s15": ['"F0", "I0", "F1", "I1", "W0", "W1"'],
    "s16": ["i >= s"],
}


def function(name: str) -> Callable[..., Any]:
    """Return the function of a puzzle with its blanks filled."""
    puzzle, namespace = find(name), {"np": np, "__name__": __name__}
    exec(filled(puzzle.stub, FILLS[name]), namespace)
    return namespace[puzzle.function]


SOLUTIONS = {f"puzzle.{name}": function(name) for name in FILLS}
