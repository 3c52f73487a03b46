"""Our solutions are in the repository and not in the package; par is what they need, and judging needs no solution."""

import inspect
import json
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from minidist.core.base.errors import UsageError
from minidist.course.lesson import check, solutions
from minidist.course.lesson.catalogue import exercises
from minidist.course.lesson.exercise import Case
from minidist.course.lesson.grade import grade
from minidist.course.lesson.par import TABLE, all_cases, key_of, par_of
from tests.lesson.par_table import measure, measured_exercises

ROOT = Path(__file__).resolve().parents[2]
EVERY = {**exercises(), **exercises("assignments"), **exercises("puzzles")}
MEASURED = measured_exercises()
# test_puzzles.py measures the puzzles.
OF_LESSONS = [exercise for exercise in MEASURED if not exercise.name.startswith("puzzle.")]
by_name = pytest.mark.parametrize("exercise", OF_LESSONS, ids=lambda exercise: exercise.name)


def same(exercise, case):
    measured, par = measure(exercise, solutions.solution(exercise.name), case), par_of(exercise.name, case)
    assert measured.metrics == pytest.approx(par.metrics, rel=1e-9)
    return (measured.messages, measured.forms) == (par.messages, par.forms)


@by_name
def test_par_is_what_our_solution_needs(exercise):
    cases = all_cases(exercise)
    for case in (exercise.par, cases[len(cases) // 3], cases[-1]):
        assert same(exercise, case), f"{case}: run python -m tests.lesson.par_table"


@pytest.mark.exhaustive
@by_name
def test_par_is_what_our_solution_needs_on_every_case(exercise):
    assert [case for case in all_cases(exercise) if not same(exercise, case)] == []


def test_the_table_has_each_case_that_a_seed_may_draw_and_no_other():
    table = json.loads(TABLE.read_text())
    assert table.keys() == {exercise.name for exercise in MEASURED}
    for exercise in MEASURED:
        cases = set(all_cases(exercise))
        assert table[exercise.name].keys() == set(map(key_of, cases))
        for seed in (0, 7, 20250131):
            assert set(exercise.drawn(seed)) <= cases
    with pytest.raises(UsageError, match="par_table"):
        par_of("04.ring_all_reduce", Case(77, 1))


def test_there_is_a_solution_for_each_exercise_and_no_other():
    found = {}
    for path in sorted(solutions.folder().glob("*.py")):
        found |= getattr(solutions.loaded(path), "SOLUTIONS", {})
    assert found.keys() == {name for name, exercise in EVERY.items() if exercise.adapter is None}
    assert all(solutions.solution(name) is found[name] for name in found)
    assert all(callable(solutions.solution(name)) for name in EVERY)


def test_an_exercise_wants_a_generator_where_our_solution_is_one():
    """Of an assignment the functions of its course count, which an adapter calls."""

    def functions_of(exercise):
        if exercise.adapter is None:
            return [solutions.solution(exercise.name)]
        course = solutions.loaded(solutions.folder() / f"{exercise.name.partition('.')[0]}.py")
        return [getattr(course, name) for name in exercise.functions]

    generators = {name for name in EVERY if any(map(inspect.isgeneratorfunction, functions_of(EVERY[name])))}
    assert {name for name, exercise in EVERY.items() if exercise.generator} == generators
    assert generators == {"17c.two_versions", "llmsys.clock_cycles", "llmsys.partition_dataset"}


def test_a_file_of_solutions_can_be_handed_in():
    """The exercises' modules are not where an answer runs."""
    texts = {path.name: path.read_text() for path in solutions.folder().glob("[0-9]*.py")}
    assert [name for name, text in texts.items() if "minidist.course.lesson" in text] == []


def test_without_the_repository_a_solution_is_refused_and_an_answer_is_graded(tmp_path, monkeypatch):
    monkeypatch.setattr(solutions, "__file__", "/nowhere/minidist/course/lesson/solutions.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="run this in a clone of minidist's repository"):
        solutions.solution("16.gpipe")
    answer = tmp_path / "answer.py"
    answer.write_text(
        """def gpipe(p, m):
    return [[f"F{i}" for i in range(m)] + [f"B{i}" for i in reversed(range(m))] for _ in range(p)]

def by_sendrecv(comm, array):
    incoming = array.copy()
    comm.sendrecv(array, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
    return incoming
"""
    )
    assert grade(answer, "16.gpipe", 5).score == 10
    assert grade(answer, "03.by_sendrecv", 5).score == 10


def test_the_package_takes_par_along_and_no_solution():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"] == {"include": ["minidist*"]}
    assert settings["package-data"] == {
        "minidist": ["py.typed"],
        "minidist.base": ["*.cu"],
        "minidist.course.lesson": ["*.json", "*.toml", "*.html"],
        "minidist.course.lesson.puzzles": ["*.toml"],
        "minidist.course.museum": ["*.toml"],
        "minidist.debug.dumps": ["*.toml"],
        "minidist.report": ["*.css", "*.js"],
        "minidist.planning.cluster": ["*.toml"],
        "minidist.planning": ["families.toml", "class_defaults.json"],
    }
    assert [path.name for path in ROOT.glob("minidist*") if (path / "__init__.py").exists()] == ["minidist"]
    assert ROOT / "minidist" not in solutions.folder().parents

    # No file of the package defines a function that is a solution.
    others = {"step", "forward", "load", "save", "in_rank_order"}  # what other functions are called, too
    names = {f"def {function}(" for function in {solutions.solution(name).__name__ for name in exercises()} - others}
    texts = {path: path.read_text() for path in (ROOT / "minidist" / "course" / "lesson").rglob("*.py")}
    assert len(texts) > 20
    assert [(path.name, name) for path, text in texts.items() for name in names if name in text] == []


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_solution_is_revealed_after_a_right_answer_or_three_tries(is_kept, capsys, monkeypatch, tmp_path):
    """Tries of earlier sessions count; where no file can be written, those of this one do."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIDIST_HOME", str(tmp_path / ("home" if is_kept else "file")))
    monkeypatch.setattr(solutions, "_session", defaultdict(set))
    ours = inspect.getsource(solutions.solution("16.gpipe"))

    def stub(stages, microbatches):
        raise NotImplementedError("yours")

    def revealed(name="16.gpipe"):
        if is_kept:
            solutions._session.clear()  # another session
        capsys.readouterr()
        solutions.reveal(name)
        return capsys.readouterr().out

    for answer in (stub, solutions.solution("16.gpipe")):  # neither is a try
        check("16.gpipe", answer)
    assert revealed() == "16.gpipe: our solution is printed here when your answer passes, or after 3 more tries\n"
    for answer, left in ((list, "2 more tries"), (lambda stages, microbatches: [], "1 more try")):
        for _ in range(2):  # the same answer once more is not another try
            check("16.gpipe", answer)
            assert f"or after {left}\n" in revealed()
    check("16.gpipe", lambda stages, microbatches: None)
    assert revealed() == ours + "\n"
    check("17.one_f_one_b", lambda *case: solutions_of_17(*case), mpi=False)
    assert revealed("17.one_f_one_b").startswith("def one_f_one_b")
    with pytest.raises(UsageError, match="there is no exercise"):
        solutions.reveal("16.none")


def solutions_of_17(stages, microbatches):
    plans = []
    for rank in range(stages):
        first = min(stages - 1 - rank, microbatches)
        order = [f"F{i}" for i in range(first)]
        for i in range(microbatches - first):
            order += [f"F{first + i}", f"B{i}"]
        plans.append(order + [f"B{i}" for i in range(microbatches - first, microbatches)])
    return plans
