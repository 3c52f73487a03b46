"""A function and what it uses, in another process: by value when it is the user's, by name when it is installed."""

import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from minidist.course.lesson.transport import dumps, loads

Shard = namedtuple("Shard", "first last")


@dataclass
class Range:
    first: int
    last: int

    def length(self):
        return self.last - self.first


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def times(self, x):
        return self.factor * Range(0, x).length()


def with_a_named_tuple(x):
    return sum(Shard(x, 2 * x))


def with_a_data_class(x):
    return Range(x, 4 * x).length()


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (with_a_named_tuple, 15),
        (with_a_data_class, 15),
        (Scale(3).times, 15),
        (partial(lambda factor, x: factor * x, 3), 15),
        (type("Callable", (), {"__call__": lambda self, x: 3 * x})(), 15),
    ],
    ids=["namedtuple", "dataclass", "method", "partial", "callable object"],
)
def test_what_a_cell_defines_runs_in_a_process_that_does_not_know_it(function, answer, tmp_path):
    (tmp_path / "packed").write_bytes(dumps(function))
    program = (
        "import pathlib, sys; from minidist.course.lesson.transport import loads\n"
        "print(loads(pathlib.Path(sys.argv[1]).read_bytes())(5))\n"
        "assert not any('test_transport' in name for name in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "packed")]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == answer


def test_closures_defaults_and_recursion_come_along():
    base = 10

    def factorial(n):
        return 1 if n <= 1 else n * factorial(n - 1)

    def function(n, plus=2, *, times=3):
        return base + times * factorial(n) + plus + int(np.sum([1, 2]))

    again = loads(dumps(function))
    assert again(4) == function(4) == 10 + 72 + 2 + 3
    assert again.__globals__ is not function.__globals__


def test_what_is_installed_is_sent_by_name():
    assert loads(dumps(np.linalg.norm)) is np.linalg.norm
    assert len(dumps(np.linalg.norm)) < 200
