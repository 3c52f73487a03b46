"""Every puzzle: its stub fails, our solution is at the target, each typical wrong answer gets a hint that fits."""

import inspect
import json

import pytest

from minidist import cli
from minidist.comm.errors import RankTimeoutError
from minidist.course import puzzle as puzzles
from minidist.course.lesson import solution
from minidist.course.lesson.checker import Result
from minidist.course.lesson.exercise import Failure
from minidist.course.lesson.par import is_measured, par_of
from minidist.course.lesson.puzzles import filled, schedules
from minidist.course.lesson.runner import Limits
from minidist.course.lesson.solutions import folder, loaded
from tests.cases import each
from tests.lesson.judged_here import RunnerHere, judged, packed
from tests.lesson.puzzle_attempts import WRONG

EVERY = {puzzle.name: puzzle for row in puzzles.rows().values() for puzzle in row}
OWN = [name for name, puzzle in EVERY.items() if puzzle.exercise.name == f"puzzle.{name}"]


def answer(puzzle, lines):
    """Return the function of a stub whose blanks are filled."""
    namespace = {}
    exec("import numpy as np\n" + filled(puzzle.stub, lines), namespace)
    return namespace[puzzle.function]


def test_there_are_three_rows_of_twenty_and_the_last_are_exercises_of_the_lessons():
    for letter, row in zip("mbs", puzzles.rows().values(), strict=True):
        assert [puzzle.name for puzzle in row] == [f"{letter}{number:02}" for number in range(1, 21)]
        of_row = [puzzle.name in OWN for puzzle in row]
        assert of_row == sorted(of_row, reverse=True)
        assert of_row.count(False) >= 4
    assert len({puzzle.title for puzzle in EVERY.values()}) == 60


@each("name", OWN)
def test_our_solution_is_at_the_target(name):
    exercise = EVERY[name].exercise
    function = solution(exercise.name)
    verdict = judged(EVERY[name].exercise.name, function)
    assert verdict.passed, verdict.text
    assert not verdict.above
    if not is_measured(exercise):
        return
    # The target is what a run of our solution needs, on each case.
    runner = RunnerHere(exercise, packed(function), (), Limits())
    for case in exercise.cases():
        needed = runner.run(case, False, 1000).metrics
        assert needed == pytest.approx(par_of(exercise.name, case).metrics, rel=1e-9)


@each("name", EVERY)
def test_a_stub_fails_and_has_the_parameters_of_our_solution(name):
    puzzle = EVERY[name]
    stub = answer(puzzle, [])
    verdict = judged(puzzle.exercise.name, stub)
    assert not verdict.passed
    assert "each ____" in verdict.hint, verdict.text
    taken = [len(inspect.signature(function).parameters) for function in (stub, solution(puzzle.exercise.name))]
    assert taken[0] == taken[1]


@each("name, lines, hint", WRONG, ids=lambda value: f"{value[0]} {value[1]}")
def test_a_typical_wrong_answer_gets_its_hint(name, lines, hint):
    assert len(lines) == EVERY[name].stub.count("____")
    verdict = judged(EVERY[name].exercise.name, answer(EVERY[name], lines))
    assert not verdict.passed
    assert hint in verdict.hint, verdict.text


def test_each_hint_belongs_to_a_wrong_answer():
    """A hint that no wrong answer gets is a guess."""
    assert {name for name, _, _ in WRONG} == set(OWN)
    texts = {hint.text for name in OWN for hint in EVERY[name].exercise.hints if hint not in schedules.COMMON}
    assert [text for text in texts if not any(words in text for _, _, words in WRONG)] == []


@each("name", EVERY)
def test_an_answer_has_a_picture(name):
    """Of a number, and of where a network is cut, there is nothing to draw; lesson 02 draws its memory."""
    puzzle = EVERY[name]
    result = Result(name, True, "")
    run = puzzles.run(puzzle, solution(puzzle.exercise.name), result)
    assert (puzzles.Attempt(puzzle, result, run).steps() is None) == (name in ("b13", "b16", "b17"))
    if name[0] == "b" and "memory" in puzzle.exercise.limits:
        assert any(trace.memory for trace in run.traces)


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def minidist(capsys):
    """minidist(words) -> (exit code, standard output, standard error)."""

    def call(*words):
        with pytest.raises(SystemExit) as end:
            cli.main([*words])
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return call


@each("name", ["m03", "m07", "b02", "s06"])
def test_a_puzzle_is_written_filled_judged_and_drawn(name, tmp_path, minidist, monkeypatch):
    """In the judge's own processes, from the list to the list. A deadlock before any message is a picture, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIDIST_HOME", str(tmp_path / "home"))
    puzzle, file = EVERY[name], f"{name}.py"
    code, said, error = minidist("puzzle", name)
    assert (code, error) == (0, f"written: {file}\n")
    assert puzzles.target_of(puzzle) in " ".join(said.split())
    stub = (tmp_path / file).read_text()
    assert minidist("puzzle", name, "--print") == (0, stub, "")

    # A wrong answer: the verdict, the target and the picture; nothing is marked.
    lines, hint = next((lines, hint) for n, lines, hint in WRONG if n == name)
    (tmp_path / file).write_text(stub.replace(puzzle.stub, filled(puzzle.stub, lines)))
    code, said, error = minidist("puzzle", name, file)
    assert code == 1
    assert hint in said
    assert puzzles.target_line(puzzle) in said
    assert f"written: {name}.{'svg' if name == 'm03' else 'html'}\n" in error
    assert puzzles.solved() == []

    right = loaded(folder() / "puzzle.py").FILLS[name]
    (tmp_path / file).write_text(stub.replace(puzzle.stub, filled(puzzle.stub, right)))
    code, said, error = minidist("puzzle", name, file, "--json")
    value = json.loads(said)
    assert (code, value["solved"]) == (0, True)
    assert value["target"] == pytest.approx(value["yours"])
    assert "<!doctype html>" in (tmp_path / value["written"][0]).read_text()
    assert puzzles.solved() == [name]
    code, said, _ = minidist("puzzle")
    assert f"  {name} solved  {puzzle.title}" in said
    assert said.count("solved  ") == 1
    assert "next: minidist puzzle m01" in said


@each(
    "words, text, sentence",
    [
        (("m99",), "", "there is no puzzle 'm99' (did you mean"),
        (("m01",), "x = 1", "m01.py exists already"),
        (("m01", "m01.py", "--print"), "x = 1", "--print prints the stub"),
        (("m01", "absent.py"), "", "'absent.py' does not exist"),
        (("m01", "m01.py"), "def one(comm, x: pass", "m01.py, line 1"),
        (("m01", "m01.py"), "import absent", "cannot be run: ModuleNotFoundError"),
        (("m01", "m01.py"), "raise SystemExit(3)", "cannot be run: SystemExit"),
        (("m01", "m01.py"), "def one_numbr(comm, x): pass", "no one_number() (did you mean 'one_numbr'?)"),
    ],
)
def test_wrong_input_is_one_sentence(words, text, sentence, tmp_path, minidist, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m01.py").write_text(text)
    code, said, error = minidist("puzzle", *words)
    assert (code, said, error.count("\n")) == (2, "", 1), error
    assert sentence in error


@each("content", ["[]", "{", '{"puzzles": [1]}', None])
def test_progress_that_cannot_be_kept_is_a_sentence_and_the_verdict_is_said(content, tmp_path, monkeypatch, minidist):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    monkeypatch.setenv("MINIDIST_HOME", str(home))
    if content is None:
        home.write_text("a file where the folder belongs")
    else:
        home.mkdir()
        (home / "progress.json").write_text(content)
    code, said, error = minidist("puzzle")
    assert code == 0
    assert "0 of 20 solved" in said
    assert error.count("\n") == (content is not None)

    (tmp_path / "s01.py").write_text('def forward_then_backward(p, m):\n    return [["F0", "B0"]]\n')
    code, said, error = minidist("puzzle", "s01", "s01.py")
    assert code == 0
    assert "s01: correct" in said
    assert error.splitlines()[0].startswith("minidist: ")
    assert error.splitlines()[1:] == ["written: s01.html"]


def test_what_does_not_end_is_judged_and_not_run_again(monkeypatch):
    function = answer(EVERY["m01"], ["comm.send(x, 1)", "comm.recv(x, 0)"])
    endless = Failure("raised", "", EVERY["m01"].exercise.par, error=RankTimeoutError("it computes without end"))
    monkeypatch.setattr(puzzles, "examine", lambda *_, **__: Result("m01", False, "", failure=endless))
    monkeypatch.setattr(puzzles, "run", None)
    assert puzzles.attempt(EVERY["m01"], function).steps() is None


def test_a_notebook_judges_a_function(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINIDIST_HOME", str(tmp_path))
    puzzles.puzzle("s01")
    assert "Forward, then backward" in capsys.readouterr().out
    puzzles.puzzle("s01", answer(EVERY["s01"], ['"B0"']))
    assert "s01: correct" in capsys.readouterr().out
    assert puzzles.solved() == ["s01"]
