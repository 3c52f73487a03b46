"""What judges is out of an answer's reach: cheats get no point and a sentence, and their processes and files go."""

import sys
from pathlib import Path

import pytest

from minidist.course.lesson.judge import Request, judge
from minidist.course.lesson.runner import Limits
from minidist.course.lesson.submission import Source
from tests.lesson.cheats import ALL_REDUCE, CHEATS, ENDLESS, HIDDEN, NAIVE

LIMITS = Limits(memory=1 << 30)
SHORT = Limits(compute_s=0.3, run_s=1.5)  # for answers that do not end


def judged(name, source, limits=LIMITS):
    function = name.partition(".")[2]
    request = Request(name, Source(source, "cheat.py", (function,)), 5, limits=limits, share_nothing=True)
    return judge(request)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIDIST_LESSON_SEED", "5")
    return tmp_path


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_gets_no_point_and_is_told_why(name, here):
    exercise, source, words = CHEATS[name]
    verdict = judged(exercise, source, SHORT if words in ENDLESS else LIMITS)
    assert not verdict.passed
    assert type(verdict.text) is str
    assert len(verdict.text) < 12_000
    assert words in verdict.text, verdict.text
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("name", HIDDEN)
def test_bytes_that_were_sent_cannot_be_hidden(name, here):
    source = NAIVE + f"def ring_all_reduce(comm, array):\n    naive(comm, array)\n    {HIDDEN[name]}"
    request = Request(ALL_REDUCE, Source(source, "cheat.py", ("ring_all_reduce",)), 5, limits=LIMITS, needs_par=False)
    verdict = judge(request)
    assert verdict.passed, verdict.text
    assert verdict.above["bytes"].startswith("3 ranks, 3 elements: most bytes from a rank: par 32 B, yours 48 B")


def test_what_an_answer_has_forked_ends_with_it_and_its_folder_goes(here):
    verdict = judged(
        ALL_REDUCE,
        """
import os, time
def ring_all_reduce(comm, array):
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(60)
    open("left", "w").close()
    raise ValueError(f"{child} {os.getcwd()}")
""",
    )
    child, folder = verdict.text.split("ValueError: ")[1].split(",")[0].split(" ")
    assert not Path(folder).exists()
    assert list(here.iterdir()) == []
    if sys.platform == "linux":
        assert not Path("/proc", child).exists()
