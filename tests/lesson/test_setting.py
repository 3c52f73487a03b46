"""A lesson's picture has a caption that draws it again, and its small job takes what a lesson adds to it."""

import subprocess
import sys

import numpy as np
import pytest

from minidist import SimWorld, report
from minidist.base.trace_file import only_steps
from minidist.core.base.trace import track
from minidist.course.lesson import marked_step, memory_of, picture, small_job
from minidist.report import draw


@pytest.fixture
def shown(monkeypatch):
    """The pictures that are shown, by their titles, with what `draw` was given."""
    figures = []
    monkeypatch.setattr(report, "show", figures.append)
    monkeypatch.setattr(report, "draw", lambda *given, **keywords: (draw(*given, **keywords), given[2], keywords))
    return figures


def one_message(comm):
    comm.send_object("a", 1) if comm.rank == 0 else comm.recv_object(0)


def test_the_caption_is_what_the_lesson_says_draws_the_picture(shown):
    world = SimWorld(2)
    world.run(one_message)
    picture("space-time", world, "minidist run hello.py --trace t.jsonl; minidist report t.jsonl", name="two ranks")
    picture("lanes", world.traces, "part 3 of lesson 00", title="one message")
    (first, header, _), (second, other, _) = shown
    assert header["command"] == "minidist run hello.py --trace t.jsonl; minidist report t.jsonl"
    assert first.axes[0].get_title(loc="left").startswith("two ranks: ")
    assert other["command"] == "part 3 of lesson 00"
    assert second.axes[0].get_title(loc="left") == "one message"


def test_the_curves_of_a_loss_have_names(shown):
    curves = {"losses": [3.0, 1.0], "reference_losses": [3.0, 2.0]}
    picture("loss", [], "part 3 of lesson 02b", names=("without", "with"), title="two jobs", **curves)
    ((_, header, keywords),) = shown
    assert keywords == {"names": ("without", "with")}
    assert header["losses"] == [3.0, 1.0]


def test_a_small_job_takes_what_is_added_and_replaced():
    config = small_job(dp=3, zero=2, width=32, steps=2)
    assert (config.dp, config.zero, config.width, config.layers) == (3, 2, 32, 1)


def test_the_memory_of_a_rank_is_counted_and_kept_for_the_picture():
    def program(comm):
        with memory_of(comm) as account:
            array = track(np.zeros(2), "activation")
            del array
        track(np.zeros(9), "activation")  # after it, so it is not counted
        return account.peak

    world = SimWorld(1)
    assert world.run(program) == [16]
    assert [live.get("activation", 0) for _, live in world.traces[0].memory] == [16, 0]


def test_a_marked_step_is_found_in_the_trace():
    def program(comm):
        for number in range(3):
            with marked_step(comm, number):
                comm.compute(seconds=1.0, name="computing")

    world = SimWorld(1)
    world.run(program)
    (second,) = only_steps(world.traces, 1, 2)
    assert sorted((span.name, span.start, span.end) for span in second.spans) == [
        ("computing", 1.0, 2.0),
        ("step 1", 1.0, 2.0),
    ]


def test_a_lesson_that_runs_as_a_script_prints_its_title_and_its_headings(tmp_path):
    source = tmp_path / "90_small.py"
    source.write_text(
        """# # 90 A small lesson
# ## 1 The case
from minidist.course.lesson import picture
def two():
    print("two")
# ## 2 Nothing is printed here
# ## 3 The code
two()
print(input("three? "))
"""
    )
    run = subprocess.run([sys.executable, source], input="3\n", capture_output=True, text=True, check=True)
    assert run.stdout == "90 A small lesson\n\n## 3 The code\n\ntwo\nthree? 3\n"
