"""The words of a command line give a command the arguments that Typer gives it; what Typer would say is left to it."""

import io
import os
import re
import subprocess
import sys

import pytest

from minidist import __version__
from minidist.commands import app
from minidist.commands.command import arguments_of
from minidist.commands.listing import WIDTHS, listing, width_without_colours
from minidist.commands.typer_help import read
from minidist.core.base.errors import UsageError
from tests.cases import each


def by_typer(words):
    """The arguments that Typer reads, or None for help and for a wrong command line."""
    name = words[0]
    try:
        found = read(words, {name: app.loaded(name)}, "", app.OF_THE_SCRIPT)
    except UsageError:
        raise
    except Exception:  # of click's
        return None
    return None if isinstance(found, int) else found[0][1]


def by_us(words):
    command, names = app.command_of(words)
    return command and arguments_of(command, words[names:], words[0] in app.FIRST_ENDS)


RIGHT = [
    "train",
    "train --steps 3 --lr 0.5 --tp=2 --sequence-parallel --reduction ring --json --trace t.jsonl",
    "train --micro-batch auto --steps 3 --steps 4 --set a=1 --set=b=2 --config job.toml --fold --no-fold",
    "compare --dp 2 mine.py:rank mine.py:alone",
    "schedule 1f1b --stages 4 gpipe --microbatches 8 -o a.svg --option stashing=0 --option a=b --format svg",
    "schedule",
    "generate runs --temperature 0.5 --no-kv-cache --seed 3",
    "plan --model gpt2 --untied --no-sequence-parallel --gpus 4",
    "plan --tied --sequence-parallel --gpus 4",
    "bench collectives --simulated --ranks 2 --beta 1e-9 --sizes 4,8 --rounds 3",
    "bench step gpt mlp",
    "lesson build 04 05 --student --output out --seed 0",
    "lesson copy here",
    "grade a.py b.py --assignment 04 --json out",
    "run x.py",
    "run x.py --ranks 4 more --flag=1 -x",
    "torch x.py --ranks 4 more --flag=1 -x",
    "torch --ranks 4 -m x y --help",
    "mpi -n 3 --every-order x.py -n 4",
    "data --weights 2,1 --dp 2",
    "tiles --tp 2",
    "puzzle m03",
    "museum",
]
LEFT_TO_TYPER = [
    "train --help",
    "train -h",
    "train --stepz 3",
    "train --steps x",
    "train --steps",
    "train --steps --json",
    "train --json=1",
    "train --",
    "train more",
    "generate",
    "generate a b",
    "bench",
    "bench collectivez",
    "bench step --rounds 0",
    "lesson quiz --output a.csv --questions 101",
    "run",
    "run --ranks 4 x.py",
    "run x.py --help",
    "schedule -oa.svg",
    "schedule -o=a.svg",
    "torch --help x.py",
]


@each("line", RIGHT, ids=str)
def test_a_right_command_line_gives_the_arguments_of_typer(line):
    ours = by_us(line.split())
    assert ours is not None
    assert {name: repr(value) for name, value in ours.items()} == {
        name: repr(value) for name, value in by_typer(line.split()).items()
    }


@each("line", LEFT_TO_TYPER, ids=str)
def test_what_may_be_wrong_is_left_to_typer(line):
    assert by_us(line.split()) is None


@each("name", [*app.COMMANDS], sampled=5)
@each("word", ["--seed", "--ranks", "--json", "--timeout", "--output", "--dp", "--unknown", "x"])
@each("value", ["3", "-3", "0.5", "x", "", "1_000", " 4", "nan", "1e400", "9" * 19, "a=b", None])
def test_no_argument_differs_from_the_one_that_typer_gives(name, word, value):
    words = [name, word] if value is None else [name, word, value]
    try:
        ours = by_us(words)
    except UsageError as error:
        with pytest.raises(UsageError, match=re.escape(str(error))):
            by_typer(words)
        return
    if ours is not None:
        assert repr(ours) == repr(by_typer(words)), words


@each("line", ["--version data", "--version data --nope", "--version --", "--version run x.py", "--version bench step"])
def test_the_version_is_printed_before_a_command_is_read(line, capsys):
    assert app.run_words(line.split()) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@each("line", ["--help", "--version", "tiles --tp 2"])
def test_a_standard_output_that_is_closed_is_one_sentence(line, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit, match="2"):
        app.main(line.split())
    assert capfd.readouterr().err == "minidist: standard output is closed; send it to a file, or to /dev/null\n"


@pytest.fixture
def plain(monkeypatch):
    """No variable that asks for colours."""
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TERMINAL_WIDTH", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@each("width", [WIDTHS[0], 79, 80, 97, 120, WIDTHS[-1]])
def test_the_list_of_commands_is_that_of_typer(width, plain, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert width_without_colours() == width
    every = app.abouts()
    assert read(["--help"], every, app.ABOUT, {}) == 0
    assert capsys.readouterr().out == listing(app.ABOUT, every, width)


@each("change", [{"COLUMNS": "59"}, {"FORCE_COLOR": "1"}, {"GITHUB_ACTIONS": "true"}, {"TERMINAL_WIDTH": "70"}])
def test_colours_and_narrow_columns_are_typers(change, plain, capsys, monkeypatch):
    assert width_without_colours() is not None
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    assert width_without_colours() is None


def test_a_width_that_is_no_number_is_none(plain):
    """Rich and Typer read these variables, and end in an error for a digit such as a superscript."""
    program = [sys.executable, "-m", "minidist", "train", "--help"]
    environment = os.environ | dict.fromkeys(("COLUMNS", "LINES", "TERMINAL_WIDTH"), "²")
    said = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert "--layers" in said.stdout


def test_an_output_without_the_lines_of_boxes_is_typers(plain, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert width_without_colours() is None
