"""`minidist schedule` and `minidist partition`: what other programs read, and one sentence for wrong input."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as xml

import pytest

from minidist.pipeline.schedules import from_csv, get_schedule, schedules
from minidist.pipeline.timing import time_plan
from minidist.pipeline.validate import validate
from minidist.report.gantt import alive, gantt, text_gantt
from minidist.report.version_gantt import kept, version_gantt, versions_seen


@pytest.fixture
def call(minidist, monkeypatch, tmp_path):
    """`minidist` in an empty folder, where lines have 90 characters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(sys, "argv", ["minidist"])
    return minidist


def test_json_has_the_promised_keys(call):
    out = call("schedule", "1f1b", "--stages", 4, "--microbatches", 8, "--format", "json").out
    result = json.loads(out)
    assert result["orders"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert (result["makespan"], result["cost"], result["idle"]) == (33, 33, [9, 6, 3, 0])
    assert (result["bubble_of_ideal"], result["bubble_of_total"]) == (3 / 8, 3 / 11)
    assert (result["peak"], result["weight_versions"]) == ([4, 3, 2, 1], [1, 1, 1, 1])
    assert call("schedule", "1f1b", "--stages", 4, "--microbatches", 8, "--json").out == out


def test_several_side_by_side(call):
    out = call("schedule", "1f1b", "zb-h1", "--stages", 2, "--microbatches", 2, "--format", "json").out
    assert [entry["name"] for entry in json.loads(out)["schedules"]] == ["1f1b", "zb-h1"]
    out = call("schedule", "1f1b", "zb-h2", "--stages", 4, "--microbatches", 8).out
    assert "worst idle" in out
    assert max(map(len, out.splitlines())) <= 90


def test_schedules_with_chunks_are_compared_by_the_work_of_a_rank(call, tmp_path):
    """A stage of ZB-V is half of a rank's model, so it takes half the time and holds half as much."""
    (tmp_path / "mine.py").write_text(
        "from minidist.pipeline.schedules import get_schedule\ndef f(p, m): return get_schedule('zb-v').plan(p, m)\n"
    )
    out = call("schedule", "1f1b", "zb-v", "mine.py:f", "--stages", 4, "--microbatches", 8).out
    rows = [line.split() for line in out.splitlines()]
    figures = [(row[0], float(row[1]), row[-4:]) for row in rows if len(row) == 10 and row[-4].isdigit()]
    assert figures == [
        ("1f1b", 33, ["4", "3", "2", "1"]),
        ("zb-v", 25.5, ["4", "4", "4", "4"]),
        ("zb-v", 25.5, ["4", "4", "4", "4"]),
    ]
    assert "divided by the stages of a rank: zb-v 2, zb-v 2" in out

    # Alone, a schedule is timed in its own stages.
    assert json.loads(call("schedule", "zb-v", "--stages", 4, "--microbatches", 8, "--json").out)["makespan"] == 51


def test_text_fits_and_shows_every_rank(call):
    for stages, microbatches in ((4, 8), (3, 100), (100, 3)):
        out = call("schedule", "1f1b", "--stages", stages, "--microbatches", microbatches).out
        assert max(map(len, out.splitlines())) <= 90
        assert f"rank {stages - 1}" in out
        assert len(out.splitlines()) < 50
    timing = time_plan(get_schedule("gpipe").plan(2, 2), spans=True)
    assert text_gantt(timing, 80) == (
        "gpipe, 2 ranks, 2 micro-batches: bubble 50.0 % of ideal, 33.3 % of total\n"
        "rank 0 F0-F1-         B1----B0----\n"
        "rank 1    F0-F1-B1----B0----\n"
        "idle 3 0 | makespan 9 | cost 9 | lower bound 7\npeak 2 2 micro-batch activations\n"
    )


def test_a_file_has_whole_lines_and_every_label(call, tmp_path):
    """A file is as wide as the picture needs, whatever the terminal; in a pipe there is no terminal."""
    flags = ("schedule", "1f1b", "--stages", "16", "--microbatches", "64")
    call(*flags, "-o", "wide.txt")
    program = [sys.executable, "-m", "minidist", *flags]
    free = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    for text in (
        (tmp_path / "wide.txt").read_text(),
        subprocess.run(program, env=free, capture_output=True, text=True, check=True).stdout,
    ):
        assert all(f"F{number}" in text for number in range(64))
        assert "| lower bound 207\n" in text
        assert text.endswith("| weight versions 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1\n")


def test_csv_comes_back_as_the_same_plan(call, tmp_path):
    out = call("schedule", "zb-v", "--stages", 2, "--microbatches", 4, "--format", "csv", "--lowered").out
    assert "RECV_F" in out
    (tmp_path / "my.csv").write_text(out)
    assert call("schedule", "my.csv", "--format", "csv").out == out
    assert from_csv(out).stages == 4


def test_a_users_function(call, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def plan(p, m):\n    return [[f'{s}{k}{i}' for i in range(m) for k in 'FB'] for s in range(p)]\n"
    )
    mine = json.loads(call("schedule", "mine.py:plan", "--stages", 3, "--microbatches", 2, "--format", "json").out)
    naive = json.loads(call("schedule", "naive", "--stages", 3, "--microbatches", 2, "--format", "json").out)
    assert mine["orders"] == naive["orders"]
    assert mine["idle"] == naive["idle"]


@pytest.mark.parametrize("name", ["zb-v", "interleaved", "dualpipe"])
def test_the_picture_has_a_shade_for_each_chunk_and_a_number_in_each_bar(name):
    timing = time_plan(get_schedule(name).plan(4, 12), spans=True)
    figure = gantt([timing])
    axes = figure.axes[0]
    colours = {}
    for bar in axes.patches:
        if (bar.get_gid() or "")[:1].isdigit() and "F" in bar.get_gid():  # two at once stand in brackets
            rank, stage = round(bar.get_y() + bar.get_height() / 2), int(bar.get_gid().partition("F")[0])
            colours.setdefault((rank, stage), set()).add(bar.get_facecolor())
    for rank in range(4):
        shades = [colours[key] for key in sorted(colours) if key[0] == rank]
        assert len(shades) == 2
        assert all(len(shade) == 1 for shade in shades)
        assert shades[0] != shades[1]
    numbers = sorted(int(text.get_text()) for text in axes.texts)
    assert len(numbers) == sum(bool(bar.get_gid()) for bar in axes.patches)
    assert numbers[-1] == 11
    assert any("lighter" in text.get_text() for text in figure.legends[0].get_texts())


def test_svg_has_numbers_bubble_and_legend(call, tmp_path):
    words = ["schedule", "zb-h1", "dualpipe", "--stages", 4, "--microbatches", 8, "--format", "svg", "-o", "a.svg"]
    assert "written: a.svg" in call(*words).err
    text = (tmp_path / "a.svg").read_text()
    xml.fromstring(text)
    for expected in (
        "bubble 12.5 % of ideal, 11.1 % of total",
        "I input gradient",
        "W weight gradient",
        "B full backward",
        ">7<",
        "minidist schedule",
    ):
        assert expected in text, expected
    figure = gantt([time_plan(get_schedule("gpipe").plan(2, 2), spans=True)])
    bars = {bar.get_gid(): (bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches if bar.get_gid()}
    assert bars["0B0"] == (7, 2)
    assert bars["1F1"] == (2, 1)


def test_a_large_plan_is_figures_without_a_picture(call):
    out = call("schedule", "1f1b", "--stages", 64, "--microbatches", 3000).out
    assert out.splitlines()[1].startswith("idle 189 186")
    assert len(out.splitlines()) == 3


def test_the_strips_show_how_many_activations_are_alive():
    timing = time_plan(get_schedule("1f1b").plan(4, 8), spans=True)
    figure = gantt([timing])
    strips = {c.get_gid(): c for c in figure.axes[1].collections if c.get_gid()}
    assert set(strips) == {f"alive {rank}" for rank in range(4)}
    for rank, row in enumerate(timing.spans):
        times, counts = alive(row)
        assert max(counts) == timing.peak[rank]
        assert (counts[-1], times[-1]) == (0, timing.last_end[rank])
        lowest = min(strips[f"alive {rank}"].get_paths()[0].vertices[:, 1])
        assert lowest == pytest.approx(rank + 0.45 - 0.9 * timing.peak[rank] / 4)


@pytest.mark.parametrize(
    ("name", "m", "options"),
    [
        ("pipedream", 9, {}),
        ("pipedream-vertical-sync", 9, {}),
        ("pipedream-2bw", 4, {"batches": 3}),
        ("pipedream", 9, {"replicas": (2, 1, 1)}),
    ],
)
def test_version_lanes_follow_the_version_rules(name, m, options):
    plan = get_schedule(name).plan(4, m, **options)
    timing = time_plan(plan, spans=True)
    for rank, row in enumerate(versions_seen(plan)):
        p, s = plan.stages, row[0][0].stage
        k = options.get("replicas", (1,) * p)[s]
        ahead = (sum(options["replicas"][s:]) - 1) // k if "replicas" in options else p - 1 - s
        law = {
            "stash": lambda t, k=k, a=ahead: max(0, t // k - a),
            "vertical-sync": lambda t: max(0, t - 3),
            "2bw": lambda t: max(t // m - 1, 0),
        }[plan.updates]
        assert all(version == law(action.microbatch) for action, version in row)
        assert max(kept(timing, rank)[1]) == validate(plan).weight_versions[rank]
    bars = {bar.get_gid() for bar in version_gantt([timing]).axes[0].patches if bar.get_gid()}
    assert {f"0F{i} v{v}" for i, v in ((0, 0), (1, 0))} <= bars


def test_without_stashing_the_colours_differ(call, tmp_path):
    assert ("B1", 1) in {
        (f"{a.kind}{a.microbatch}", v)
        for a, v in versions_seen(get_schedule("pipedream").plan(3, 4, stashing=False))[0]
    }
    sizes = ["--stages", 3, "--microbatches", 4, "--format", "versions"]
    assert "written: v.svg" in call("schedule", "pipedream", *sizes, "-o", "v.svg").err
    assert "versions of the weights kept, at most 3 2 1" in (tmp_path / "v.svg").read_text()
    err = call("schedule", "1f1b", *sizes, code=2).err
    assert "has one version of the weights; draw an asynchronous one" in err


def test_perfetto(call):
    events = json.loads(call("schedule", "1f1b", "--stages", 2, "--microbatches", 2, "--format", "perfetto").out)[
        "traceEvents"
    ]
    assert sum(event.get("ph") == "X" for event in events) == 8


def test_options_times_recomputation_blocking_and_limit(call, tmp_path):
    def read(*arguments):
        return json.loads(call("schedule", *arguments, "--stages", 4, "--microbatches", 8, "--format", "json").out)

    assert read("gpipe", "--option", "backward_order=forward")["orders"][0][8] == "0B0"
    assert (
        read("1f1b", "--times", "F=2,I=1,W=1,comm=0.5")["makespan"] > read("1f1b", "--times", "F=2,I=1,W=1")["makespan"]
    )
    assert read("1f1b", "--recompute")["cost"] == 41  # not 11 * 4: the first recomputations run where the bubble was
    assert read("1f1b", "--receives", "blocking")["idle"][0] == 21
    assert read("pipedream", "--option", "stashing=0")["weight_versions"] == [1, 1, 1, 1]
    err = call("schedule", "gpipe", "--stages", 4, "--microbatches", 8, "--memory-limit", 4, code=1).err
    assert "rank 0 needs 8 micro-batches of activations, more than the limit of 4" in err


BAD = """
import sys, itertools
from minidist.core.pipeline.plan import Plan
def leaves(p, m): sys.exit(7)
def late(p, m):
    yield ["0F0", "0B0"]
    raise RuntimeError("late")
def endless(p, m): return itertools.repeat(["0F0"])
def endless_row(p, m): return [itertools.repeat("0F0")]
def word(p, m): return ["0F0", "0B0"]
def no_orders(p, m): return Plan("x", None, 1, 1)
def no_action(p, m): return Plan("x", [["a"]], 1, 1)
def no_batch(p, m): return Plan("x", [["0F0", "0B0"]], 1, 1, updates="2bw", batch=0)
def no_updates(p, m): return Plan("x", [["0F0", "0B0"]], 1, 1, updates="now and then")
"""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("1f1b", "--stages", 2), "needs --microbatches"),
        (("1f1b", "--stages", 2, "--microbatches", 0), "--microbatches is 0"),
        (
            ("1f1b", "--stages", 10**8, "--microbatches", 10**8),
            "do not fit in memory; a plan has at most 1,000,000 forwards",
        ),
        (("bad.csv",), "bad.csv, line 2, cell 2: '1Q0' is not an action"),
        (("none.csv",), "the plan 'none.csv' cannot be read"),
        (("wrong.csv",), "0B0 comes before 0F0"),
        (("dead.csv",), "deadlock"),
        (("wrong.csv", "--stages", 3), "--stages is 3 and the plan 'wrong.csv' has 1"),
        (("none.py:f", "--stages", 1, "--microbatches", 1), "file 'none.py' does not exist"),
        (("bad.py:g", "--stages", 1, "--microbatches", 1), "has no function 'g'"),
        (("bad.py:f", "--stages", 1, "--microbatches", 1), "raised ZeroDivisionError"),
        (("bad.py:h", "--stages", 1, "--microbatches", 1), "returned int"),
        (("bad.py:k", "--stages", 1, "--microbatches", 1), "line 1, cell 1: '1.5' is not an action"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--format", "pdf"), "--format 'pdf'"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--option", "x"), "write name=value"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--receives", "eager"), "it must be latency, blocking or both"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--times", "F=1,F=2"), "--times gives F twice"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--memory-limit", "nan"), "--memory-limit is nan"),
        (
            ("1f1b", "--stages", 2, "--microbatches", 2, "--output", "no/such/folder.txt"),
            "cannot be written to no/such/folder.txt: No such file",
        ),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--option", "p=3"), "has no option 'p'"),
        (("pipedream", "--stages", 2, "--microbatches", 2, "--option", "stashing=maybe"), "must be true or false"),
        (("pipedream-2bw", "--stages", 2, "--microbatches", 2, "--option", "batches=x"), "must be a whole number"),
        (("pipedream-2bw", "--stages", 2, "--microbatches", 2, "--option", "batches=²"), "must be a whole number"),
        (("fine.csv", "--chunks", 2), "--chunks 2 has no effect on the plan"),
        (("fine.csv", "--option", "a=1"), "--option a 1 has no effect on the plan"),
        (("bad.py:leaves", "--stages", 1, "--microbatches", 1), "raised SystemExit: 7"),
        (("bad.py:late", "--stages", 1, "--microbatches", 1), "raised RuntimeError: late"),
        (("bad.py:endless", "--stages", 1, "--microbatches", 1), "more than 1,000 actions and ranks"),
        (("bad.py:endless_row", "--stages", 1, "--microbatches", 1), "more than 1,000 actions and ranks"),
        (("bad.py:word", "--stages", 1, "--microbatches", 1), "returned '0F0' for rank 0"),
        (("bad.py:no_orders", "--stages", 1, "--microbatches", 1), "returned NoneType"),
        (("bad.py:no_action", "--stages", 1, "--microbatches", 1), "'a' is not an action"),
        (("bad.py:no_batch", "--stages", 1, "--microbatches", 1), "whole numbers of at least 1"),
        (("bad.py:no_updates", "--stages", 1, "--microbatches", 1), "updates one of flush, none"),
    ],
)
def test_wrong_input_is_one_sentence(call, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.setattr("minidist.pipeline.schedules.load.MAX_CELLS", 1000)
    (tmp_path / "fine.csv").write_text("0F0,0B0\n")
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1F0,1Q0\n")
    (tmp_path / "wrong.csv").write_text("0B0,0F0\n")
    (tmp_path / "dead.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    (tmp_path / "bad.py").write_text("f = lambda p, m: 1 / 0\nh = lambda p, m: 3\nk = lambda p, m: [[1.5]]\n" + BAD)
    out, err = call("schedule", *arguments, code=2)
    assert out == ""
    assert sentence in err
    # In addition to the sentence there is at most the line of the user's function.
    assert len([line for line in err.strip().splitlines() if not line.startswith("at bad.py:")]) == 1


def test_a_large_plan_of_a_user_is_judged_too(call, tmp_path, monkeypatch):
    monkeypatch.setattr("minidist.report.schedules.LARGE", 10)
    (tmp_path / "1f1b.csv").write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    out, err = call("schedule", "1f1b.csv", "--json", code=2)
    assert (out, "0B3 is missing" in err) == ("", True)


def test_a_byte_order_mark_is_not_part_of_the_plan(call, tmp_path):
    (tmp_path / "mark.csv").write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n")
    assert json.loads(call("schedule", "mark.csv", "--json").out)["orders"] == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_partition_command(call, tmp_path):
    layer = {"op": "x", "fwd_ms": 10, "bwd_ms": 30, "act_bytes": 0, "param_bytes": 0}
    (tmp_path / "p.json").write_text(json.dumps([layer] * 4))
    out = call("partition", "p.json", "--machines", 2, "--bandwidth", 1e9, "--objective", "paper", "--json").out
    assert json.loads(out)["slowest_stage_seconds"] == pytest.approx(0.08)
    assert all(set(stage) == {"first", "last", "replicas"} for stage in json.loads(out)["stages"])
    out, err = call("partition", "p.json", "--machines", 0, "--bandwidth", 1e9, code=2)
    assert out == ""
    assert "--machines is 0" in err


def test_without_a_name_it_says_what_there_is(call):
    out = call("schedule").out
    assert [line.split()[0] for line in out.splitlines()] == list(schedules())
    assert all(len(line.split()) > 4 for line in out.splitlines())
    # Each line is about its schedule: its name, in the words of its paper, or that of its family, begins it.
    about = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert all(about[name].lower().startswith(name) for name in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2"))


LOWERED = (
    "0F0,0SEND_F0,{}0F1,0SEND_F1,{}2RECV_F1,2F0,2RECV_B0,2SEND_F0,2F1,2RECV_B1,2SEND_F1,2B0,0RECV_B0,2SEND_B0,2B1,"
    "0RECV_B1,2SEND_B1,0B0,0B1\n"
    "1RECV_F0,1F0,1RECV_F1,1SEND_F0,1F1,3RECV_F0,1SEND_F1,3F0,3B0,3RECV_F1,3SEND_B0,3F1,3B1,1RECV_B0,3SEND_B1,1B0,"
    "1SEND_B0,1RECV_B1,1B1,1SEND_B1\n"
)


def test_a_lowering_is_timed_with_receives_that_block_and_that_do_not(call, tmp_path):
    """A receive that stands before a forward pass which does not need it stops the stage until its data arrives."""
    times = ["--receives", "both", "--times", "F=1,I=1,W=1,comm=1"]
    makespans = {}
    for name, before, after in (("early", "2RECV_F0,", ""), ("late", "", "2RECV_F0,")):
        (tmp_path / f"{name}.csv").write_text(LOWERED.format(before, after))
        both = json.loads(call("schedule", f"{name}.csv", *times, "--json").out)["schedules"]
        assert [one["name"] for one in both] == [f"{name}, posted ahead", f"{name}, blocking receives"]
        makespans[name] = [one["makespan"] for one in both]
        assert "longest_stop" not in both[0]
    # Posted, the receive's place does not matter; blocking, the earlier one costs its latency and stage 1's work.
    assert makespans["early"][0] == makespans["late"][0]
    assert makespans["early"][1] > makespans["late"][1] > makespans["late"][0]
    text = call("schedule", "early.csv", *times).out
    assert "the longest stop: 2RECV_B0 stops rank 0 for 5 before 2F1\n" in text
    assert any(line.split()[:4] == ["early,", "blocking", "receives", "36"] for line in text.splitlines())
    # A schedule by its name has two times, too.
    assert "1f1b, blocking receives" in call("schedule", "1f1b", "--stages", 4, "--microbatches", 8, *times).out


def test_ranks_is_another_name_of_stages(call):
    by_ranks, by_stages = (call("schedule", "1f1b", flag, 4, "--microbatches", 8) for flag in ("--ranks", "--stages"))
    assert by_ranks == by_stages
