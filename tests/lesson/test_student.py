"""Notebooks for students have the stubs and not the solutions, and their checks draw their own cases."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest

from minidist.commands.command import Exit
from minidist.commands.lesson import lesson_build, lesson_open
from minidist.core.base.errors import UsageError
from minidist.course.lesson import solution
from minidist.course.lesson.build import sources
from minidist.course.lesson.handout import handout
from minidist.course.lesson.numbers import number_of
from minidist.course.lesson.student import solutions_of, student_notebook, without_solutions
from tests.cases import each

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sources(ROOT / "lessons")


def test_statements_that_call_solution_go_and_others_stay():
    code = """from minidist.course.lesson import check, solution

print("before")  # stays
check("16.gpipe", solution("16.gpipe"))
for name in ("a", "b"):
    check(name, solution(name))
check("16.gpipe", mine)"""
    assert without_solutions(code) == (
        'from minidist.course.lesson import check\n\nprint("before")  # stays\ncheck("16.gpipe", mine)'
    )
    assert without_solutions("from minidist.course.lesson import reveal, solution") == ""
    assert without_solutions('x = 1\nreveal("16.gpipe")') == "x = 1"
    assert without_solutions("solved = solution\nx = 1") == "solved = solution\nx = 1"


def test_a_handed_out_notebook_has_neither_our_solution_nor_what_it_printed(tmp_path):
    """What a cell without a solution printed stays, and so does the rest of a cell that has one."""
    cell = {"cell_type": "code", "metadata": {}, "execution_count": None}
    printed = {"output_type": "stream", "name": "stdout"}
    cells = [
        {
            **cell,
            "source": ["n = 3\n", 'print(solution("a"))'],
            "outputs": [{**printed, "text": ["def secret(): ...\n"]}],
        },
        {**cell, "source": ['check("a", solution("a"))'], "outputs": [{**printed, "text": ["right\n"]}]},
        {**cell, "source": ["print(n)"], "outputs": [{**printed, "text": ["3\n"]}]},
        {"cell_type": "markdown", "metadata": {}, "source": ["See [ring.py](../minidist/ring.py), [04](04_a.ipynb)."]},
    ]
    path = tmp_path / "lessons" / "90_tiny.ipynb"
    path.parent.mkdir()
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    first, second, words = json.loads(handout(path))["cells"]
    assert (first["source"], first["outputs"]) == (["n = 3"], [])
    assert (second["source"], second["outputs"]) == (["print(n)"], cells[2]["outputs"])
    assert words["source"] == ["See `minidist/ring.py`, [04](04_a.ipynb)."]
    path.write_bytes(handout(path))
    assert handout(path) == path.read_bytes()


@each("source", LESSONS[::4], ids=lambda source: source.stem)
def test_a_lesson_for_students_has_its_stub_and_no_solution(source):
    notebook = student_notebook(source, 7)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert not any("solution(" in cell for cell in code)
    assert any("check(" in cell for cell in code)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert sum("MINIDIST_LESSON_SEED" in cell for cell in code) == 1
    for cell in code:
        compile(cell, source.name, "exec")
    text = solutions_of(source)
    compile(text, source.name, "exec")
    assert f"# {number_of(source)}." in text


def test_the_command_writes_notebooks_and_solutions(tmp_path, monkeypatch, minidist):
    monkeypatch.chdir(ROOT)
    words = ["lesson", "build", "16", "--student", "--seed", "7"]
    minidist(*words, "--output", tmp_path / "class", "--solutions", tmp_path / "kept")
    (notebook,) = (tmp_path / "class").iterdir()
    nbformat.validate(nbformat.read(notebook, as_version=4))
    (kept,) = (tmp_path / "kept").iterdir()
    scope = {}
    exec(kept.read_text(), scope)
    assert scope["gpipe"](2, 3) == solution("16.gpipe")(2, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"seed": 3}, "--seed is for notebooks of students"),
        ({"output": Path("x")}, "--output is for notebooks of students"),
        ({"student": True}, "--output is missing"),
        ({"student": True, "output": ROOT / "lessons"}, "choose another one"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        lesson_build(folder=ROOT / "lessons", **flags)


def test_a_lesson_is_opened_in_jupyter(monkeypatch):
    started = []
    monkeypatch.setitem(sys.modules, "jupyterlab", types.ModuleType("jupyterlab"))
    monkeypatch.setattr(subprocess, "call", lambda command: started.append(command) or 0)
    for user in (1000, 0):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user, raising=False)
        with pytest.raises(Exit) as end:
            lesson_open("04", ROOT / "lessons")
        assert end.value.exit_code == 0
    command = [sys.executable, "-m", "jupyterlab", str(ROOT / "lessons" / "04_all_reduce_without_a_boss.ipynb")]
    assert started == [command, [*command, "--allow-root"]]
    monkeypatch.setitem(sys.modules, "jupyterlab", None)
    with pytest.raises(UsageError, match=r"pip install 'minidist\[learn\]'"):
        lesson_open("04", ROOT / "lessons")
    assert len(started) == 2
