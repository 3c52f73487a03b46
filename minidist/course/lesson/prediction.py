"""The reader commits to a number before the lesson shows it; the check judges it with the number that was measured.

In a notebook and at a terminal `predict` asks and waits. Where nobody can answer (a notebook that is built, a script in
a pipe) the line is left to be filled in, and in a notebook the measured number is folded away until it is asked for.

Proved by: tests/lesson/test_predict.py
"""

import importlib
import sys
from dataclasses import dataclass
from html import escape
from math import isclose, isfinite
from typing import Any

TOLERANCE = 1e-9
BLANK = "____"


@dataclass(frozen=True)
class Prediction:
    """One predicted number. question: what it is about, without a question mark. by: "you", or "" for nobody."""

    question: str
    value: float
    unit: str = ""
    by: str = "you"

    def judge(self, answer: float, within: float = 0.0) -> None:
        """Print the measured number, the predicted one, and whether they agree.

        within: how far off a right prediction may be, as a part of the answer.
        """
        measured = number(answer, self.unit)
        if not self.by:
            folded(
                f"{self.question}; your guess: {BLANK}", f"{self.question}: {measured}; your guess: {BLANK}", measured
            )
            return
        right = isclose(self.value, answer, rel_tol=0.0, abs_tol=abs(answer) * within + TOLERANCE)
        verdict = "right" if right else "off"
        print(f"{self.question}: {measured}; you predicted {number(self.value, self.unit)}: {verdict}")


def folded(summary: str, text: str, hidden: str) -> None:
    """Show `hidden` below a summary that opens with a click; where there is no notebook, print `text`."""
    if not in_notebook():
        print(text)
        return
    notebook: Any = importlib.import_module("IPython.display")
    page = f"<details><summary>{escape(summary)} (click for what was measured)</summary>{escape(hidden)}</details>"
    notebook.display({"text/html": page, "text/plain": text}, raw=True)


def predict(question: str, example: float, unit: str = "") -> Prediction:
    """Ask for a number and wait until one is given; returns the prediction, which `judge` compares later."""
    asked = f"{question}{f' [{unit}]' if unit else ''}: "
    while can_answer():
        try:
            text = input(asked)
        except (EOFError, NotImplementedError):  # the end of the input; a front end without a place to type
            break
        value = parsed(text)
        if value is not None:
            return Prediction(question, value, unit)
        print(f"{text.strip()!r} is not a number; type one, such as {number(example)}")
    print(f"{question}? Your guess: {BLANK}{f' {unit}' if unit else ''}")
    return Prediction(question, example, unit, "")


def in_notebook() -> bool:
    """Return whether this runs in the cell of a notebook."""
    interactive = sys.modules.get("IPython")
    return interactive is not None and interactive.get_ipython() is not None


def can_answer() -> bool:
    """Return whether a person may be there: the cell of a notebook, or a terminal."""
    return in_notebook() or (sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty())


def parsed(text: str) -> float | None:
    """Return the number in a text such as "14,000", "1e6" or "33 %"; None when there is none."""
    try:
        value = float(text.strip().rstrip("%").strip().replace(",", "").replace("_", ""))
    except ValueError:
        return None
    return value if isfinite(value) else None


def number(value: float, unit: str = "") -> str:
    """Return a number as a lesson prints it: 14,000 B, 0.333, 33 %."""
    whole = isclose(value, round(value), rel_tol=0.0, abs_tol=TOLERANCE)
    text = f"{round(value):,}" if whole else f"{value:.3g}"
    return f"{text} {unit}".rstrip()
