"""What dumps of several ranks say together: calls that differ, ranks that never came, messages, circles."""

import pytest

from minidist.debug.flight_recorder.diagnosis import diagnose
from minidist.debug.flight_recorder.dump import dump_of
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
