"""The page of a run is whole in one file, and a browser shows it; the export for the viewer keeps its rules."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from minidist.base.trace_file import only_steps, read_traces, write_traces
from minidist.base.traces import MessageEvent, SpanEvent, Trace
from minidist.comm import SimWorld
from minidist.commands.runner import run_comparison, run_training
from minidist.core.base.errors import DeadlockError, UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.report.draw import draw
from minidist.report.from_file import draw_report
from minidist.report.page import page
from minidist.report.perfetto import perfetto
from minidist.report.timeline import without
from tests.cases import each
from tests.report.browser import look, screenshot
from tests.report.perfetto_rules import broken_rules

JOB = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 8, "steps": 2, "data": "markov"}
SECTIONS = (
    "Mesh",
    "Gantt",
    "Space and time",
    "Memory over time",
    "Bytes from rank to rank",
    "Bytes by purpose",
    "Loss",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Traces: a pipeline with two replicas; data parallel next to one device."""
    folder = tmp_path_factory.mktemp("runs")
    mixed = TrainConfig.make(**JOB, pp=2, dp=2, microbatches=4)
    run_training(mixed, None, 60.0, folder / "mixed.jsonl", command="minidist train <&> --pp 2 --dp 2")
    run_comparison(TrainConfig.make(**JOB, dp=3, reduction="ordered"), None, 60.0, trace=folder / "compared.jsonl")
    assert draw_report(folder / "mixed.jsonl", "page") == folder / "mixed.html"  # which the tests read
    return folder


class Reader(HTMLParser):
    """Every tag is closed in its turn; addresses and ids."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.ids, self.problems = [], [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href"):
                self.addresses.append(value)
            elif name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


def test_a_page_is_whole_in_one_file(runs):
    text = (runs / "mixed.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    assert not reader.problems
    assert all(address.startswith(("#", "data:")) for address in reader.addresses), reader.addresses
    assert not re.search(r"<script[^>]* src|import\(|fetch\(|@import", text)
    assert "minidist train &lt;&amp;&gt; --pp 2 --dp 2" in text
    for name in SECTIONS:
        assert f"<h2>{name}</h2>" in text
    targets = [address[1:] for address in reader.addresses if address.startswith("#section")]
    assert len(targets) == len(SECTIONS)
    assert set(targets) <= set(reader.ids)
    assert "url(http" not in text


def test_the_table_says_when_bytes_differ_from_the_closed_form(runs, monkeypatch):
    traces, header = read_traces(runs / "mixed.jsonl")
    assert 'class="different">' not in (runs / "mixed.html").read_text(encoding="utf-8")
    wrong = {**header, "closed_form": {**header["closed_form"], "metrics": 1}}
    monkeypatch.setattr("minidist.report.page._figure", lambda *_: "")  # the table is none, and they take two seconds
    assert page(traces, wrong).count('class="different">') == 1


def test_a_page_of_a_run_without_anything_says_what_is_missing():
    world = SimWorld(2)
    world.run(lambda comm: None)
    text = page(world.traces, {})
    for words in ("Nothing was sent", "no account of memory", "has no losses"):
        assert words in text


def test_a_page_of_a_deadlock_of_many_ranks_says_what_the_first_ones_wait_for():
    world = SimWorld(18)
    with pytest.raises(DeadlockError):
        world.run(lambda comm: comm.recv(np.empty(3), (comm.rank + 1) % comm.size))
    text = page(world.traces, {})
    assert "of the first 16 of 18 ranks" in text
    assert "receive from rank 16, tag 0, 24 B" in text


def test_only_paper_ink_and_grey_differ_between_light_and_dark(runs):
    text = (runs / "mixed.html").read_text(encoding="utf-8")
    assert "filter:" not in text
    assert "data:image/png;base64" not in re.sub(r"<image[^>]*>", "", text)  # every figure is SVG, or has no paper
    for tag in re.findall(r"<(?:path|rect|use|g)[^>]*style=[^>]*>", text):
        assert not re.search(r"(?:fill|stroke): #(?:ffffff|000000|f0f0f0)", tag), tag
    assert re.search(r"<text [^>]*fill: #ffffff", text)  # white on a bar stays white


COLOURS = """
<script>
window.extra = (async () => {
  const shapes = [...document.querySelectorAll("figure path, figure rect, figure text")];
  return {
    paper: getComputedStyle(document.body).backgroundColor,
    fills: [...new Set(shapes.flatMap(s => [getComputedStyle(s).fill, getComputedStyle(s).backgroundColor]))].sort(),
  };
})();
</script>
"""


@pytest.fixture(scope="module")
def seen(runs, tmp_path_factory):
    """What `look` finds on the page: (facts, lines on the console), of a light one."""
    return look(runs / "mixed.html", tmp_path_factory.mktemp("light"), COLOURS)


def test_the_hues_of_the_page_are_the_same_in_both_modes(runs, seen, tmp_path):
    light, dark = seen[0]["extra"], look(runs / "mixed.html", tmp_path, COLOURS, dark=True)[0]["extra"]
    assert (light["paper"], dark["paper"]) == ("rgb(255, 255, 255)", "rgb(27, 27, 29)")

    def hues(colours):
        values = {tuple(int(part) for part in re.findall(r"\d+", colour)[:3]) for colour in colours}
        return {value for value in values if len(value) == 3 and max(value) - min(value) > 20}

    assert len(hues(light["fills"])) >= 6
    assert hues(light["fills"]) == hues(dark["fills"])
    bars = {(68, 119, 170), (34, 136, 51), (204, 51, 17)}  # forward, backward, blocked
    assert bars <= hues(light["fills"])


def test_the_page_in_a_browser(seen):
    """It loads without a word on the console and without the network; every figure has a size and something in it."""
    facts, console = seen
    assert console == []
    assert facts is not None
    assert facts["loaded"] == []
    assert facts["wide"] <= 0  # nothing hangs over the right edge
    figures = {box["id"]: box for box in facts["boxes"]}
    assert {"mesh", "gantt", "space-time", "bytes-matrix", "bytes-by-purpose", "loss"} <= set(figures)
    for box in figures.values():
        assert box["width"] > 250, box
        assert box["height"] > 60, box
        assert box["marks"] > 8, box


def test_a_screenshot_of_a_comparison_is_kept(runs, tmp_path):
    """Where MINIDIST_ARTIFACTS says, or in the test's folder."""
    page_of_both = draw_report(runs / "compared.jsonl", output=tmp_path / "compared.html")
    folder = Path(os.environ.get("MINIDIST_ARTIFACTS", tmp_path))
    target, console = screenshot(page_of_both, tmp_path, folder / "report.png")
    assert console == []
    picture = Image.open(target)
    assert picture.width == 1200
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 50  # not a white page


def test_the_look_at_a_page_sees_an_error_on_its_console(tmp_path):
    path = tmp_path / "bad.html"
    path.write_text(
        "<html><body><figure id='x'><svg width='0'"
        " height='0'></svg></figure><script>nothing.here()</script></body></html>"
    )
    facts, console = look(path, tmp_path)
    assert "ReferenceError" in console[0]
    assert facts["boxes"][0]["width"] == 0


def made(ranks, count):
    """A run of one step in which each rank computes and sends to the next one `count` times."""
    traces = [Trace(rank, ranks) for rank in range(ranks)]
    for trace in traces:
        for number in range(count):
            at = number / count
            trace.spans.append(SpanEvent(trace.rank, "main", f"F{number}", at, at + 0.6 / count))
            for kind, step, long in (("send", 1, 0.3), ("receive", -1, 0.5)):
                peer = (trace.rank + step) % ranks
                event = MessageEvent(trace.rank, "main", kind, peer, number, 100, "user", "message", "world", at, at)
                event.end = at + long / count
                trace.messages.append(event)
            trace.memory.append((at, {"parameter": 100, "activation": number}))
    return traces


def test_a_page_with_much_of_everything_is_below_2_mb():
    text = page(made(4, 800), {"losses": np.random.default_rng(0).random(20_000).tolist()})
    assert len(text.encode()) < 2_000_000
    assert "9,600 messages and computations do not fit" in text
    assert 'id="space-time"' not in text
    assert "data:image/png" in text
    text = page(made(18, 20), {})
    assert len(text.encode()) < 2_000_000
    assert "of the first 16 of 18 ranks" in text
    assert 'id="space-time"' in text


def test_a_phone_shows_the_page_without_a_line_that_hangs_over(tmp_path):
    path = tmp_path / "run.html"
    path.write_text(page(made(2, 20), {"command": "minidist train " + "--option value " * 30}), encoding="utf-8")
    facts, console = look(path, tmp_path, size="500,2000")
    assert console == []
    assert facts["wide"] <= 0
    assert next(box for box in facts["boxes"] if box["id"] == "space-time")["width"] > 300


def test_what_is_left_of_intervals_is_found_in_one_walk():
    pieces = [(float(start), start + 0.5) for start in range(30_000)]
    holes = [(start + 0.25, start + 1.125) for start in range(30_000)]
    assert without(pieces, holes) == [(0.0, 0.25)] + [(start + 0.125, start + 0.25) for start in range(1, 30_000)]


def test_a_page_and_a_picture_are_not_mixed_up(runs):
    trace = runs / "mixed.jsonl"
    with pytest.raises(UsageError, match="--picture lanes contradicts --output"):
        draw_report(trace, "lanes", runs / "x.html")
    with pytest.raises(UsageError, match=r"end the name in \.html"):
        draw_report(trace, "page", runs / "x.svg")


def test_gantt_and_mesh_are_pictures_too(runs):
    assert draw_report(runs / "mixed.jsonl", "gantt", runs / "gantt.svg").read_text().count('id="compute') >= 2 * 4 * 8
    assert "pp 2 x dp 2 = 4 ranks" in draw_report(runs / "mixed.jsonl", "mesh", runs / "mesh.svg").read_text()
    assert "dp 3 = 3 ranks" in draw_report(runs / "compared.jsonl", "mesh", runs / "mesh.svg").read_text()


# --- the viewer's rules ---


@pytest.mark.parametrize("name", ["mixed", "compared"])
def test_the_export_keeps_the_viewers_rules(runs, name):
    traces, _ = read_traces(runs / f"{name}.jsonl")
    assert broken_rules(perfetto(traces)) == []


def test_memory_is_a_counter(tmp_path):
    world = SimWorld(1)
    world.run(lambda comm: comm.trace.memory.append((0.0, {"parameter": 8})))
    document = perfetto(read_traces(write_traces(tmp_path / "t.jsonl", world.traces))[0])
    assert broken_rules(document) == []
    assert [event["args"] for event in document["traceEvents"] if event["ph"] == "C"] == [{"parameter": 8}]


SLICE = {"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 0.0, "dur": 2.0}
NAME = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "send"}}


@each(
    ("events", "words"),
    [
        ([SLICE], "has no name"),
        ([NAME, SLICE, {**SLICE, "ts": 1.0}], "crosses one"),
        ([NAME, {**SLICE, "dur": -1.0}], "duration"),
        ([NAME, SLICE, {"ph": "s", "name": "m", "cat": "c", "id": 1, "pid": 0, "tid": 1, "ts": 1.0}], "not one start"),
        (
            [
                NAME,
                SLICE,
                *({"ph": ph, "name": "m", "cat": "c", "id": 1, "pid": 0, "tid": 1, "ts": 9.0} for ph in "sf"),
            ],
            "no slice around",
        ),
        ([{"ph": "Q", "name": "a", "pid": 0}], "unknown"),
    ],
)
def test_a_broken_rule_is_found(events, words):
    assert any(words in problem for problem in broken_rules({"traceEvents": events}))


def test_the_last_step_of_several_begins_and_ends_at_the_edges_of_its_pictures(runs):
    """Also the wait for gradients after the last computation is drawn, and nothing before the step is."""
    traces, _ = read_traces(runs / "compared.jsonl")
    last = only_steps(traces, 1, 2)
    begin = min(span.start for trace in last for span in trace.spans)
    end = max(message.end for trace in last for message in trace.messages)
    assert begin > 0
    assert end > max(span.end for trace in last for span in trace.spans if span.category == "compute")
    left, right = draw("space-time", last).axes[0].get_xlim()
    factor = 1e6 if right > 10 else 1e3
    assert left == pytest.approx(begin * factor)
    assert right == pytest.approx((begin + 1.01 * (end - begin)) * factor)
    assert draw("gantt", last).axes[0].get_xlim() == (0, pytest.approx((end - begin) * factor))


def test_byte_counts_do_not_lie_on_each_other():
    def main(comm):
        for _ in range(3):  # three quick messages, and one much later
            comm.sendrecv(np.ones(2), 1 - comm.rank, np.ones(2), 1 - comm.rank)
        comm.compute(seconds=1.0)
        comm.sendrecv(np.ones(2), 1 - comm.rank, np.ones(2), 1 - comm.rank)

    world = SimWorld(2)
    world.run(main)
    texts = [text for text in draw("space-time", world.traces).axes[0].texts if text.get_text() == "16 B"]
    assert len(texts) == 4
