"""The bank of answers: every wrong one is refused with its hint, every unusual right one is accepted."""

from minidist.course.lesson import names, solution
from tests.cases import each
from tests.lesson.bank import Entry, bank
from tests.lesson.test_puzzles import OWN
from tests.lesson.unusual_answers import RIGHT


@each("entry", bank(), ids=lambda entry: f"{entry.exercise} {entry.title}", sampled=24)
def test_the_judge_treats_an_answer_as_it_should(entry):
    assert entry.problem() == ""


def test_the_bank_is_large_and_nine_wrong_answers_of_ten_have_a_hint():
    entries = bank()
    wrong = [entry for entry in entries if entry.hint is not None]
    assert len(wrong) >= 500
    assert len(RIGHT) >= 55
    assert sum(bool(entry.hint) for entry in wrong) >= 0.98 * len(wrong)
    # Each exercise has some of both kinds, each puzzle some that are wrong.
    assert {entry.exercise for entry in wrong} == {*names(), *(f"puzzle.{name}" for name in OWN)}
    assert {name for name, _ in RIGHT} == set(names())


def test_the_bank_would_notice():
    name, right = "06.weighted_average", solution("06.weighted_average")
    assert "accepted, and it is wrong" in Entry(name, "right", lambda: right, "a hint").problem()
    wrong = next(entry for entry in bank() if entry.exercise == name and entry.hint)
    assert "refused, and it is right" in wrong._replace(hint=None).problem()
    assert "and should have 'other words'" in wrong._replace(hint="other words").problem()
