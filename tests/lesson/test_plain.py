"""Any answer becomes plain data, in bounded time and memory."""

import pickle
from collections import namedtuple
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from minidist.core.autograd import Tensor
from minidist.course.lesson.exercise import difference
from minidist.course.lesson.plain import Unreadable, form, plain
from tests.cases import each

Pair = namedtuple("Pair", "a b")
Color = IntEnum("Color", "RED")


@dataclass
class Odd:
    x: int = 1


class Nasty:
    def __repr__(self):
        raise RuntimeError("no repr")


class Lies:
    def __array__(self, *arguments, **keywords):
        raise RuntimeError("no array")


class Number(float):
    pass


def looped():
    result = []
    result.append(result)
    return result


def deep():
    result = []
    for _ in range(1000):
        result = [result]
    return result


# Functions, because some are large or can be read once only.
ODD = [
    Odd,
    Nasty,
    Lies,
    looped,
    deep,
    lambda: [0] * 2_000_000,
    lambda: "x" * 2_000_000,
    lambda: np.zeros(1 << 30, np.int8),
    lambda: np.array([Odd()], dtype=object),
    lambda: (i for i in range(3)),
    lambda: {1, 2},
    lambda: print,
    lambda: ...,
    lambda: np.datetime64("2020-01-01"),
]
USUAL = [
    None,
    True,
    3,
    10**400,
    2.5,
    float("nan"),
    "F0",
    b"x",
    [1, [2, 3]],
    [[1], [2, 3]],
    (1, "a"),
    {"a": [1]},
    {(1, 2): 3},
    np.float32(2),
    np.zeros((2, 0)),
    np.array(["a"]),
    [],
    Pair(1, 2),
    Color.RED,
    Number(2.5),
    Tensor(np.ones(2)),
]


@each("make", ODD)
def test_what_no_exercise_asks_for_says_what_it_was(make):
    result = plain(make())
    assert any(isinstance(entry, Unreadable) for entry in flat(result))
    assert len(pickle.dumps(result)) < 10_000
    assert difference(result, np.zeros(2), 0)
    assert difference(result, (np.zeros(2), np.zeros(1)), 0)
    assert form(result)


def flat(value):
    return [leaf for entry in value for leaf in flat(entry)] if isinstance(value, list) else [value]


@each("value", USUAL, ids=repr)
def test_usual_values_stay_what_they_are(value):
    result = pickle.loads(pickle.dumps(plain(value)))
    np.testing.assert_equal(result, value.data if isinstance(value, Tensor) else value)
    assert type(result) in (type(None), bool, int, float, str, bytes, list, tuple, dict, np.ndarray, np.float32)
    assert difference(result, np.full(7, 3.0), 0)
    assert difference(result, (np.zeros(2), np.zeros(1), np.zeros(1)), 0)
    assert form(result)


def test_what_is_one_object_twice_stays_one():
    array = np.ones(2)
    first, second = pickle.loads(pickle.dumps(plain([array, array])))
    assert first is second


def test_a_form_is_words_without_numbers_of_the_answer():
    assert form([["F0", "B0"], ["F0"]]) == "a list of 2, the first of them a list of 2, the first of them a str"
    assert form((np.zeros(3), 4)) == "a tuple of 2, the first of them an array of shape (3,)"
    assert form(2.5) == "a number"
