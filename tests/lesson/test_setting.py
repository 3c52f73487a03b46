"""A lesson's picture has a caption that draws it again, and its small job takes what a lesson adds to it."""

import pytest

from minidist import SimWorld, report
from minidist.course.lesson import picture, small_job
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
