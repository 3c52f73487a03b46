"""What dumps of several ranks say together: calls that differ, ranks that never came, messages, circles."""

import pytest

from minidist.debug.flight_recorder.diagnosis import diagnose
from minidist.debug.flight_recorder.dump import BadDumpError, dump_of
from tests.flight_recorder.test_dump import dump, entry, message

DONE = {"state": "completed"}


def of(*ranks, **values):
    """The diagnosis of the entries of each rank."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(len(ranks))))}}
    dumps = [
        dump_of(r, dump(*entries, **{"pg_config": config, **values}))
        for r, entries in enumerate(ranks)
        if entries is not None
    ]
    return diagnose(dumps)


def waits(found):
    return {wait.operation.rank: wait.missing for wait in found.waits}


def test_a_rank_that_never_came():
    found = of([entry(0, **DONE), entry(1)], [entry(0, **DONE), entry(1)], [entry(0, **DONE)])
    assert waits(found) == {0: (2,), 1: (2,)}
    assert (found.suspects, found.circle) == ((2,), ())
    assert (found.differences[0].sequence, found.differences[0].absent) == (2, (2,))
    text = "\n".join(found.lines())
    assert (
        "ranks 0, 1 wait in all_reduce number 2 of Float [4], group 0 (default_pg), at train.py:31 in step, for rank 2"
        in text
    )
    assert "rank 2 made no such call" in text
    assert "look first at rank 2" in text


def test_unlike_collectives():
    found = of([entry(0)], [entry(0, "nccl:broadcast")], [entry(0)])
    assert waits(found) == {0: (1,), 1: (0, 2), 2: (1,)}
    assert found.circle == (0, 1)
    text = "\n".join(found.lines())
    assert "all_reduce of Float [4], at train.py:31 in step on ranks 0, 2, and broadcast of Float [4]" in text


@pytest.mark.parametrize(
    ("name", "values", "differs"),
    [
        ("all_reduce", {"input_sizes": [[5]]}, True),
        ("all_reduce", {"input_dtypes": ["Double"]}, True),
        ("_all_gather_base", {"output_sizes": [[9]]}, False),
        ("_reduce_scatter_base", {"output_sizes": [[9]]}, True),
        ("all_to_all", {"input_sizes": [[9]]}, False),
        ("gather", {"output_sizes": [[9]]}, False),
        ("scatter", {"input_sizes": [], "input_dtypes": []}, False),
        ("scatter", {"input_sizes": [], "input_dtypes": [], "output_dtypes": ["Double"]}, True),
    ],
)
def test_shapes_differ_only_where_they_must_be_equal(name, values, differs):
    found = of([entry(0, f"nccl:{name}")], [entry(0, f"nccl:{name}", **values)])
    assert bool(found.differences) == differs


def test_all_sides_posted_is_said():
    found = of([entry(0)], [entry(0)])
    assert waits(found) == {0: (), 1: ()}
    assert found.differences == ()
    assert "the network holds it up" in "\n".join(found.lines())


def test_the_last_operation_of_a_running_job_may_look_open():
    """gloo notes late that an operation has ended."""
    said = "a dump of a running job may show its last operation as open"
    for ranks, expected in (
        ([[entry(0, **DONE), entry(1)], [entry(0, **DONE), entry(1)]], True),
        ([[entry(0), entry(1, **DONE)], [entry(0, **DONE), entry(1)]], True),  # of gloo's threads one is late
        ([[entry(0), entry(1)], [entry(0), entry(1)]], False),
        ([[entry(0, **DONE), entry(1)], [entry(0, **DONE)]], False),
        ([[entry(0, "nccl:broadcast")], [entry(0)]], False),
    ):
        assert (said in "\n".join(of(*ranks).lines())) == expected, ranks


def test_dumps_that_list_no_group():
    """Those of gloo: all ranks are in the default group, and of another one nobody knows."""
    group = {"process_group": ("1", "dp")}
    config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    found = of([entry(0, "gloo:barrier")], [], pg_config=config)
    assert waits(found) == {0: (1,)}  # rank 1 has recorded nothing, and is in the default group
    dumps = [dump_of(rank, dump(entry(0), pg_config=config)) for rank in (0, 2)]
    assert waits(diagnose(dumps)) == {0: (), 2: ()}
    assert waits(diagnose(dumps, world=3)) == {0: (1,), 2: (1,)}
    found = of([entry(0, **group)], [entry(0, **DONE)], pg_config=config)
    assert waits(found) == {0: ()}
    text = "\n".join(found.lines())
    assert (
        "group 1 (dp), at train.py:31 in step; all sides that are known are posted, and the dumps do not list" in text
    )


def torchcomms(*calls):
    """A dump of torchcomms: it counts the operations of all groups together, and names neither side of a message."""
    groups = {name: {"name": name, "desc": "gloo", "ranks": "[0, 1]"} for name in ("main", "tp")}
    entries = [
        entry(number, f"gloo:{kind}", process_group=[group, "gloo"], collective_seq_id=number, is_p2p=False)
        for number, (group, kind) in enumerate(calls)
    ]
    return {**dump(*entries), "pg_config": groups}


def test_dumps_of_torchcomms():
    one = [("main", "all_gather_single"), ("tp", "reduce_scatter_v"), ("main", "split"), ("main", "barrier")]
    # The other order of two groups makes other numbers, which do not count.
    other = [one[1], one[0], one[2], ("main", "send"), ("main", "all_to_all_v_single")]
    found = diagnose([dump_of(0, torchcomms(*one)), dump_of(1, torchcomms(*other))])
    assert [(d.group, d.sequence, {o.kind for o in d.calls}) for d in found.differences] == [
        ("main", 3, {"barrier", "all_to_all_v_single"})
    ]
    assert "send number 1 of Float [4], group main (gloo)" in "\n".join(found.lines())
    lost = torchcomms(*one)
    del lost["entries"][0]
    with pytest.raises(BadDumpError, match="larger max_entries"):
        dump_of(0, lost)
    # Of a group of PyTorch the numbers stay.
    assert [o.sequence for o in dump_of(0, dump(entry(4))).operations] == [5]


def test_names_of_operations_with_equal_shapes():
    for name, values, differs in (
        ("all_gather_single", {"input_sizes": [[5]]}, True),
        ("reduce_scatter_single", {"output_sizes": [[5]]}, True),
        ("all_gather_v", {"input_sizes": [[5]]}, False),
        ("reduce_scatter_v", {"output_sizes": [[5]]}, False),
    ):
        found = of([entry(0, f"gloo:{name}")], [entry(0, f"gloo:{name}", **values)])
        assert bool(found.differences) == differs, name


def test_messages_meet_in_their_order():
    sends = [message("send", 0, 1, 0, **DONE), message("send", 0, 1, 1), message("send", 0, 1, 2)]
    found = of(sends, [message("recv", 1, 0, 0, **DONE), message("recv", 1, 0, 1)])
    assert waits(found) == {0: (), 1: ()}  # the first that wait have met
    found = of(sends, [message("recv", 1, 0, 0, **DONE)])
    assert waits(found) == {0: (1,)}
    assert found.suspects == (1,)


def test_a_message_of_another_size():
    found = of([message("send", 0, 1)], [message("recv", 1, 0, output_sizes=[[5]])])
    assert len(found.unlike_messages) == 1
    assert "rank 0 sends Float [4], at train.py:31 in step, and rank 1 receives Float [5]" in "\n".join(found.lines())


def test_a_circle_of_receives():
    found = of(*[[message("recv", rank, (rank + 1) % 3)] for rank in range(3)])
    assert found.circle == (0, 1, 2)
    assert "circle: rank 0 -> rank 1 -> rank 2 -> rank 0" in found.lines()


def test_a_rank_without_a_dump():
    found = of([entry(0)], [entry(0)], None)
    assert (found.without_dump, found.suspects) == ((2,), (2,))
    text = "\n".join(found.lines())
    assert "no dump: rank 2" in text
    assert "look first at rank 2: others wait, and there is no dump" in text


def test_what_a_full_ring_buffer_has_lost_is_not_a_difference():
    """Rank 1 recorded more messages, so that its oldest collective is a later one than rank 0's."""
    found = of([entry(0, **DONE), entry(1, **DONE), entry(2)], [entry(7, collective_seq_id=3)])
    assert found.differences == ()
    assert waits(found) == {0: (), 1: ()}
    behind = of([entry(0, **DONE), entry(1), entry(2)], [entry(7, collective_seq_id=3)])
    assert behind.differences == ()  # rank 1 may have made call number 2, for which rank 0 waits
    assert waits(behind) == {0: (), 1: ()}
    lost = of([entry(0, **DONE), entry(1)], [message("send", 1, 0, 7, **DONE)])
    assert waits(lost) == {0: ()}  # its buffer has no collective any more, so nothing is known


def test_the_first_difference_is_the_earliest():
    groups = {name: {"name": name, "desc": "", "ranks": "[0, 1]"} for name in ("0", "1")}
    late = [entry(0, process_group=("1", ""), collective_seq_id=1, time_created_ns=9)]
    early = [entry(1, process_group=("0", ""), collective_seq_id=1, time_created_ns=5)]
    found = of(late + early, [], pg_config=groups)
    assert [each.group for each in found.differences] == ["0", "1"]


def test_many_ranks_are_one_line():
    found = of([], *[[entry(0)] for _ in range(200)])
    assert len(found.lines()) < 8
    assert waits(found) == dict.fromkeys(range(1, 201), (0,))
