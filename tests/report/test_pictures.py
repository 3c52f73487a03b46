"""Pictures are tested by what they contain (an arrow a message, a bar a computation), never by their pixels."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from minidist.base.trace_file import only_steps, read_traces, write_traces
from minidist.base.traces import SpanEvent
from minidist.collectives import gather
from minidist.collectives.closed_forms import volume
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import DeadlockError, UsageError
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import ANY
from minidist.pipeline.schedules import get_schedule
from minidist.pipeline.timing import time_plan
from minidist.report import KINDS, draw, save, write_perfetto
from minidist.report.bytes_matrix import matrix_of
from minidist.report.frame import byte_text
from minidist.report.gantt import gantt
from minidist.report.memory_over_time import memory_over_time
from minidist.report.palette import PALETTE, kind_of
from minidist.report.streams import exposed
from minidist.report.timeline import arrived, merged, pairs, row_label, without
from tests.cases import each

EASY = LinkModel(alpha=1.0, beta=0.0)  # a message takes 1 s


def run(main, ranks, **options):
    world = SimWorld(ranks, **options)
    world.run(main)
    return world.traces


def deadlocked(main, ranks):
    world = SimWorld(ranks, links=EASY)
    with pytest.raises(DeadlockError) as caught:
        world.run(main)
    return world.traces, caught.value


def count(figure):
    """Artists by group id."""
    artists = [artist for axes in figure.axes for artist in axes.get_children()]
    return Counter(artist.get_gid() for artist in artists if artist.get_gid())


def ring(comm):
    comm.compute(seconds=1.0, name="forward")
    all_reduce(comm, np.ones(7))


def test_space_time_has_an_arrow_for_each_message_and_a_line_for_each_rank():
    traces = run(ring, 5)
    figure = draw("space-time", traces)
    assert count(figure)["message"] == sum(len(trace.sent()) for trace in traces) == 5 * 2 * 4
    assert count(figure)["compute"] == 5
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(5)]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # rank 0 on top
    assert figure.legends
    assert any("drawn by" in text.get_text() for text in figure.texts)


def test_the_messages_of_a_bucket_become_one_band_when_there_are_many():
    def main(comm):
        requests = []
        for _ in range(6):
            comm.compute(seconds=10.0, name="backward")
            requests.append(all_reduce(comm, np.ones(8), async_op=True))
        for request in requests:
            request.wait()
        all_reduce(comm, np.ones(4))

    traces = run(main, 4, links=EASY)
    seen = count(figure := draw("space-time", traces))
    assert seen["band"] == 6 * 4  # six buckets on four lines
    assert seen["message"] == sum(m.lane == "main" for trace in traces for m in trace.sent()) == 4 * 6
    bars = [patch for patch in figure.axes[0].patches if patch.get_gid() == "band"]
    # Ring: six messages of a second each, after 10, 20, ... seconds of backward.
    assert sorted({round(bar.get_x()) for bar in bars}) == [10, 20, 30, 40, 50, 60]
    assert {round(bar.get_width()) for bar in bars} == {6}


@pytest.mark.parametrize(("seconds", "squeezed"), [(10.0, False), (1000.0, True)])
def test_the_messages_of_a_single_bucket_are_a_band_where_arrows_would_cover_each_other(seconds, squeezed):
    def main(comm):
        comm.compute(seconds=seconds, name="backward")
        all_reduce(comm, np.ones(8), async_op=True).wait()

    seen = count(draw("space-time", run(main, 4, links=EASY)))
    assert (seen["band"], seen["message"]) == ((4, 0) if squeezed else (0, 4 * 6))


def test_a_bucket_has_no_stripes_of_short_waits():
    """A late rank makes one long wait at the beginning of a bucket, and short ones in it, which are not drawn."""

    def main(comm):
        requests = []
        for _ in range(3):
            comm.compute(seconds=10.0 + 3 * comm.rank, name="backward")
            requests.append(all_reduce(comm, np.ones(64), async_op=True, algorithm="ring"))
        for request in requests:
            request.wait()

    traces = run(main, 4, links=LinkModel(alpha=0.02, beta=0.01))
    figure = draw("space-time", traces)
    axes = figure.axes[0]
    names = {round(y): tick.get_text() for y, tick in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    width = np.ptp(axes.get_xlim())
    red = [
        patch.get_width() / width
        for patch in axes.patches
        if patch.get_gid() == "blocked" and names[round(patch.get_y() + 0.17)] == "its stream"
    ]
    assert count(figure)["band"] == 3 * 4
    assert red
    assert min(red) > 0.015


def test_pieces_of_one_computation_are_one_bar_without_seams():
    def main(comm):
        for name in ("forward", "backward", "backward", "backward"):
            comm.compute(seconds=1.0, name=name)

    bars = [bar for bar in draw("space-time", run(main, 1)).axes[0].patches if bar.get_gid() == "compute"]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 1), (1, 3)]


@each(
    ("lane", "label"),
    [
        ("main", "rank 3"),
        ("lane:world", "its stream"),
        ("lane:world.2dp_pp0_cp0_tp0", "its dp stream"),
        ("lane:world.2dp_pp0_cp0_tp0.2dup", "its dp stream"),
        ("lane:world.4dpxcp_pp0_tp0", "its dpxcp stream"),
        ("lane:mine", "its stream on mine"),
    ],
)
def test_a_line_has_a_short_name(lane, label):
    assert row_label(3, lane) == label


def test_an_arrow_goes_from_departure_to_arrival():
    def main(comm):
        if comm.rank == 0:
            comm.compute(seconds=3.0)
            comm.send(np.ones(1), 1)
        else:
            comm.recv(np.ones(1), 0)

    (arrow,) = [a for a in draw("space-time", run(main, 2, links=EASY)).axes[0].patches if a.get_gid() == "message"]
    tail, head = arrow._posA_posB
    assert tuple(tail) == (3.0, 0)
    assert tuple(head) == (4.0, 1)


def test_red_is_the_time_until_the_partner_comes_and_no_more():
    def main(comm):
        if comm.rank == 0:
            comm.compute(seconds=3.0)
            comm.send(np.ones(1), 1)
        else:
            comm.recv(np.ones(1), 0)

    def bars(traces, gid):
        patches = [p for p in draw("space-time", traces).axes[0].patches if p.get_gid() == gid]
        return sorted((round(p.get_y()), p.get_x(), p.get_x() + p.get_width()) for p in patches)

    traces = run(main, 2, links=EASY)
    assert bars(traces, "blocked") == [(1, 0.0, 3.0)]
    assert bars(traces, "transfer") == [(1, 3.0, 4.0)]

    def late_receiver(comm):
        if comm.rank == 0:
            comm.send(np.ones(1), 1)
        else:
            comm.compute(seconds=5.0)
            comm.recv(np.ones(1), 0)

    traces = run(late_receiver, 2, links=EASY)
    assert bars(traces, "blocked") == [(0, 0.0, 5.0)]  # a synchronous sender waits for the receive
    traces = run(late_receiver, 2, links=EASY, eager_bytes=100)
    assert bars(traces, "blocked") == []  # a buffered one does not

    def slow_wire(comm):  # 8 B take 2 s to leave
        if comm.rank == 0:
            comm.send(np.ones(1), 1)
        else:
            comm.compute(seconds=late)
            comm.recv(np.ones(1), 0)

    late, links = 1.0, LinkModel(alpha=1.0, beta=0.25)
    traces = run(slow_wire, 2, links=links)
    assert bars(traces, "blocked") == [(0, 0.0, 1.0)]
    assert bars(traces, "transfer") == [(0, 1.0, 2.0), (1, 1.0, 3.0)]
    late = 5.0
    assert bars(run(slow_wire, 2, links=links, eager_bytes=100), "blocked") == []


def test_a_deadlock_shows_its_circle():
    def main(comm):
        if comm.rank < 3:
            comm.send(np.ones(2), (comm.rank + 1) % 3)
            comm.recv(np.ones(2), (comm.rank - 1) % 3)
        elif comm.rank == 3:
            comm.recv(np.ones(2), 0)
        else:
            comm.recv(np.ones(2), ANY)

    traces, error = deadlocked(main, 5)
    figure = draw("space-time", traces)
    assert error.cycle == [0, 1, 2]
    assert count(figure)["circle"] == 3
    assert count(figure)["wait"] == 1  # rank 3; a wildcard points at nobody
    assert count(figure)["message"] == 0
    assert count(figure)["blocked"] >= 5
    assert "0 → 1 → 2 → 0" in figure.axes[0].get_title(loc="left")


def test_a_rank_that_waits_for_itself_has_an_arrow_next_to_its_bar():
    traces, _ = deadlocked(lambda comm: comm.send(np.ones(2), comm.rank), 1)
    figure = draw("space-time", traces)
    figure.canvas.draw()
    (arrow,) = (patch for patch in figure.axes[0].patches if patch.get_gid() == "circle")
    (bar,) = (patch for patch in figure.axes[0].patches if patch.get_gid() == "blocked")
    assert arrow.get_window_extent().x1 > bar.get_window_extent().x1 + bar.get_window_extent().height / 2


@each(
    ("nbytes", "text"),
    [(999, "999 B"), (1536, "1,536 B"), (1500, "1.5 kB"), (65_540, "65.54 kB"), (1_750_000, "1.75 MB"), (2e9, "2 GB")],
)
def test_bytes_are_exact_below_ten_thousand_and_have_four_digits_above(nbytes, text):
    assert byte_text(nbytes) == text


def test_a_saved_trace_draws_the_same_deadlock(tmp_path):
    def main(comm):
        comm.recv(np.ones(2), 1 - comm.rank)

    traces, _ = deadlocked(main, 2)
    again, header = read_traces(write_traces(tmp_path / "run.jsonl", traces, command="minidist run x.py"))
    figure = draw("space-time", again, header)
    assert count(figure)["circle"] == 2
    assert any("minidist run x.py" in text.get_text() for text in figure.texts)


def test_messages_of_one_queue_are_paired_in_order_and_collectives_apart():
    def main(comm):
        if comm.rank == 0:
            sends = [comm.isend(np.ones(n), 1) for n in (1, 2, 3)]
            comm.waitall(sends)
        elif comm.rank == 1:
            for n in (1, 2, 3):
                comm.recv(np.ones(n), 0)
        if comm.rank == 0:  # a collective and a message overtake each other: they are in different contexts
            gather(comm, np.ones(4), root=1)
            comm.send(np.ones(5), 1)
        elif comm.rank == 1:
            early = comm.irecv(np.ones(5), 0)
            gather(comm, np.ones(4), root=1)
            early.wait()
        else:
            gather(comm, np.ones(4), root=1)

    for send, receive in pairs(run(main, 3)):
        assert receive.nbytes == send.nbytes
        assert receive.operation == send.operation
        assert receive.end >= send.start >= 0


def test_a_wildcard_receive_finds_its_sender():
    def main(comm):
        if comm.rank == 0:
            for _ in range(3):
                comm.recv(np.ones(1), ANY)
        else:
            comm.send(np.ones(1), 0)

    assert sum(arrived(pair) for pair in pairs(run(main, 4))) == 3


def test_bytes_matrix_sums_to_what_was_sent():
    traces = run(ring, 4)
    matrix = matrix_of(traces)
    assert matrix.sum() == sum(trace.bytes_by_purpose()["user"] for trace in traces)
    assert all(matrix[rank, (rank + 1) % 4] == matrix[rank].sum() > 0 for rank in range(4))
    figure = draw("bytes-matrix", traces)
    numbers = [text for text in figure.axes[0].texts if text.get_text().endswith("B")]
    assert len(numbers) == 4


def test_bytes_by_purpose_puts_the_formula_next_to_the_measurement():
    def main(comm):
        with purpose("gradient_reduce"):
            all_reduce(comm, np.ones(7))
        gather(comm, np.ones(1))

    traces = run(main, 4)
    formula = 8 * sum(volume("all_reduce", "ring", 7, 4, rank).elements for rank in range(4))
    figure = draw("bytes-by-purpose", traces, {"closed_form": {"gradient_reduce": formula}})
    bars = {bar.get_gid(): [] for bar in figure.axes[0].patches}
    for bar in figure.axes[0].patches:
        bars[bar.get_gid()].append(bar.get_width())
    assert bars == {"measured": [formula, 24], "closed_form": [formula]}
    assert "1 of 1" in figure.axes[0].get_title(loc="left")


def test_loss_overlay_has_the_difference_on_its_own_axis():
    header = {"losses": [3.0, 2.0], "reference_losses": [3.0, 2.5], "max_difference": [0.0, 1e-3]}
    figure = draw("loss", [], header)
    left, right = figure.axes
    assert {line.get_gid() for line in left.lines} == {"single", "parallel"}
    assert right.get_yscale() == "log"
    labels = [label.get_text() for label in right.get_yticklabels()]  # no formulas: a picture's text is shown as it is
    assert "1e-03" in labels
    assert "1" in labels
    assert not any("$" in label for label in labels)
    assert right.lines[0].get_ydata()[1] == 1e-3
    assert "1.0e-03" in left.get_title(loc="left")
    del header["max_difference"]
    assert "losses: 5.0e-01" in draw("loss", [], header).axes[0].get_title(loc="left")
    (alone,) = draw("loss", [], {"losses": [1.0, 0.5]}).axes
    (two,) = draw("loss", [], {**header, "quantity": "distance"}, names=("SGD", "Adam")).axes  # which need not be equal
    assert (two.get_ylabel(), two.get_title(loc="left")) == ("distance", "distance of two runs")
    assert list(alone.lines[0].get_ydata()) == [1.0, 0.5]
    with pytest.raises(UsageError, match="needs losses"):
        draw("loss", [], {})


@pytest.mark.parametrize("moving", [True, False])
def test_memory_marks_the_peak(moving):
    traces = run(ring, 2)
    for trace in traces:
        for step, live in enumerate(({"parameter": 10}, {"parameter": 10, "gradient": 25}, {"parameter": 10})):
            trace.memory.append((float(step) if moving else 0.0, live))
    figure = memory_over_time(traces)
    assert len(figure.axes) == 2
    for axes in figure.axes:
        (peak,) = [line for line in axes.lines if line.get_gid() == "peak"]
        assert (peak.get_xdata()[0], peak.get_ydata()[0]) == (1, 35)
        assert len(axes.collections) == 2  # one area a purpose
        assert any("peak 35 B" in text.get_text() for text in axes.texts)


def test_the_parts_of_a_step_are_named_below_an_axis_of_events():
    (trace,) = run(lambda comm: None, 1)
    trace.memory = [(0.0, {"parameter": 10})] * 8
    marks = [(0, "forward"), (3, "backward"), (8, "step")]
    axes = draw("memory", [trace], {"marks": marks}).axes[0]
    names = [label.get_text() for label in axes.get_xticklabels(minor=True)]
    assert names == ["forward", "backward"]  # nothing changes in the step
    assert axes.get_xticks(minor=True).tolist() == [1.5, 5.5]
    assert axes.get_xlabel() == ""


def test_messages_have_the_texts_that_are_given():
    def words(header):
        texts = draw("space-time", run(ring, 2), header).axes[0].texts
        return sorted(text.get_text() for text in texts)

    number = len(words({})) // 2
    assert words({"labels": {0: [f"chunk {i}" for i in range(number)]}})[-number:] == [
        f"chunk {i}" for i in range(number)
    ]


@each("kind", ["gantt", "lanes", "space-time"])
def test_a_colour_that_cannot_be_seen_is_not_in_the_legend(kind):
    def main(comm, seconds):
        comm.compute(seconds=1.0, name="forward")
        comm.compute(seconds=seconds, name="backward")

    def entries(seconds):
        world = SimWorld(1)
        world.run(main, seconds)
        (legend,) = draw(kind, world.traces).legends
        return [text.get_text() for text in legend.get_texts()]

    assert "B full backward" in entries(0.01)
    assert "B full backward" not in entries(0.0001)


def test_a_gantt_shows_the_waits_of_all_streams_of_a_rank():
    def main(comm):
        comm.compute(seconds=1.0 + 3 * comm.rank, name="forward")
        (comm.irecv(np.empty(1), 1) if comm.rank == 0 else comm.isend(np.ones(1), 0)).wait()

    traces = run(main, 2)
    for trace in traces:
        trace.messages[:] = [replace(message, lane="gradients") for message in trace.messages]
    axes = draw("gantt", traces).axes[0]
    (bar,) = (bar for bar in axes.patches if bar.get_gid() == "blocked")
    assert (bar.get_y() + bar.get_height() / 2, bar.get_width()) == (0, pytest.approx(3.0))


def test_a_deadlock_before_any_time_has_passed_has_no_axis_of_time():
    traces, _ = deadlocked(lambda comm: comm.recv(np.ones(2), 1 - comm.rank), 2)
    axes = draw("space-time", traces).axes[0]
    assert (axes.get_xlabel(), len(axes.get_xticks())) == ("", 0)


def test_pictures_of_memory_can_have_one_scale():
    (trace,) = run(lambda comm: None, 1)
    trace.memory = [(0.0, {"parameter": 10}), (1.0, {"parameter": 5})]
    assert draw("memory", [trace]).axes[0].get_ylim()[1] == 12.5
    assert draw("memory", [trace], {"most_bytes": 40}).axes[0].get_ylim()[1] == 50
    assert draw("memory", [trace], {"most_bytes": 4}).axes[0].get_ylim()[1] == 12.5


def test_pictures_of_time_can_have_one_scale():
    traces = run(ring, 2)
    for kind, room in (("space-time", 1.01), ("lanes", 1.0)):
        own, longer, shorter = (draw(kind, traces, {"most_seconds": most}).axes[0] for most in (0, 5e3, 1e-12))
        assert np.ptp(longer.get_xlim()) == pytest.approx(room * 5e3, rel=1e-3)
        assert np.ptp(own.get_xlim()) < 1e3
        assert shorter.get_xlim() == own.get_xlim()


def test_an_area_of_memory_is_where_its_purpose_has_bytes():
    """From the sample with its first byte to the next one without any, on top of the purposes before it."""
    (trace,) = run(lambda comm: None, 1)
    for time, gradient in enumerate((0, 25, 5, 0, 0)):
        trace.memory.append((float(time), {"parameter": 10 + (time > 3), "gradient": gradient}))
    below, above = memory_over_time([trace]).axes[0].collections
    assert below.get_paths()[0].get_extents().bounds == pytest.approx((0, 0, 4, 11))
    (path,) = above.get_paths()
    assert path.get_extents().bounds == pytest.approx((1, 10, 2, 25))
    assert {(x, y) for x, y in path.vertices.tolist()} >= {(1, 35), (2, 35), (2, 15), (3, 15), (3, 10), (1, 10)}


def test_lanes_show_the_link_to_the_host():
    from minidist.parallel import HostPool

    def main(comm):
        pool = HostPool(comm, bandwidth=1e6)
        down = pool.start_store(np.ones(250), "gradient")
        comm.compute(seconds=3e-3, name="forward")
        pool.start_fetch(down.wait(), "parameter").wait()

    world = SimWorld(1)
    world.run(main)
    figure = draw("lanes", world.traces)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["compute", "to host", "to device"]
    assert exposed(world.traces, 0) == pytest.approx(2e-3)  # the way up; the way down is hidden


def test_lanes_show_what_the_host_computes_in_a_row_for_itself():
    from minidist.parallel import HostPool

    def main(comm):
        pool = HostPool(comm, bandwidth=1e6, host_bandwidth=7e6)
        comm.compute(seconds=1e-3, name="backward")
        pool.start_store(np.ones(250), "gradient").wait()
        pool.step_of(2000)

    world = SimWorld(1)
    world.run(main)
    axes = draw("lanes", world.traces).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["compute", "host computes"]
    bars = [bar for bar in axes.patches if bar.get_gid() == "compute"]
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in bars] == [0, 1]


def test_lanes_show_messages_of_two_streams_at_once_in_two_bands():
    def main(comm, twice):
        works = [all_reduce(each_one, np.ones(4), async_op=True) for each_one in [comm.dup(), comm.dup()][: 1 + twice]]
        for work in works:
            work.wait()

    for twice, heights in ((False, [0.6]), (True, [0.3])):
        world = SimWorld(2)
        world.run(main, twice)
        sends = [bar for bar in draw("lanes", world.traces).axes[0].patches if bar.get_gid() == "send"]
        assert {round(bar.get_height(), 6) for bar in sends} == {*heights}
        assert len({round(bar.get_y(), 6) for bar in sends}) == 1 + twice


def test_lanes_tell_messages_of_two_purposes_apart():
    def main(comm, purposes):
        for each_one in purposes:
            with purpose(each_one):
                all_reduce(comm, np.ones(4))

    for purposes, colours in ((["gradient_reduce"], 1), (["gradient_reduce", "parameter_gather"], 2)):
        world = SimWorld(2)
        world.run(main, purposes)
        figure = draw("lanes", world.traces)
        sends = [bar.get_facecolor() for bar in figure.axes[0].patches if bar.get_gid() == "send"]
        assert len(set(sends)) == colours, purposes
        legend = {text.get_text() for text in figure.legends[0].get_texts()}
        assert (set(purposes) <= legend) == (colours == 2), legend


def test_lanes_show_what_overlaps():
    def main(comm):
        work = all_reduce(comm, np.ones(9), async_op=True)
        comm.compute(seconds=3.0, name="B0")
        work.wait()

    traces = run(main, 3, links=EASY)  # 4 steps of 1 s, 3 of them behind the computing
    figure = draw("lanes", traces, rank=1)
    assert count(figure)["compute"] == 1
    assert count(figure)["send"] == count(figure)["receive"] == 4
    assert exposed(traces, 1) == 1.0
    with pytest.raises(UsageError, match=r"ranks are 0\.\.2"):
        draw("lanes", traces, rank=3)


def test_lanes_of_a_later_step_begin_where_it_begins():
    def main(comm):
        for step in range(2):
            began = comm.time()
            comm.compute(seconds=3.0, name="B0")
            comm.trace.add_span(SpanEvent(comm.rank, "main", f"step {step}", began, comm.time(), "step"))

    (second,) = only_steps(run(main, 1), 1, 2)
    axes = draw("lanes", [second]).axes[0]
    assert axes.get_xlim() == (0.0, 3.0)
    assert {(bar.get_x(), bar.get_width()) for bar in axes.patches} == {(0.0, 3.0)}


def test_perfetto_has_a_process_a_rank_three_threads_and_an_arrow_a_message(tmp_path):
    traces = run(ring, 3)
    events = json.loads(write_perfetto(tmp_path / "t.json", traces).read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert names == {(rank, name) for rank in range(3) for name in ("compute", "send", "receive")}
    kinds = Counter(event["ph"] for event in events)
    messages = sum(len(trace.sent()) for trace in traces)
    assert kinds["s"] == kinds["f"] == messages
    assert kinds["X"] == 2 * messages + 3
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    for event in events:
        if event["ph"] == "s":  # a flow begins where a slice begins
            assert "to" in slices[event["pid"], event["tid"], event["ts"]]["name"]
        assert event.get("dur", 0) >= 0


def test_saving_by_suffix_is_reproducible(tmp_path):
    traces = run(ring, 3)
    for suffix in ("svg", "pdf", "png"):
        first, second = (save(draw("space-time", traces), tmp_path / f"{n}.{suffix}").read_bytes() for n in "ab")
        assert first == second
    with pytest.raises(UsageError, match=r"\.svg, \.pdf, \.png"):
        save(draw("space-time", traces), tmp_path / "x.bmp")


def test_every_kind_draws_an_empty_run_and_an_unknown_one_is_named():
    traces = run(lambda comm: None, 2)
    for kind in set(KINDS) - {"loss", "memory", "exponents"}:
        draw(kind, traces)
    with pytest.raises(UsageError, match="no gradient entry to count"):
        draw("exponents", traces)
    with pytest.raises(UsageError, match="recorded no memory"):
        draw("memory", traces)
    with pytest.raises(UsageError, match="did you mean 'space-time'"):
        draw("spacetime", traces)


def test_exponents_are_red_where_float16_has_zero():
    from matplotlib.colors import to_hex

    counts = {"-30": 1, "-26": 2, "-25": 3, "-10": 4, "zero": 7}
    figure = draw("exponents", [], {"gradient_exponents": counts, "loss_scale": 2.0})
    (axes,) = figure.axes
    bars = {patch.get_gid(): patch for patch in axes.patches}
    colours = {name: to_hex(bars[name].get_facecolor()).upper() for name in ("2^-30", "2^-26", "2^-25", "2^-10")}
    assert colours == {"2^-30": PALETTE["blocked"], "2^-26": PALETTE["B"], "2^-25": PALETTE["B"], "2^-10": PALETTE["B"]}
    assert bars["2^-25"].get_height() == 0.3
    assert (bars["normal"].get_x(), bars["normal"].get_width()) == (-15, 30)
    assert "30.0% at scale 1, 10.0% at scale 2" in axes.get_title(loc="left")


def test_intervals():
    assert merged([(3, 4), (0, 1), (1, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert without([(0, 10)], [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    assert without([(2, 3)], [(0, 5)]) == []


def test_colours_of_spans():
    assert [
        kind_of(name) for name in ("F3", "forward", "B", "2B0", "W12", "1RECOMPUTE3", "Backbone", "recompute", "step")
    ] == ["F", "F", "B", "B", "W", "recompute", "compute", "recompute", "compute"]


def test_computing_without_a_name_is_no_forward_pass():
    assert PALETTE[kind_of("fused")] not in {PALETTE[kind] for kind in ("F", "B", "I", "W")}


def test_the_gantt_of_a_run_has_a_shade_for_each_stage_of_a_rank():
    from matplotlib.colors import to_hex

    def main(comm):
        for name in ("0F0", "3F0", "3B0", "0B0"):
            comm.compute(seconds=1.0, name=name)

    bars = [bar for bar in draw("gantt", run(main, 1)).axes[0].patches if bar.get_gid() == "compute"]
    colours = [to_hex(bar.get_facecolor()).upper() for bar in bars]
    assert len(set(colours)) == 4
    assert (colours[0], colours[3]) == (PALETTE["F"], PALETTE["B"])


def test_many_messages_become_one_collection():
    figure = draw("space-time", run(ring, 32))
    assert count(figure)["messages"] == 1
    assert count(figure)["message"] == 0


def test_a_panel_of_schedules_has_the_title_that_is_given():
    timings = [time_plan(get_schedule(name).plan(2, 2), spans=True) for name in ("gpipe", "1f1b")]
    panels = gantt(timings, titles=("one", "other")).axes[::2]  # below each are its strips
    assert [panel.get_title(loc="left") for panel in panels] == ["one", "other"]
