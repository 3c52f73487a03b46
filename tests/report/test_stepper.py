"""The stepper: what it keeps of a run, and the page, which a browser plays from the first step to the last."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_gather, all_reduce, reduce_scatter
from minidist.pipeline.schedules import get_schedule
from minidist.pipeline.timing import time_plan
from minidist.report import stepper
from minidist.report.gantt import as_traces
from minidist.report.stepper import show, step
from tests.report.browser import look


def ring(comm):
    x = np.arange(8.0) + 10 * comm.rank
    all_reduce(comm, x, algorithm="ring")


def one_f_one_b():
    return time_plan(get_schedule("1f1b").plan(4, 8), spans=True)


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def held(array, count):
    """The values after `count` steps."""
    return [values for step, values in array["changes"] if step < count][-1]


def test_every_message_is_a_step_and_each_step_shows_what_it_has_changed():
    data = data_of(show(step(ring, 4)).page)
    assert [len(row) for row in data["arrays"]] == [1] * 4  # not the buffers in which the ring receives
    assert len(data["steps"]) == 2 * 3 * 4

    # Replayed by hand: in the first half a chunk is added to the receiver's, in the second it replaces it.
    values = [[f"{float(i + 10 * rank):.4g}" for i in range(8)] for rank in range(4)]
    for number, one in enumerate(data["steps"]):
        _, first, stop = one["source"]
        for i in range(first, stop):
            sent, there = float(values[one["from"]][i]), float(values[one["to"]][i])
            values[one["to"]][i] = f"{sent + (there if number < 12 else 0):.4g}"
        for rank in range(4):
            assert held(data["arrays"][rank][0], number + 1) == values[rank], (number, rank)
    assert all(row == [f"{60.0 + 4 * i:.4g}" for i in range(8)] for row in values)


def test_a_change_after_a_send_belongs_to_that_message():
    def main(comm):
        x = np.array([1.0, 2.0])
        for _ in range(2):
            if comm.rank == 0:
                comm.send(x, 1)
                x += 10
            else:
                comm.recv(x, 0)

    data = data_of(show(step(main, 2)).page)
    assert data["arrays"][0][0]["changes"] == [[-1, ["1", "2"]], [0, ["11", "12"]], [1, ["21", "22"]]]
    assert data["arrays"][1][0]["changes"] == [[-1, ["", ""]], [0, ["1", "2"]], [1, ["11", "12"]]]


def test_what_a_rank_writes_is_not_shown_before_the_message_after_which_it_is_known():
    def main(comm):
        total, incoming = np.full(1, 1.0 + comm.rank), np.empty(1)
        if comm.rank > 0:
            comm.send(total, 0)
            return
        for source in (1, 2):
            comm.recv(incoming, source)
            total += incoming
        twice = 2 * total
        comm.send(twice, 3)

    def last(comm):
        main(comm) if comm.rank < 3 else comm.recv(np.empty(1), 0)

    data = data_of(show(step(last, 4)).page)
    rows = {array["about"]: array["changes"] for array in data["arrays"][0]}
    assert rows["incoming"] == [[-1, [""]], [0, ["2"]], [1, ["3"]]]
    assert rows["twice"] == [[-1, [""]], [1, ["12"]]]
    assert [array["about"] for array in data["arrays"][3]] == ["float64[1]"]  # an array without a name

    # A sum is in an array that only its sums are sent from: it is known from the beginning, as its name is.
    def sums(comm):
        total, incoming = np.full(1, 1.0), np.empty(1)
        if comm.rank == 0:
            comm.recv(incoming, 1)
            total += incoming
            comm.send(total, 1)
        else:
            comm.send(total, 0)
            comm.recv(total, 0)

    data = data_of(show(step(sums, 2)).page)
    rows = {array["about"]: array["changes"] for array in data["arrays"][0]}
    assert rows["total"] == [[-1, ["1"]], [0, ["2"]]]

    # An array without a name that the program gives to a collective is there before its first message too.
    data = data_of(show(step(lambda comm: all_reduce(comm, np.ones(2), algorithm="ordered"), 3)).page)
    assert [row[0]["changes"][0] for row in data["arrays"]] == [[-1, ["1", "1"]]] * 3


def test_what_a_new_buffer_holds_before_its_first_message_is_empty_and_not_what_was_in_memory():
    def main(comm):
        part = np.full(2, 77.0)
        reduce_scatter(comm, np.ones(8), out=part)
        all_gather(comm, part)

    arrays = [array for row in data_of(show(step(main, 4)).page)["arrays"] for array in row]
    first = [array["changes"][0] for array in arrays]
    assert [-1, ["", ""]] in first
    assert not any("77" in values for _, values in first)


def test_a_part_of_an_array_belongs_to_it_and_a_large_one_is_not_kept():
    def main(comm):
        whole, large = np.zeros((2, 3)), np.zeros(65)
        if comm.rank == 0:
            comm.send(np.ones(3), 1)
            comm.send(large, 1)
        else:
            comm.recv(whole[1], 0)
            comm.recv(large, 0)

    data = data_of(show(step(main, 2)).page)
    assert [one["target"] for one in data["steps"]] == [[0, 3, 6], None]
    assert [array["about"] for array in data["arrays"][1]] == ["whole"]


def test_a_schedule_and_a_plain_run_have_pages_too_and_nothing_is_refused():
    data = data_of(show(as_traces(one_f_one_b())).page)
    assert len(data["spans"]) == 2 * 4 * 8
    assert data["steps"][0] == {"time": 0.0}
    world = SimWorld(3)
    world.run(ring)
    assert len(data_of(show(world).page)["steps"]) == 2 * 2 * 3
    empty = SimWorld(2)
    empty.run(lambda comm: None)
    with pytest.raises(UsageError, match="nothing to step through"):
        show(empty)


def test_a_long_run_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(stepper, "MAX_STEPS", 5)
    made = show(step(ring, 4), "A <ring>.")
    assert "A &lt;ring&gt;. Drawn are the first 5 of 24 messages." in made.page
    assert len(data_of(made.page)["steps"]) == 5
    assert "&lt;!doctype html&gt;" in made._repr_html_()


def test_the_steps_as_a_moving_picture(tmp_path):
    for name, run, frames in (("ring", step(ring, 4), 25), ("plan", as_traces(one_f_one_b()), 31)):
        path = show(run).write(tmp_path / f"{name}.gif")
        with Image.open(path) as picture:
            assert (picture.n_frames, picture.size[0]) == (frames, 900), name
            picture.seek(1)
            first = picture.convert("RGB").tobytes()
            picture.seek(frames - 1)
            assert picture.convert("RGB").tobytes() != first, name


PLAY = """<script>
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const said = () => document.querySelector(".said").textContent;
const facts = [said()];
press("ArrowRight"); facts.push(said(), document.querySelectorAll("rect.new").length);
press("End"); facts.push(said().slice(0, 16)); press("Home"); press(" ");
window.extra = new Promise(done => setTimeout(() => done([...facts, said().slice(0, 9)]), 1000));
</script>"""


def test_a_browser_plays_the_page(tmp_path):
    page = show(step(ring, 4)).write(tmp_path / "steps.html")
    assert page.stat().st_size < 300_000
    facts, console = look(page, tmp_path, PLAY)
    before, first, marked, last, played = facts["extra"]
    assert before.startswith("Before the first of 24 steps")
    assert re.match(r"Step 1 of 24: rank \d sends elements \d to \d, 16 B to rank \d \(all_reduce/ring\)", first)
    assert (marked, last, played) == (2, "Step 24 of 24: r", "Step 1 of")
    assert facts["wide"] == 0
    assert facts["loaded"] == []
    assert console == []


LABELS = """
<script>
const height = node => node.getBoundingClientRect().top, labels = [...document.querySelectorAll("text.faint")];
const cells = [...document.querySelectorAll("rect.cell")].map(height);
window.extra = labels.map(label => Math.min(...cells.map(cell => Math.abs(cell - height(label)))));
</script>"""


def test_the_names_of_further_arrays_stand_next_to_their_cells(tmp_path):
    def exchange(comm):
        kept, incoming = np.arange(2.0) + comm.rank, np.zeros(2)
        comm.sendrecv(kept, 1 - comm.rank, incoming, 1 - comm.rank)

    facts, _ = look(show(step(exchange, 2)).write(tmp_path / "steps.html"), tmp_path, LABELS)
    first, second, *_ = facts["extra"]
    assert first > 15  # below the name of the rank, which is next to the cells
    assert second < 8
