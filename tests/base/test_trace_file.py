"""A trace file is read, or one sentence says which line is wrong; what `--steps` takes of it is exactly those steps."""

import json
import re
from itertools import pairwise

import pytest

from minidist.base.trace_file import only_steps, read_traces, read_unfinished, write_traces
from minidist.base.traces import MessageEvent, SpanEvent, Trace
from minidist.comm.launching import execute
from minidist.commands.app import main
from minidist.core.base.errors import UsageError
from minidist.report.from_file import draw_report
from minidist.report.run_gantt import run_gantt

MESSAGE = MessageEvent(0, "main", "send", 1, 7, 64, "activation", "send", "world", 0.5, 0.5, 0.75)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.jsonl"
    spans = [SpanEvent(0, "main", "F0", 0.0, 0.5), SpanEvent(0, "main", "step 0", 0.0, 1.0, "step")]
    write_traces(path, [Trace(0, 2, [MESSAGE], spans, [(0.0, {"parameter": 8})]), Trace(1, 2)], world="simulated")
    return path


def edited(path, number, **changes):
    """Change fields of a line (numbered from 0)."""
    lines = path.read_text().splitlines()
    record = json.loads(lines[number])
    record.update(changes)
    lines[number] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


def test_a_file_comes_back(file):
    traces, header = read_traces(file)
    assert traces[0].messages == [MESSAGE]
    assert [span.name for span in traces[0].spans] == ["F0", "step 0"]
    assert traces[0].memory == [(0.0, {"parameter": 8})]
    assert (len(traces), header["world"]) == (2, "simulated")


def test_samples_of_memory_come_back(tmp_path):
    """Each as it was, over several events, in a quarter of the bytes; a trace with a line for each is read, too."""
    live, samples = {}, []
    for number in range(2_500):
        name = ("parameter", "activation", "gradient", "communication", "stash")[number % 5]
        live = {**live, name: live.get(name, 0) + (1024 * number if number % 3 else -live.get(name, 0))}
        samples.append((1e-6 * number / 3, live))
    write_traces(tmp_path / "t.jsonl", [Trace(0, 2, memory=samples), Trace(1, 2, memory=samples[:1])])
    traces, header = read_traces(tmp_path / "t.jsonl")
    assert [time for time, _ in traces[0].memory] == [time for time, _ in samples]
    for (_, read), (_, written) in zip(traces[0].memory, samples, strict=True):
        assert {k: v for k, v in read.items() if v} == {k: v for k, v in written.items() if v}
    assert len(traces[1].memory) == 1
    assert "incomplete" not in header
    older = [json.dumps({"event": "memory", "rank": 0, "time": time, "live": live}) for time, live in samples]
    assert 4 * (tmp_path / "t.jsonl").stat().st_size < sum(map(len, older))

    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 3 + 1
    (tmp_path / "t.jsonl").write_text("\n".join([lines[0], *older]) + "\n")
    assert read_traces(tmp_path / "t.jsonl")[0][0].memory == samples


def test_half_a_line_at_the_end_is_left_out(file):
    whole = file.read_text()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        file.write_text(whole[:-1][:-cut])
        traces, header = read_traces(file)
        assert traces[0].messages == [MESSAGE]
        assert traces[0].memory == []
        assert header["incomplete"] == "its file ends after 3 of 4 events"


def test_a_trace_of_which_events_are_missing_says_so(file):
    """Also one that ends with a whole line; the header of an older trace does not count its events."""
    assert "incomplete" not in read_traces(file)[1]
    lines = file.read_text().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        file.write_text("".join(lines[:kept]))
        assert read_traces(file)[1]["incomplete"] == f"its file ends after {kept - 1} of 4 events"
    older = {name: value for name, value in json.loads(lines[0]).items() if name != "events"}
    file.write_text(json.dumps(older) + "\n" + "".join(lines[1:]))
    assert "incomplete" not in read_traces(file)[1]
    file.write_text(json.dumps(older) + "\n" + lines[1][:-9])
    assert read_traces(file)[1]["incomplete"] == "the end of its file is missing"


def test_the_trace_of_a_run_that_failed_is_incomplete(tmp_path):
    def fails(comm):
        comm.barrier()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        execute(fails, ranks=2, trace=str(tmp_path / "t.jsonl"))
    traces, header = read_traces(tmp_path / "t.jsonl")
    assert header["incomplete"] == "the run ended with ValueError"
    assert all(trace.messages for trace in traces)


@pytest.mark.parametrize("suffix", ["svg", "html", "json"])
def test_report_says_that_a_trace_is_incomplete(suffix, file, tmp_path, capsys):
    """On standard error, and on the picture or the page."""
    picture = tmp_path / f"picture.{suffix}"
    words = ["report", str(file), "-o", str(picture), *(["--picture", "perfetto"] if suffix == "json" else [])]
    for is_whole in (True, False):
        with pytest.raises(SystemExit):
            main(words)
        said, drawn = capsys.readouterr().err, picture.read_text()
        assert ("incomplete" in said) is ("incomplete" in drawn) is not is_whole
        file.write_text(file.read_text()[:-20])
    assert "run.jsonl" in said
    assert ": this trace is incomplete: its file ends after 3 of 4 events; the picture shows" in said
    assert "his trace is incomplete: its file ends after 3 of 4 events" in drawn


@pytest.mark.parametrize(
    ("line", "changes", "words"),
    [
        (0, {"format": "other"}, "not a minidist trace"),
        (0, {"ranks": -1}, "ranks is -1"),
        (0, {"ranks": 10**8}, "ranks is 100000000"),
        (0, {"ranks": "2"}, "ranks is '2'"),
        (0, {"events": -1}, "events is -1"),
        (0, {"losses": 3}, "losses is 3"),
        (0, {"losses": ["x"]}, "losses is ['x']"),
        (0, {"mesh": {"dp": 0}}, "mesh is"),
        (0, {"closed_form": {"gradient_reduce": -1}}, "closed_form is"),
        (0, {"bytes_by_purpose": {"a": 1}}, "bytes_by_purpose is"),
        (0, {"gradient_exponents": {"x": 1}}, "gradient_exponents is"),
        (0, {"command": "x" * 100_000}, "command is"),
        (1, {"rank": 2}, "rank 2 is out of range: the run has ranks 0..1"),
        (1, {"rank": -1}, "rank -1 is out of range"),
        (1, {"rank": True}, "rank is True"),
        (1, {"peer": 5}, "peer 5 is out of range"),
        (1, {"nbytes": -4}, "nbytes is -4"),
        (1, {"nbytes": 10**30}, "nbytes is 1000"),
        (1, {"posted": "now"}, "posted is 'now'"),
        (1, {"posted": 1e300}, "posted is 1e+300"),
        (1, {"colour": "red"}, "the field 'colour' is unknown"),
        (1, {"event": "party"}, "event 'party' is not known"),
        (2, {"name": "a\nb"}, "name is 'a\\nb'"),
        (4, {"live": [1]}, "a sample of memory"),
        (4, {"times": [0.0, "x"]}, "the times of the samples of memory are a list"),
        (4, {"times": [0.0, 1.0]}, "the changes of memory are 2 whole numbers of bytes for each name"),
        (4, {"changes": {"parameter": [0.5]}}, "the changes of memory are 1 whole numbers"),
        (4, {"changes": {"parameter": [-8]}}, "sample 0 of memory has less than 0 bytes"),
        (4, {"rank": 9}, "rank 9 is out of range"),
    ],
)
def test_a_wrong_value_is_a_sentence_with_the_line(file, line, changes, words):
    edited(file, line, **changes)
    with pytest.raises(UsageError) as error:
        read_traces(file)
    assert words in str(error.value)
    assert len(str(error.value)) < 400
    assert line == 0 or f"line {line + 1}:" in str(error.value)


def test_a_line_that_is_no_event_is_a_sentence(file):
    whole = file.read_text()
    for bad in ("null", "[1]", "{", "[" * 100_000, '{"event": "span", "rank": 0}', "NaN"):
        file.write_text(whole + bad + "\n")
        with pytest.raises(UsageError, match="line 6: "):
            read_traces(file)


def test_an_empty_file_is_no_trace(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UsageError, match="it is empty"):
        read_traces(tmp_path / "empty.jsonl")


def test_a_trace_that_a_killed_rank_left_is_checked_too(tmp_path):
    line = json.dumps({"event": "message", **{name: getattr(MESSAGE, name) for name in MESSAGE.__slots__}})
    (tmp_path / "rank0.trace.jsonl").write_text(f"{line}\n{line[:20]}")
    (tmp_path / "rank1.trace.jsonl").write_text("")
    (tmp_path / "rank99999999999.trace.jsonl").write_text("")
    (tmp_path / "rankx.trace.jsonl").write_text("")
    traces, header = read_unfinished(tmp_path)
    assert header["incomplete"] == "the job did not end, and its ranks have written no more"
    assert [len(trace.messages) for trace in traces] == [1, 0]
    (tmp_path / "rank1.trace.jsonl").write_text(line.replace('"rank": 0', '"rank": 7') + "\n")
    with pytest.raises(UsageError, match="rank 7 is out of range"):
        read_unfinished(tmp_path)


def test_a_dollar_in_a_file_s_name_is_drawn(file, tmp_path):
    odd = file.rename(tmp_path / "$x^$.jsonl")
    text = draw_report(odd, output=tmp_path / "out.svg").read_text()
    assert "$x^$.jsonl" in text


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_bytes_that_are_not_utf_8_are_drawn_as_question_marks(suffix, file, tmp_path):
    """In the name of the file, and in the command that made it: a page and a picture are UTF-8."""
    odd = file.rename(tmp_path / "caf\udce9.jsonl")
    edited(odd, 0, command="minidist train --data text:\udce9 \ud800")
    text = draw_report(odd, output=tmp_path / f"out.{suffix}").read_text(encoding="utf-8")
    assert "caf?.jsonl" in text
    assert "text:? ?" in text


def steps_file(path):
    """Two ranks; the second rank's steps end later. Events lie on the borders of the steps."""

    def trace(rank, late):
        borders = [0.0, 1.0 + late, 2.0 + late, 3.0 + late]
        spans, messages = [], []
        for step, (start, end) in enumerate(pairwise(borders)):
            spans += [SpanEvent(rank, "main", f"F{step}", start, end - 0.25)]
            spans += [SpanEvent(rank, "main", f"step {step}", start, end, "step")]
            messages += [MessageEvent(rank, "main", "send", 1 - rank, step, 8, "p", "send", "world", start)]
        messages.append(MessageEvent(rank, "main", "send", 1 - rank, 2, 8, "p", "send", "world", borders[-1]))
        return Trace(rank, 2, messages, spans)

    return [trace(0, 0.0), trace(1, 0.5)]


def test_each_step_has_its_own_events_and_no_others():
    """Every event belongs to one step: to the one that begins at its time, at the very end to the last one."""
    traces = steps_file(None)
    for step in range(3):
        for part in only_steps(traces, step, step + 1):
            assert [span.name for span in part.spans] == [f"F{step}", f"step {step}"]
            assert {message.tag for message in part.messages} == {step}
            assert len(part.messages) == 1 + (step == 2)
    together = only_steps(traces, 0, 10**12)
    assert [len(part.messages) for part in together] == [4, 4]
    with pytest.raises(UsageError, match="it has 0:3"):
        only_steps(traces, 3, 4)


def test_every_step_of_a_pipeline_has_the_same_idle_share(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = "train --pp 4 --layers 4 --width 16 --heads 2 --microbatches 8 --global-batch 8 --steps 3 --trace t.jsonl"
    with pytest.raises(SystemExit):
        main(job.split())
    traces, _ = read_traces("t.jsonl")
    computed = []
    for step in range(3):
        parts = only_steps(traces, step, step + 1)
        computed.append([[span.name for span in part.spans if span.category == "compute"] for part in parts])
        assert all(len(names) == 16 for names in computed[-1])
        assert sum(span.category == "step" for part in parts for span in part.spans) == 4
    assert computed[0] == computed[1] == computed[2]

    # The Gantt of a step says the same share; the first step also exchanges shapes, a ten-thousandth of its time.
    titles = [run_gantt(only_steps(traces, step, step + 1)).axes[0].get_title(loc="left") for step in (0, 2)]
    idle = [float(re.search(r"([\d.]+) % of the ranks' time computes nothing", title)[1]) for title in titles]
    assert max(idle) - min(idle) <= 0.1
    assert 100 * 3 / 11 < idle[1] < 60  # more than the bubble of a step, (p-1)/(m+p-1), in which messages take no time
    assert sum(len(only_steps(traces, s, s + 1)[0].messages) for s in range(3)) == len(
        only_steps(traces, 0, 3)[0].messages
    )


@pytest.mark.parametrize("picture", ["space-time", "bytes-matrix"])
def test_a_picture_of_a_hundred_thousand_ranks_is_refused(picture, tmp_path):
    (tmp_path / "many.jsonl").write_text('{"format": "minidist-trace-1", "ranks": 100000}\n')
    with pytest.raises(UsageError, match="of 100,000 ranks cannot be read"):
        draw_report(tmp_path / "many.jsonl", picture, tmp_path / "out.svg")
