"""`minidist grade`: points, limits, shared memory named, Gradescope's file, exit codes, a leaderboard."""

import inspect
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidist import cli
from minidist.commands.command import Exit
from minidist.commands.grade import grade as grade_command
from minidist.core.base.errors import UsageError
from minidist.course.lesson import solution
from minidist.course.lesson.catalogue import find
from minidist.course.lesson.grade import exercises_of, grade
from minidist.course.lesson.runner import Limits
from minidist.course.lesson.submission import read, source_of
from tests.cases import each

ROOT = Path(__file__).resolve().parents[2]
RING = """
import numpy as np
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.comm import Comm

""" + inspect.getsource(solution("04.ring_all_reduce"))

# Right, but rank 0 receives everything.
BOSS = """
def ring_all_reduce(comm, array):
    if comm.rank > 0:
        comm.send(array, 0)
        comm.recv(array, 0)
        return
    for other in range(1, comm.size):
        part = np.empty_like(array)
        comm.recv(part, other)
        array += part
    for other in range(1, comm.size):
        comm.send(array, other)
"""

# Sends what a sum needs, and communicates through a list.
CHEAT = """
board = []
calls = 0

def ring_all_reduce(comm, array):
    global calls
    calls += 0
    for _ in range(2 * (comm.size > 1)):
        comm.sendrecv(array, (comm.rank + 1) % comm.size, np.empty_like(array), (comm.rank - 1) % comm.size)
    board.append(array.copy())
    comm.barrier()
    parts = board[-comm.size :]
    comm.barrier()
    array[...] = np.sum(parts, axis=0)
"""


def written(tmp_path, text, name="answer.py"):
    path = tmp_path / name
    path.write_text(text)
    return path


def items(result):
    return {item.name: (item.score, item.most) for item in result.items}


def test_our_solution_gets_every_point(tmp_path):
    result = grade(written(tmp_path, RING), "04", 5)
    assert result.score == result.most == 10
    assert items(result)["04.ring_all_reduce: virtual time within par"] == (2, 2)
    assert "10 of 10 points (04, seed 5)" in result.text()


def test_a_right_answer_above_par_loses_the_points_of_par(tmp_path):
    result = grade(written(tmp_path, RING + BOSS), "04.ring_all_reduce", 5)
    assert items(result) == {
        "04.ring_all_reduce: right": (6, 6),
        "04.ring_all_reduce: bytes within par": (0, 2),
        "04.ring_all_reduce: virtual time within par": (0, 2),
    }
    assert "most bytes from a rank: par" in result.text()


def test_a_global_list_that_communicates_is_named(tmp_path):
    result = grade(written(tmp_path, RING + CHEAT), "04.ring_all_reduce", 5)
    assert result.score == 0
    assert "ranks communicate through 'board', which they share in one process only" in result.text()
    assert "share nothing but messages" in result.text()


def test_an_exercise_without_messages_has_its_points_in_one_line(tmp_path):
    result = grade(written(tmp_path, inspect.getsource(solution("16.gpipe"))), "16.gpipe", 5)
    assert items(result) == {"16.gpipe: right": (10, 10)}


def test_only_what_a_function_needs_of_a_notebook_is_run(tmp_path):
    cells = [
        "%matplotlib inline\nimport sys",
        "START = 0\nNAMES = {}\nNAMES['F'] = 'F'\nunused = 1 / 0",
        "def forward(i):\n    return NAMES['F'] + str(i + START)",
        "sys.exit('this cell is not needed')\n!ls",
        "def mine(p, m):\n"
        "    return [[forward(i) for i in range(m)] + [f'B{i}' for i in reversed(range(m))] for _ in range(p)]",
        "check('16.gpipe', mine)\nraise SystemExit",
        "def a_mistake(p, m):\n    return []",
        "check('16.gpipe', a_mistake)",
    ]
    notebook = {"cells": [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]}
    path = written(tmp_path, json.dumps(notebook), "answer.ipynb")
    assert grade(path, "16.gpipe", 5).score == 10
    text = source_of(find("16.gpipe"), path, read(path)).text
    assert "NAMES['F'] = 'F'" in text
    assert "unused" not in text
    assert "a_mistake" not in text


def test_a_submission_may_check_its_function_by_a_name_that_the_exercise_had_before(tmp_path):
    text = inspect.getsource(solution("20c.min_max_split")).replace("def min_max_split", "def cut")
    path = written(tmp_path, "from typing import Sequence\n" + text + "\ncheck('20b.min_max_split', cut)\n")
    assert grade(path, "20b.min_max_split", 5).score == grade(path, "20c.min_max_split", 5).score == 10


@each(
    ("text", "message"),
    [
        ("def gpipe(p, m):\n    while True: pass", "computed for more than"),
        ("x = 1 / 0\ndef gpipe(p, m):\n    return x", "cannot be loaded"),
        ("def pipeline(p, m):\n    return []", "defines no gpipe()"),
    ],
)
def test_limits_and_errors_are_zero_points_and_a_sentence(tmp_path, text, message):
    result = grade(written(tmp_path, text), "16.gpipe", 5, Limits(compute_s=0.3, run_s=5.0, memory=1 << 28))
    assert result.score == 0
    assert message in result.text()


def test_a_function_whose_result_is_dropped_must_have_run(tmp_path):
    text = "def myAllreduce(comm, source, dest, op):\n    dest[:] = source\n    yield\n"
    result = grade(written(tmp_path, text), "cse234.myAllreduce", 5)
    assert "myAllreduce returned a generator, so none of its lines has run; remove `yield`" in result.text()


def test_messages_are_limited(tmp_path):
    text = """
def ring_all_reduce(comm, array):
    while comm.size > 1:
        comm.sendrecv(array.copy(), (comm.rank + 1) % comm.size, array, (comm.rank - 1) % comm.size)
"""
    result = grade(written(tmp_path, text), "04.ring_all_reduce", 5, Limits(messages=2))
    assert "EndlessError: stopped after" in result.text()


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"must be a \.py or \.ipynb file"):
        grade(written(tmp_path, "", "a.txt"), "16.gpipe", 5)


@each(
    ("name", "text", "message"),
    [
        ("a.ipynb", "{}", "'a.ipynb' is not a notebook; save it again"),
        ("a.ipynb", '{"cells": [', "'a.ipynb' is not a notebook; save it again"),
        ("a.py", "x = 1\ndef f(:", "a.py, line 2 of its code: invalid syntax; it must be Python"),
        ("a.py", "def gpipe(p, m):\nreturn 1", "a.py, line 2 of its code: expected an indented block"),
        ("a.py", "x = " + "(" * 500, "a.py, line 1 of its code: too many nested parentheses"),
        ("a.py", "def gpipe(p, m):\n    return " + "-" * 20_000 + "1", "a.py"),
        ("a.py", "\0", "a.py"),
    ],
)
def test_what_cannot_be_read_is_zero_points_with_a_sentence(tmp_path, monkeypatch, minidist, name, text, message):
    monkeypatch.chdir(tmp_path)
    assert "Traceback" not in "".join(
        minidist("grade", written(tmp_path, text, name), "--assignment", "16", "--json", "r.json", code=1)
    )
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["score"] == 0
    assert [test["max_score"] for test in results["tests"]] == [10]
    assert message in results["tests"][0]["output"]


def test_an_unknown_assignment_names_those_there_are():
    with pytest.raises(UsageError, match=r"no assignment 'cs337' \(did you mean 'cs336'\?\); there are 00, 00b"):
        exercises_of("cs337")
    assert [exercise.name for exercise in exercises_of("04")] == ["04.ring_all_reduce"]


def test_the_command_writes_gradescopes_file_and_ranks_several(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["grade", *map(str, arguments)])
        return ended.value.code or 0, *capsys.readouterr()

    good, slow = written(tmp_path, RING, "good.py"), written(tmp_path, RING + BOSS, "slow.py")
    common = ("--assignment", "04.ring_all_reduce", "--seed", 7, "--json")
    code, out, err = command(good, *common, "good.json")
    assert code == 0, err
    assert "10 of 10 points" in out
    assert command(slow, *common, "slow.json")[0] == 1
    results = json.loads((tmp_path / "slow.json").read_text())
    assert results["score"] == sum(test["score"] for test in results["tests"]) == 6
    assert [test["status"] for test in results["tests"]] == ["passed", "failed", "failed"]
    assert {"name", "score", "max_score", "output"} <= set(results["tests"][0])

    _, table, _ = command("--leaderboard", "slow.json", "good.json", "--json", "all.json")
    assert table.index("good.py") < table.index("slow.py")
    assert json.loads((tmp_path / "all.json").read_text())[0]["submission"] == "good.py"

    (tmp_path / "other.json").write_text(json.dumps({**results, "extra_data": {**results["extra_data"], "seed": 8}}))
    for arguments, message in (
        ((good,), "--assignment is missing"),
        (("missing.py", "--assignment", "04"), "missing.py"),
        (("--leaderboard", good), "is not a results.json"),
        (("--leaderboard", "slow.json", "other.json"), "with seed 8"),
    ):
        code, _, err = command(*arguments)
        assert code == 2, arguments
        assert message in err
        assert "Traceback" not in err


def test_a_class_is_graded_by_one_command(tmp_path, capsys):
    (tmp_path / "a.py").write_text(inspect.getsource(solution("17.one_f_one_b")))
    (tmp_path / "b.py").write_text("def one_f_one_b(p, m):\n    return []\n")
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    with pytest.raises(Exit) as end:
        grade_command(files, "17", 5, tmp_path / "results", 30.0, 1024, 100, False)
    assert end.value.exit_code == 1
    scores = {path.stem: json.loads(path.read_text())["score"] for path in (tmp_path / "results").iterdir()}
    assert scores == {"a": 10.0, "b": 0.0}
    assert re.search(r"  1  a\.py +10 .*\n  2  b\.py +0 ", capsys.readouterr().out)
    (tmp_path / "c").mkdir()
    with pytest.raises(UsageError, match="two submissions are called 'a'"):
        grade_command([*files, tmp_path / "c" / "a.py"], "17", 5, tmp_path / "results", 30.0, 1024, 100, False)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_grade_that_is_ended_leaves_no_process_and_zero_points(tmp_path, end):
    # The answer ignores what it can, and starts a process; each has its number in a file of the test's folder.
    answer = written(
        tmp_path,
        f"""
import os, signal, time
def gpipe(p, m):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.fork()
    open(os.path.join({str(tmp_path)!r}, f"{{os.getpid()}}.pid"), "w").close()
    time.sleep(60)
""",
    )
    command = [sys.executable, "-m", "minidist", "grade", str(answer), "--assignment", "16.gpipe", "--json", "r.json"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until = time.monotonic() + 30
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(end)
    process.communicate(timeout=10)  # whose pipe no process of the answer holds
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(Path("/proc", str(pid)).exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path("/proc", str(pid)).exists()]
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["score"] == 0
    assert "the process that grades was ended before it was done" in results["tests"][0]["output"]


def test_an_answer_that_ends_the_process_that_started_it_gets_a_file_and_the_next_exercise_its_points(tmp_path):
    text = """
import numpy as np

def save(disk, name, parts):
    import os, time
    open("here", "w").close()
    os.kill(os.getppid(), 9)
    time.sleep(60)

def load(comm, size, pieces, read):
    edges = [len(part) for part in np.array_split(np.arange(size), comm.size)]
    start = sum(edges[: comm.rank])
    mine = np.empty(edges[comm.rank])
    for number, (first, last) in enumerate(pieces):
        begin, end = max(first, start), min(last, start + mine.size)
        if begin < end:
            mine[begin - start : end - start] = read(number)[begin - first : end - first]
    return mine
"""
    command = [sys.executable, "-m", "minidist", "grade", str(written(tmp_path, text)), "--assignment", "26"]
    done = subprocess.run([*command, "--json", "r.json"], capture_output=True, text=True, cwd=tmp_path)
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["score"] == 10, done.stdout
    assert "the process that ran the function ended" in results["tests"][0]["output"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer.py", "r.json"]


def test_of_a_lesson_the_readers_function_is_graded_and_not_the_mistake_that_it_shows():
    path = ROOT / "lessons" / "04_all_reduce_without_a_boss.py"
    assert source_of(find("04.ring_all_reduce"), path, read(path)).functions == ("ring_all_reduce",)
