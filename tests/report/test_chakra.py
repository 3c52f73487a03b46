"""Execution traces: the graph of every layout can be replayed to its end, and has the run's bytes."""

import json
import random
from collections import defaultdict

import numpy as np
import pytest

from minidist import cli
from minidist.base.trace_file import read_traces
from minidist.comm import SimWorld
from minidist.commands.runner import run_training
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from minidist.job.config.train_config import TrainConfig
from minidist.report import protobuf
from minidist.report.chakra import COLL, COMP, RECV, SEND, array_bytes, calls_of, read_chakra, write_chakra
from minidist.report.from_file import export_trace
from tests.cases import each

JOB = {"model": "gpt", "layers": 4, "width": 16, "heads": 2, "context": 8, "steps": 1, "microbatches": 4}
LAYOUTS = {
    "dp": {"dp": 3},
    "zero3": {"dp": 2, "zero": 3},
    "1f1b": {"dp": 2, "pp": 2, "tp": 2},
    "zb": {"pp": 4, "schedule": "zb-h1"},
    "experts": {"dp": 2, "experts": 2, "ep": 2},
    "cp": {"cp": 2, "dp": 2},
    "bf16": {"dp": 2, "precision": "bf16"},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("chakra") / "run.jsonl"
    run_training(TrainConfig.make(**JOB, **LAYOUTS[request.param]), None, 60.0, path)
    return path


def replay(ranks):
    """Run the graphs as a simulator does: a node when all that it depends on has ended. Return the nodes that ended.

    A receive ends when the send with its tag has begun; a collective when every rank of its group is there.
    """
    ended = [set() for _ in ranks]
    sent, arrived, calls = set(), defaultdict(set), [collectives_of(items) for items in ranks]
    progress = True
    while progress:
        progress = False
        for rank, items in enumerate(ranks):
            for number, item in enumerate(items):
                if number in ended[rank] or not all(other in ended[rank] for other in item.depends):
                    continue
                about = item.attributes
                if item.kind == SEND:
                    message = (about["comm_src"], about["comm_dst"], about["comm_tag"], about["comm_size"])
                    assert message not in sent  # a tag is used once
                    sent.add(message)
                if item.kind == RECV:
                    message = (about["comm_src"], about["comm_dst"], about["comm_tag"], about["comm_size"])
                    if message not in sent:
                        continue
                if item.kind == COLL:
                    arrived[rank].add(number)
                    group = item.attributes["pg_name"]
                    place = calls[rank][group].index(number)
                    members = [other for other, of_groups in enumerate(calls) if group in of_groups]
                    if not all(calls[other][group][place] in arrived[other] for other in members):
                        continue
                ended[rank].add(number)
                progress = True
    return ended


def collectives_of(items):
    """Return {group: the numbers of its collectives, in their order} of a rank's graph."""
    found = defaultdict(list)
    for number, item in enumerate(items):
        if item.kind == COLL:
            found[item.attributes["pg_name"]].append(number)
    return found


@each("messages", [False, True])
def test_the_graph_of_every_layout_can_be_replayed(run, tmp_path, messages):
    traces, _ = read_traces(run)
    folder = export_trace(run, "chakra", tmp_path, messages=messages)
    ranks = [read_chakra(folder / f"run.{rank}.et") for rank in range(len(traces))]
    assert [len(ended) for ended in replay(ranks)] == [len(items) for items in ranks]
    for trace, items in zip(traces, ranks, strict=True):
        assert any(item.kind == COMP for item in items)
        pieces = [item.end - item.posted for item in items if item.kind == COMP]  # whole microseconds
        computed = sum(span.end - span.start for span in trace.spans if span.category == "compute")
        assert sum(pieces) == pytest.approx(computed, abs=1e-6 * len(pieces))
        if messages:
            sent = sum(item.attributes["comm_size"] for item in items if item.kind == SEND)
            assert sent == sum(trace.bytes_by_purpose().values())
            assert not any(item.kind == COLL for item in items)
    table = json.loads((folder / "comm_groups.json").read_text())
    used = {item.attributes["pg_name"] for items in ranks for item in items if item.kind == COLL}
    assert used == set(table)
    assert all(len(members) > 1 for members in table.values())


@each("ranks", [2, 3, 4])
@each("elements", [1, 7, 24, 1000])
def test_the_size_of_an_array_follows_from_the_bytes_of_its_call(ranks, elements):
    """Of every operation with every algorithm that has a formula, at sizes that the ranks do not divide, too."""

    def program(comm):
        for algorithm in (
            "ring",
            "recursive_doubling",
            "rabenseifner",
            "ordered",
            "naive",
            "binomial",
            "ring_in_blocks",
            "segmented_ring",
        ):
            all_reduce(comm, np.zeros(elements, np.float32), algorithm=algorithm)
        for algorithm in ("ring", "ordered", "naive"):
            reduce_scatter(comm, np.zeros(elements, np.float32), algorithm=algorithm)
        for algorithm in ("ring", "naive"):
            all_gather(comm, np.zeros(elements, np.float32), algorithm=algorithm)

    world = SimWorld(ranks)
    world.run(program)
    calls = calls_of(world.traces)
    assert len(calls) >= 12
    for call in calls:
        whole = ranks * elements if call.operation.startswith("all_gather") else elements
        assert array_bytes(call) == 4 * whole, call.operation


def test_a_call_whose_size_is_unknown_is_written_as_its_messages(tmp_path):
    def program(comm):
        from_each = [1 + (source if comm.rank == 0 else 0) for source in range(3)]
        all_to_all(comm, np.zeros(3 + comm.rank), send_counts=[1 + comm.rank, 1, 1], receive_counts=from_each)

    world = SimWorld(3)
    world.run(program)
    assert [array_bytes(call) for call in calls_of(world.traces)] == [None]
    write_chakra(tmp_path, "a", world.traces)
    items = read_chakra(tmp_path / "a.1.et")
    assert {item.kind for item in items} == {SEND, RECV}


def test_a_stream_runs_next_to_the_main_program(tmp_path):
    """A call of a stream depends on what came before it; the computing behind it does not depend on the call."""
    path = tmp_path / "run.jsonl"
    run_training(TrainConfig.make(**{**JOB, "width": 64}, dp=2, bucket_cap_mb=0.01), None, 60.0, path)
    items = read_chakra(export_trace(path, "chakra", tmp_path / "et") / "run.0.et")
    calls = [n for n, item in enumerate(items) if item.kind == COLL and item.attributes["purpose"] == "gradient_reduce"]
    assert len(calls) > 4
    assert all(items[n].depends for n in calls)
    independent = [
        n
        for n, item in enumerate(items)
        if item.kind == COMP and any(c < n and c not in behind(items, n) and c not in items[n].depends for c in calls)
    ]
    assert independent


def behind(items, number):
    """Everything that a node depends on, directly or not."""
    found, todo = set(), [number]
    while todo:
        for other in items[todo.pop()].depends:
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


def test_a_damaged_file_is_read_or_refused_with_one_sentence(run, tmp_path):
    source = (export_trace(run, "chakra", tmp_path / "et") / "run.0.et").read_bytes()
    path, draw, refusals = tmp_path / "x.et", random.Random(len(source)), []
    for _ in range(30):
        data = bytearray(source)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            how = draw.randrange(3)
            if how == 0:
                data[place] = draw.randrange(256)
            elif how == 1:
                del data[place:]
            else:
                data[place:place] = b"\xff" * draw.randint(1, 12)
            data = data or bytearray(b"\x80")
        path.write_bytes(data)
        try:
            read_chakra(path)
        except UsageError as error:
            refusals.append(str(error))
    assert len(refusals) > 10
    assert all(f"{path.name}' is not an execution trace: " in text and len(text) < 500 for text in refusals)


@each("number", [0, 1, 127, 128, 300, 2**31, 2**63, 2**64 - 1, -1])
def test_numbers_and_texts_come_back(number):
    text = "all_reduce/ring ä"
    message = protobuf.field(1, number) + protobuf.field(29, text)
    assert list(protobuf.fields(message)) == [(1, number % 2**64), (29, text.encode())]


def test_the_command(run, tmp_path, capsys):
    cli_code(["report", str(run), "--format", "chakra", "-o", str(tmp_path / "et")])
    cli_code(["report", str(tmp_path / "et" / "run.0.et")])
    assert "COMP" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--format", "chakar"], "did you mean 'chakra'"),
        (["--format", "hta", "--messages"], "leave it out"),
        (["--messages"], "without --format chakra"),
        (["--format", "hta", "--picture", "gantt"], "give one of them"),
    ],
)
def test_wrong_flags_end_with_2(words, part, tmp_path, capsys):
    world = SimWorld(2)
    world.run(lambda comm: comm.barrier())
    from minidist.base.trace_file import write_traces

    path = write_traces(tmp_path / "t.jsonl", world.traces)
    assert cli_code(["report", str(path), *words]) == 2
    assert part in capsys.readouterr().err


def cli_code(words):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code


def test_the_librarys_schema_reads_the_files(run, tmp_path):
    """The same bytes, decoded by Google's protobuf with the messages of Chakra's schema."""
    pytest.importorskip("google.protobuf")
    from tests.report.chakra_schema import GlobalMetadata, Node

    path = export_trace(run, "chakra", tmp_path) / "run.0.et"
    with path.open("rb") as file:
        first, *nodes = list(protobuf.messages(file))
    assert GlobalMetadata.FromString(first).version == "0.0.4"
    for data, item in zip(nodes, read_chakra(path), strict=True):
        found = Node.FromString(data)
        assert (found.name, found.type, list(found.data_deps)) == (item.name, item.kind, item.depends)
        about = {each.name: getattr(each, each.WhichOneof("value")) for each in found.attr}
        dimensions = about.pop("involved_dim", None)
        assert (dimensions is not None) == (item.kind == COLL)
        assert about.pop("is_cpu_op") is False
        assert about == {name: value for name, value in item.attributes.items() if name != "is_cpu_op"}
