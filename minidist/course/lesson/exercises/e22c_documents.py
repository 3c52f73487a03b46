"""Lesson 22c: which keys the queries of a rank see, when a sequence is split in zig-zag and holds several documents."""

import numpy as np

from minidist.core.base.layout import chunk_sizes, offsets
from minidist.course.lesson.exercise import Case, Exercise
from minidist.parallel.context.orders import sequence_positions

SEPARATOR = 0


def text(case: Case) -> np.ndarray:
    """Return tokens with separators, one of them in the middle and none in front, so that mistakes differ."""
    draw = case.generator()
    tokens = draw.integers(1, 9, 2 * case.size)
    tokens[draw.random(2 * case.size) < 0.3] = SEPARATOR
    tokens[0], tokens[case.size] = 9, SEPARATOR
    return tokens


def seen(tokens: np.ndarray, separator: int, queries: np.ndarray) -> np.ndarray:
    """Return (queries, keys): a query sees itself, and what is before it with no separator in between."""
    keys = range(len(tokens))
    return np.array([[key <= query and separator not in tokens[key:query] for key in keys] for query in queries])


def mistaken(case: Case, kind: str) -> np.ndarray:
    """Return the answer of a typical mistake."""
    tokens, (rank, ranks) = text(case), _place(case)
    if kind == "no documents":
        return seen(tokens, -1, _rows(case))
    if kind == "contiguous":
        start, stop = offsets(chunk_sizes(len(tokens), ranks))[rank : rank + 2]
        return seen(tokens, SEPARATOR, np.arange(start, stop))
    mine = _rows(case)
    ids = np.cumsum(tokens == SEPARATOR)
    result: np.ndarray = (np.arange(len(tokens)) <= mine[:, None]) & (ids == ids[mine][:, None])
    return result


def _right(case: Case) -> np.ndarray:
    return seen(text(case), SEPARATOR, _rows(case))


def _rows(case: Case) -> np.ndarray:
    """Return the places of a rank's queries: those of two chunks, one from the front and one from the back."""
    rank, ranks = _place(case)
    return sequence_positions(2 * case.size, rank, ranks)


def _place(case: Case) -> tuple[int, int]:
    return case.seed % 8, case.seed // 8


def draw_place(draw: np.random.Generator) -> Case:
    """Return a case of up to 7 ranks with at least 8 tokens, and one of these ranks is examined."""
    ranks = int(draw.integers(1, 8))
    return Case(1, int(draw.integers(4, 16)), 8 * ranks + int(draw.integers(ranks)))


EXERCISES = [
    Exercise(
        name="22c.visible",
        arguments=lambda case, rank: (text(case), SEPARATOR, *_place(case)),
        expected=lambda case: [_right(case)],
        cases=lambda: [
            Case(1, size, 8 * ranks + rank) for ranks in (1, 2, 3, 4) for rank in range(ranks) for size in (4, 5, 9)
        ],
        draw=draw_place,
        par=Case(1, 8, 8 * 2 + 1),
        label=lambda case: f"rank {_place(case)[0]} of {_place(case)[1]}, tokens {text(case).tolist()}",
        communicates=False,
        for_hints={
            "negated": lambda f: f.answers_are([~f.expected[0]]),
            "without_itself": lambda case: [_right(case) & (np.arange(2 * case.size) != _rows(case)[:, None])],
            "all_visible": lambda f: "shape" not in f.message and bool(np.all(f.answers[0])),
            "without_documents": lambda f: f.answers_are([mistaken(f.case, "no documents")]),
            "separator_stands_alone": lambda f: f.answers_are([mistaken(f.case, "separator")]),
            "contiguous": lambda f: f.answers_are([mistaken(f.case, "contiguous")]) or "shape" in f.message,
        },
    )
]
