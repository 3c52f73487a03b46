"""Sixty puzzles in three rows: a few lines to fill in, a target in bytes, messages, time or memory.

    messages    m01 ... m20    one rank sends, another receives, up to a ring and a tree
    memory      b01 ... b20    which arrays are alive when, up to ZeRO and offloading
    schedules   s01 ... s20    the lists of a pipeline's stages, up to zero bubble

A puzzle is an exercise with a text and a stub, in which `____` stands where the reader writes. The last puzzles of a
row are exercises of the lessons. The target is par, which is measured.

Proved by: tests/lesson/test_puzzles.py
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.base.read_file import parse_toml
from minidist.base.traces import Trace
from minidist.course.lesson.catalogue import exercises_of
from minidist.course.lesson.exercise import Case, Exercise
from minidist.course.lesson.hint_file import hint_of

BLANK = "____"
MESSAGES = ("bytes", "messages")
Item = Mapping[str, Any]  # a puzzle as its row's file has it
Kinds = Mapping[str, Callable[[Item], dict[str, Any]]]
Picture = Callable[[Case, Any], Sequence[Trace]]  # from a case and rank 0's answer


@dataclass(frozen=True)
class Puzzle:
    """One puzzle. picture: what is drawn of an answer; None draws the run itself."""

    name: str
    title: str
    text: str
    stub: str
    exercise: Exercise
    picture: Picture | None = None

    @property
    def function(self) -> str:
        """The name of the function that the stub defines."""
        return function_of(self.stub)


def function_of(stub: str) -> str:
    """Return the name of the last function that a stub defines."""
    return re.findall(r"^def (\w+)\(", stub, re.MULTILINE)[-1]


def filled(stub: str, lines: Sequence[str]) -> str:
    """Return the stub with a text in the place of each blank; what has several lines is indented as its blank is."""
    for text in lines:
        before, _, after = stub.partition(BLANK)
        indent = re.search(r"[^\n]*$", before)[0] if text.count("\n") else ""  # type: ignore[index]
        stub = before + text.replace("\n", f"\n{indent}") + after
    return stub


def puzzle_of(item: Item, names: Mapping[str, Any], kinds: Kinds) -> Puzzle:
    """Return the puzzle of an item of a row's file: of an exercise that it makes, or of one of a lesson."""
    stub, picture, text = item["stub"].strip("\n"), names.get(item.get("picture", "")), item["text"]
    if "exercise" in item:
        of_lesson = exercises_of(f"minidist.course.lesson.exercises.{item['file']}")
        exercise = next(exercise for exercise in of_lesson if exercise.name == item["exercise"])
        return Puzzle(item["name"], item["title"], text, stub, exercise, picture)

    settings = kinds[item["kind"]](item) if "kind" in item else next(iter(kinds.values()))(item)
    picture, note, common = settings.pop("picture", None), settings.pop("note", ""), settings.pop("hints", ())
    cases = [Case(*numbers) for numbers in item["cases"]]
    exercise = Exercise(
        name=f"puzzle.{item['name']}",
        cases=lambda: list(cases),
        draw=None,
        par=cases[-1],
        functions=(function_of(stub),),
        hints=(*(hint_of(row, names) for row in item.get("hint", ())), *common),
        **settings,
    )
    return Puzzle(item["name"], item["title"], f"{text} {note}".strip(), stub, exercise, picture)


def puzzles_of(row: str, names: Mapping[str, Any], kinds: Kinds) -> list[Puzzle]:
    """Return the puzzles of a row's file, the easiest first.

    names: the functions that the file names. kinds: kind of an item -> the settings of its Exercise, and what the
    puzzles of a kind have in common: `note` (the end of the task), `hints` and `picture`. The first is the usual one.
    """
    text = Path(__file__).with_name(f"{row}.toml").read_text(encoding="utf-8")
    return [puzzle_of(item, names, kinds) for item in parse_toml(text)["puzzle"]]


def own_exercises(puzzles: Sequence[Puzzle]) -> list[Exercise]:
    """Return the exercises that are not of a lesson."""
    return [puzzle.exercise for puzzle in puzzles if puzzle.exercise.name.startswith("puzzle.")]
