"""predict waits for a number, takes the example where nobody answers, and is judged by what was measured."""

import io
import sys
import types

import pytest

from minidist.course.lesson import predict as exported
from minidist.course.lesson.prediction import Prediction, number, parsed, predict


def answers(monkeypatch, *texts):
    """Somebody at a terminal types these."""
    left = list(texts)

    def typed(prompt):
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr("minidist.course.lesson.prediction.can_answer", lambda: True)
    monkeypatch.setattr("builtins.input", typed)


def test_it_waits_until_a_number_is_typed(monkeypatch, capsys):
    assert exported is predict
    answers(monkeypatch, "", "many", "nan", " 14,000 ")
    guess = predict("bytes that leave rank 0", 8000, "B")
    assert guess == Prediction("bytes that leave rank 0", 14_000.0, "B", "you")
    assert capsys.readouterr().out.count("is not a number; type one, such as 8,000") == 3


@pytest.mark.parametrize("why", ["no terminal", "the end of the input", "a front end without a prompt"])
def test_the_example_goes_on_where_nobody_answers(monkeypatch, capsys, why):
    if why == "no terminal":
        monkeypatch.setattr("sys.stdin", io.StringIO("7\n"))
    elif why == "the end of the input":
        answers(monkeypatch)
    else:
        answers(monkeypatch)
        monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(NotImplementedError))
    guess = predict("messages", 64)
    assert (guess.value, guess.by) == (64, "")
    guess.judge(63)
    assert capsys.readouterr().out == "messages? Your guess: ____\nmessages: 63; your guess: ____\n"


def test_a_built_notebook_folds_the_measured_number_away(monkeypatch):
    shown = []
    fakes = {"IPython": {"get_ipython": object}, "IPython.display": {"display": lambda data, raw: shown.append(data)}}
    for name, content in fakes.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))
    Prediction("bytes <b>", 8, "B", by="").judge(63)
    ((page, text),) = [(data["text/html"], data["text/plain"]) for data in shown]
    summary, hidden = page.split("</summary>")
    assert "63 B" in hidden
    assert "63" not in summary
    assert "bytes &lt;b&gt;; your guess: ____" in summary
    assert text == "bytes <b>: 63 B; your guess: ____"


@pytest.mark.parametrize(
    ("value", "answer", "within", "right"),
    [
        (63, 63, 0.0, True),
        (64, 63, 0.0, False),
        (0.3, 0.33, 0.1, True),
        (0.29, 0.33, 0.1, False),
        (-5, -5.2, 0.1, True),
    ],
)
def test_a_prediction_is_judged(capsys, value, answer, within, right):
    Prediction("messages", value).judge(answer, within)
    said = capsys.readouterr().out
    assert said == f"messages: {number(answer)}; you predicted {number(value)}: {'right' if right else 'off'}\n"


def test_numbers_are_read_and_printed_as_people_write_them():
    assert [parsed(text) for text in ("1e6", "33 %", "1_000", "-2.5", "", "a", "inf")] == [
        1e6,
        33,
        1000,
        -2.5,
        *[None] * 3,
    ]
    assert [number(14000, "B"), number(1 / 3), number(2.0), number(33, "%")] == ["14,000 B", "0.333", "2", "33 %"]
