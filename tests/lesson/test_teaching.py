"""Every command of docs/teaching.md runs, on two submissions, a right one and a wrong one."""

import inspect
import json
import re
import shlex
import shutil
from pathlib import Path

import nbformat
import pytest

from minidist import cli
from minidist.course.lesson import solution
from minidist.course.lesson.numbers import SOURCES, number_of
from tests.cases import each

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ *\$ (.*)$", PAGE, re.MULTILINE)
LONG = ("minidist lesson slides", "minidist lesson build")  # they run a lesson, or write all of them
WRONG = "def ring_all_reduce(comm, array):\n    return array"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What an instructor's folder has on Friday."""
    path = tmp_path_factory.mktemp("course")
    right = "import numpy as np\nfrom minidist.core.base.layout import chunk_sizes, offsets\n"
    right += "from minidist.core.comm import Comm\n\n"
    right += inspect.getsource(solution("04.ring_all_reduce"))
    for name, text in (("answer", right), ("submissions/ada", right), ("submissions/bob", WRONG)):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text)])
        (path / name).parent.mkdir(exist_ok=True)
        nbformat.write(notebook, path / f"{name}.ipynb")
    (path / "results").mkdir()
    (path / "autograder" / "submission").mkdir(parents=True)
    (path / "autograder" / "results").mkdir()
    shutil.copy(path / "answer.ipynb", path / "autograder" / "submission")
    shutil.copytree(ROOT / "lessons", path / "lessons", ignore=shutil.ignore_patterns("*.ipynb", "__pycache__"))
    return path


def run(command, folder, monkeypatch):
    """Return the exit code of a command of the page."""
    monkeypatch.chdir(folder)
    command = command.replace("/autograder/", f"{folder}/autograder/")
    words = shlex.split(command)
    assert words[0] == "minidist", command
    words = [name for word in words for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    with pytest.raises(SystemExit) as end:
        cli.main(words[1:])
    return end.value.code or 0


CLASS = next(command for command in COMMANDS if command.startswith("minidist grade submissions/*"))


@each("command", list(dict.fromkeys(command for command in COMMANDS if not command.startswith(LONG))))
def test_a_command_of_the_page_runs(command, folder, monkeypatch):
    if "--leaderboard" in command and not list((folder / "results").glob("*.json")):
        run(CLASS, folder, monkeypatch)
    assert run(command, folder, monkeypatch) == (1 if command == CLASS else 0)  # one of the two is wrong
    for place in re.findall(r"(?:--json|-o) (\S+)", command):
        assert (folder / place.lstrip("/")).exists()
    if command == CLASS:
        scores = [json.loads((folder / "results" / f"{name}.json").read_text())["score"] for name in ("ada", "bob")]
        assert scores == [10, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(LONG)])
def test_a_long_command_of_the_page_runs(command, folder, monkeypatch):
    assert run(command, folder, monkeypatch) == 0
    for place in re.findall(r"(?:--output|-o|--solutions) (\S+)", command):
        assert (folder / place).exists()


def test_the_page_has_the_commands_of_a_course():
    assert {tuple(command.split()[:3]) for command in COMMANDS if command.startswith("minidist lesson")} == {
        ("minidist", "lesson", kind) for kind in ("build", "instructor", "quiz", "slides")
    }


def test_every_lesson_of_the_plans_exists():
    numbers = {number_of(path) for path in (ROOT / "lessons").glob(SOURCES)}
    weeks = re.findall(r"^\| \d+ \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    named = {number for lessons, graded in weeks for number in re.findall(r"\b\d\d[a-z]?\b", f"{lessons} {graded}")}
    assert len(weeks) == 24
    assert named <= numbers
