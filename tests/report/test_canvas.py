"""The page of a run of any size has space and time, stays below 2 MB, and its script draws what the trace says."""

import json
import re

import numpy as np
import pytest

from minidist.base.traces import MessageEvent, SpanEvent, Trace
from minidist.comm import SimWorld
from minidist.core.base.errors import DeadlockError
from minidist.core.collectives import all_reduce
from minidist.report.canvas import MAX_ITEMS, MAX_LINES, space_and_time
from minidist.report.page import page
from minidist.report.timeline import without
from tests.report.browser import look


def numbers(text):
    """The lines, bars [line, kind, name, start, end] and arrows [from, to, start, end, bytes], in seconds."""
    data = json.loads(re.search(r'id="space-time-data">(.*?)</script>', text, re.DOTALL)[1])
    bars, arrows, now = [], [], 0
    flat = np.array(data["bars"]).reshape(-1, 5).tolist()
    for line, kind, name, step, size in flat:
        now += step
        times = [data["begin"] + data["seconds"] * tick for tick in (now, now + size)]
        bars.append([line, data["kinds"][kind][1], data["names"][name], *times])
    now = 0
    for tail, head, step, size, nbytes in np.array(data["arrows"]).reshape(-1, 5).tolist():
        now += step
        times = [data["begin"] + data["seconds"] * tick for tick in (now, now + size)]
        arrows.append([tail, head, *times, nbytes])
    return data["lines"], bars, arrows


def of_calls(text):
    """The number of arrows of collective calls next to the main streams."""
    return len(json.loads(re.search(r'id="space-time-data">(.*?)</script>', text, re.DOTALL)[1])["of_calls"]) // 5


def said(text):
    return re.search(r'id="space-time-said">(.*?)</p>', text, re.DOTALL)[1]


def made(ranks, steps, count, operation="message"):
    """A run in which each rank computes and sends to the next one `count` times a step."""
    traces = []
    for rank in range(ranks):
        trace = Trace(rank, ranks)
        for step in range(steps):
            for number in range(count):
                at = step + number / count
                trace.spans.append(SpanEvent(rank, "main", f"F{number}", at, at + 0.6 / count))
                for kind, peer, long in (("send", (rank + 1) % ranks, 0.3), ("receive", (rank - 1) % ranks, 0.5)):
                    event = MessageEvent(rank, "main", kind, peer, number // 6, 100, "user", operation, "world", at, at)
                    event.end = at + long / count
                    trace.messages.append(event)
                trace.memory.append((at, {"parameter": 100, "activation": number}))
            trace.spans.append(SpanEvent(rank, "main", f"step {step}", step, step + 1, "step"))
        traces.append(trace)
    return traces


def test_every_bar_and_message_of_a_small_run_is_in_the_numbers():
    def main(comm):
        comm.compute(seconds=1.0 + comm.rank)
        comm.sendrecv(np.ones(2), 1 - comm.rank, np.ones(2), 1 - comm.rank)

    world = SimWorld(2)
    world.run(main)
    text = space_and_time(world.traces)
    lines, bars, arrows = numbers(text)
    assert re.findall(r"</i>(.*?)</span>", text) == ["compute", *dict.fromkeys(bar[1] for bar in bars[2:]), "messages"]
    assert lines == ["rank 0", "rank 1"]
    assert said(text) == ""
    computing = sorted(bar for bar in bars if bar[1] == "compute")
    assert [(bar[0], pytest.approx(bar[3], abs=1e-5), pytest.approx(bar[4], abs=1e-5)) for bar in computing] == [
        (0, 0, 1),
        (1, 0, 2),
    ]
    waited = [bar for bar in bars if bar[1].startswith("blocked")]
    assert [bar[0] for bar in waited] == [0]  # rank 0 waits a second for rank 1
    assert waited[0][3:] == pytest.approx([1, 2], abs=1e-5)
    assert sorted(arrow[:2] + arrow[4:] for arrow in arrows) == [[0, 1, 16], [1, 0, 16]]


@pytest.mark.parametrize(("calls", "many"), [(2, False), (6, True)])
def test_many_messages_beside_the_main_streams_are_bands_too(calls, many):
    """The script draws bands from afar and arrows from near; a few messages are arrows only."""

    def main(comm):
        for request in [all_reduce(comm, np.ones(8), async_op=True, algorithm="ring") for _ in range(calls)]:
            request.wait()
        all_reduce(comm, np.ones(8), algorithm="ring")

    world = SimWorld(4)
    world.run(main)
    text = space_and_time(world.traces)
    _, bars, arrows = numbers(text)
    assert len(arrows) == 24 * (1 if many else 1 + calls)
    assert of_calls(text) == (24 * calls if many else 0)
    assert sum(bar[1] == "messages" for bar in bars) == (4 * calls if many else 0)
    assert f"{24 * (calls + 1)} arrows" in text


def test_after_a_deadlock_each_line_says_what_it_waits_for():
    def main(comm):
        comm.recv(np.empty(1), 1 - comm.rank, 5)

    world = SimWorld(2)
    with pytest.raises(DeadlockError):
        world.run(main)
    _, bars, _ = numbers(space_and_time(world.traces))
    assert [(bar[0], bar[2]) for bar in bars] == [
        (rank, f"receive from rank {1 - rank}, tag 5, 8 B") for rank in (0, 1)
    ]
    assert all(bar[4] > bar[3] for bar in bars)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ((4, 1, 1000), ""),
        ((4, 4, 1000), "the last of 4 steps"),
        ((4, 1, 3600, "all_reduce/ring"), "one band"),
        ((4, 1, 4000), "slices of time"),
        ((MAX_LINES + 30, 1, 3), "30 more are left out"),
    ],
)
def test_any_run_fits_and_what_is_put_together_is_said(run, words):
    text = space_and_time(made(*run), "my.jsonl")
    assert len(text) < 800_000
    assert words in said(text)
    assert bool(said(text)) == bool(words)
    lines, bars, arrows = numbers(text)
    assert len(lines) == min(run[0], MAX_LINES)
    assert 0 < len(bars) + len(arrows) <= MAX_ITEMS
    # The whole width is covered, whatever is put together.
    assert max(bar[4] for bar in bars) == pytest.approx(run[1], abs=0.2)
    assert {bar[0] for bar in bars if bar[1] == "F forward"} == set(range(len(lines)))


def test_a_page_with_much_of_everything_is_below_2_mb():
    losses = np.random.default_rng(0).random(20_000).tolist()
    text = page(made(4, 1, 1100), {"losses": losses})
    assert len(text.encode()) < 2_000_000
    assert 'id="space-time"' in text
    assert "data:image/png" in text


def test_a_name_does_not_end_the_script_and_nothing_is_fetched():
    trace = Trace(0, 1, spans=[SpanEvent(0, "main", "</script><b>", 0.0, 1.0)])
    text = page([trace], {})
    assert "</script><b>" not in text
    assert numbers(text)[1][0][2] == "</script><b>"
    assert "default-src 'none'" in text


def test_what_is_left_of_intervals_is_found_in_one_walk():
    pieces = [(float(start), start + 0.5) for start in range(30_000)]
    holes = [(start + 0.25, start + 1.125) for start in range(30_000)]
    assert without(pieces, holes) == [(0.0, 0.25)] + [(start + 0.125, start + 0.25) for start in range(1, 30_000)]


WHEEL = """
<script>
addEventListener("load", () => {
  const canvas = document.querySelector("#space-time canvas"), box = canvas.getBoundingClientRect();
  const colours = () => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true});
    copy.drawImage(canvas, 0, 0);
    const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
    const counts = {};
    for (let i = 0; i < pixels.length; i += 4)
      if (pixels[i + 3] === 255) { const c = pixels.slice(i, i + 3).join(); counts[c] = (counts[c] || 0) + 1; }
    return counts;
  };
  // A headless browser that only dumps the page draws no frames.
  window.requestAnimationFrame = draw => setTimeout(draw, 1);
  const frame = () => new Promise(done => setTimeout(done, 20));
  const wheel = (deltaY, part) => canvas.dispatchEvent(new WheelEvent("wheel", {deltaY, cancelable: true,
    clientX: box.left + part * box.width, clientY: box.top + 20}));
  window.extra = (async () => {
    const before = colours();
    const scrolls = wheel(300, 0.3);
    for (let i = 0; i < 2; i++) wheel(-300, 0.3);
    await frame();
    const inside = colours();
    for (let i = 0; i < 9; i++) for (const way of ["pointerdown", "pointermove", "pointerup"])
      canvas.dispatchEvent(new PointerEvent(way, {pointerId: 1,
        clientX: box.left + (way === "pointerdown" ? 0.9 : 0.1) * box.width, clientY: box.top + 20}));
    await frame();
    const moved = colours();
    document.querySelector('[data-do="all"]').click();
    await frame();
    return {before, inside, moved, after: colours(), scrolls};
  })();
});
</script>
"""


def test_the_wheel_zooms_dragging_moves_and_all_shows_everything(tmp_path):
    """A run that computes F, then B for a long time: far inside F nothing of B is seen."""
    spans = [SpanEvent(0, "main", "F0", 0.0, 1.0), SpanEvent(0, "main", "B0", 1.0, 2.0)]
    path = tmp_path / "run.html"
    path.write_text(page([Trace(0, 1, spans=spans)], {}), encoding="utf-8")
    facts, console = look(path, tmp_path, WHEEL)
    assert console == []
    seen = facts["extra"]
    forward, backward = "68,119,170", "34,136,51"
    assert seen["before"][forward] > 1000
    assert seen["before"][backward] > 1000
    assert seen["scrolls"] is True  # at the widest view the wheel belongs to the page
    assert seen["inside"][forward] > 1.5 * seen["before"][forward]
    assert backward not in seen["inside"]
    assert seen["moved"][backward] > 1.5 * seen["before"][backward]
    assert forward not in seen["moved"]
    assert seen["after"] == seen["before"]


def test_a_phone_shows_the_page_without_a_line_that_hangs_over(tmp_path):
    path = tmp_path / "run.html"
    path.write_text(page(made(2, 1, 20), {"command": "minidist train " + "--option value " * 30}), encoding="utf-8")
    facts, console = look(path, tmp_path, size="500,2000")
    assert console == []
    assert facts["wide"] <= 0
    assert next(box for box in facts["boxes"] if box["id"] == "space-time")["width"] > 300
