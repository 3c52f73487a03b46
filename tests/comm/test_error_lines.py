"""An error of ours in a user's program is one sentence and the user's line; the traceback comes when asked for."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from minidist.comm import SimWorld, call_site, launch
from minidist.core.autograd import softmax
from minidist.core.collectives import all_reduce
from tests.mpi_runner import mpiexec

ROOT = Path(__file__).parents[2]
SCRIPT = """
import numpy as np
from minidist.core.autograd import Tensor
from minidist.comm import launch
from minidist.core.nn import Linear


def forward(model):
    return model(Tensor(np.ones((4, 7), np.float32)))  # line 9


def main(comm):
    return forward(Linear(8, 3))


if __name__ == "__main__":
    launch(main)
"""


def run(folder, *command, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "MINIDIST_TRACEBACK"}
    environment |= {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120, check=False
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            def order(p, m):
                rows = []
                return rows[p]  # line 4
            """
        )
    )
    return tmp_path


@pytest.mark.parametrize("command", [("program.py",), ("-m", "minidist", "run", "program.py")])
def test_an_error_names_the_innermost_line_of_the_users_program(folder, command):
    answer = run(folder, sys.executable, *command, "--ranks", "2")
    assert answer.returncode == 1
    assert answer.stderr.startswith("minidist: linear: shapes (4, 7) and (3, 8) do not fit")
    assert "\n  at program.py:9 (--traceback or MINIDIST_TRACEBACK=1" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "minidist/" not in answer.stderr


def test_an_error_of_a_function_of_ours_that_a_world_runs_does_not_name_the_world():
    with pytest.raises(AttributeError) as caught:
        SimWorld(1).run(softmax)
    assert "was called with" not in " ".join(caught.value.__notes__)


def test_an_exception_of_a_script_that_run_runs_has_the_scripts_lines_only(folder):
    (folder / "broken.py").write_text("import os\n\nos.stat('nowhere')\n")
    answer = run(folder, sys.executable, "-m", "minidist", "run", "broken.py")
    assert answer.returncode == 1
    assert answer.stderr.startswith("minidist: the program raised FileNotFoundError: ")
    assert 'broken.py", line 3' in answer.stderr
    assert "minidist/" not in answer.stderr
    assert "runpy" not in answer.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no pipe of POSIX")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [(), ("-m", "minidist", "run"), ("-m", "minidist", "mpi", "--ranks", "2")])
def test_a_reader_that_has_gone_ends_a_program_without_a_word(folder, command, unbuffered):
    """As in `python hello.py | head`, where `head` may end before the first line."""
    (folder / "hello.py").write_text(
        "from mpi4py import MPI\n\nprint('rank', MPI.COMM_WORLD.rank)\n"
        if "mpi" in command
        else "from minidist import launch\n\nlaunch(lambda comm: print('rank', comm.rank), ranks=2)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    program = [sys.executable, *command, "hello.py"]
    ended = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, cwd=folder, env=environment, text=True)
    os.close(writer)
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("call", "note"),
    [
        ("softmax(3)", "minidist's softmax was called with x=3, axis=-1; help(softmax) says what it takes"),
        (
            "Embedding(3, 4, dtype='x')",
            "minidist's Embedding was called with num_embeddings=3, embedding_dim=4, dtype='x'",
        ),
        ("Block(3, 4)", "minidist's Block was called with config=3, dtype=4, attention_fn=a function"),
        ("int('x')", None),
        ("Tensor([1.0]).max('x')", None),  # our own sentence says it
    ],
)
def test_an_error_that_arises_in_minidist_names_the_call_and_its_values(folder, call, note):
    (folder / "call.py").write_text(f"from minidist import *\n\nlaunch(lambda comm: {call}, ranks=2)\n")
    answer = run(folder, sys.executable, "call.py")
    assert answer.returncode
    assert ("was called with" in answer.stderr) == (note is not None)
    assert (note or "") in answer.stderr
    assert "minidist/" not in answer.stderr


def test_a_launch_that_fails_leaves_pythons_own_way_to_print_an_exception(folder):
    (folder / "caught.py").write_text(
        "import sys\nfrom minidist import launch\n\n"
        "try:\n    launch(lambda comm: {}[comm.rank], ranks=2)\nexcept KeyError:\n    pass\n"
        "print(sys.excepthook is sys.__excepthook__)\nlaunch(lambda comm: {}[comm.rank], ranks=2)\n"
    )
    answer = run(folder, sys.executable, "caught.py")
    assert answer.stdout == "True\n"
    assert "KeyError: 0" in answer.stderr
    assert "minidist/" not in answer.stderr


def test_a_line_of_an_installed_package_is_not_the_users():
    assert call_site._classify("/home/a/.local/lib/python3.11/site-packages/typer/main.py") == call_site._OTHER
    assert call_site._classify("/home/a/packages/main.py") == call_site._USER


@pytest.mark.parametrize(("flag", "variable"), [(["--traceback"], "0"), ([], "1")])
def test_the_traceback_comes_when_asked_for(folder, flag, variable):
    answer = run(folder, sys.executable, "program.py", "--ranks", "2", *flag, MINIDIST_TRACEBACK=variable)
    assert answer.returncode == 1
    assert "Traceback (most recent call last)" in answer.stderr
    assert "in forward" in answer.stderr
    assert "minidist/core/autograd/ops/linear.py" in answer.stderr


def test_a_users_schedule_function_that_raises_is_named_with_its_line(folder):
    answer = run(
        folder, sys.executable, "-m", "minidist", "schedule", "mine.py:order", "--stages", "2", "--microbatches", "4"
    )
    assert answer.returncode == 2
    assert "mine.py:order(2, 4) raised IndexError" in answer.stderr
    assert "at mine.py:4 " in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec")
def test_an_error_under_mpiexec_names_the_line(folder):
    answer = run(folder, mpiexec(), "-n", "2", sys.executable, "program.py")
    assert answer.returncode != 0
    assert "linear: shapes (4, 7) and (3, 8) do not fit" in answer.stderr
    assert "at program.py:9 " in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_script_may_keep_no_events(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = {}

    def main(comm):
        all_reduce(comm, np.ones(4))
        kept[comm.rank] = (len(comm.trace.messages), comm.trace.bytes_by_purpose())

    launch(main, argv=["--ranks", "2"])
    with_events = dict(kept)
    launch(main, argv=["--ranks", "2", "--trace", "none"])
    assert [count for count, _ in kept.values()] == [0, 0]
    assert [volume for _, volume in kept.values()] == [volume for _, volume in with_events.values()]
    assert not (tmp_path / "none").exists()


BROKEN = """
import json

from minidist.core.autograd import Tensor
from minidist.comm import launch
from minidist.core.nn import Module


class My(Module):
    def forward(self, x):
        return json.loads("{")  # line 11


def main(comm):
    return My()(Tensor([1.0]))


if __name__ == "__main__":
    launch(main)
"""
STARTS = [("program.py",), ("-m", "minidist", "run", "program.py")]
if mpiexec() is not None:
    STARTS.append((mpiexec(), "-n", "2"))


@pytest.mark.parametrize("start", STARTS)
def test_another_exception_has_the_lines_of_the_user_and_of_other_libraries(tmp_path, start):
    (tmp_path / "program.py").write_text(BROKEN)
    command = (*start, sys.executable, "program.py") if start[0] == mpiexec() else (sys.executable, *start)
    answer = run(tmp_path, *command)
    assert answer.returncode == 1
    assert 'program.py", line 11, in forward' in answer.stderr
    assert "in raw_decode" in answer.stderr
    assert "JSONDecodeError: Expecting property name" in answer.stderr
    assert "of 2 raised" in answer.stderr or "raised on rank 0 of 1" in answer.stderr
    assert "minidist/" not in answer.stderr
    assert "minidist/core/nn/module.py" in run(tmp_path, *command, MINIDIST_TRACEBACK="1").stderr


def test_an_exception_that_minidist_raises_by_accident_says_how_to_see_all(tmp_path):
    (tmp_path / "program.py").write_text(BROKEN.replace('json.loads("{")', "Tensor([1.0]).astype(nothing=1)"))
    answer = run(tmp_path, sys.executable, "program.py")
    assert "TypeError" in answer.stderr
    assert answer.stderr.endswith("(raised inside minidist; --traceback or MINIDIST_TRACEBACK=1 shows the whole way)\n")
    assert "minidist/" not in answer.stderr
