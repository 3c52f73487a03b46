"""What the logs of all ranks say together, alone and with dumps; and what they leave open is not said."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.core.base.errors import UsageError
from minidist.debug.flight_recorder.log_diagnosis import diagnose_files
from tests.flight_recorder.lines import status, timeout
from tests.flight_recorder.test_dump import dump, entry


@pytest.fixture
def found(tmp_path):
    def of(*lines, world=0, folder=False):
        (tmp_path / "job.log").write_text("\n".join(lines))
        result = diagnose_files(tmp_path if folder else tmp_path / "job.log", world)
        json.dumps(result.as_dict())
        assert result.hangs
        return result, "\n".join(result.lines())

    return of


def both(rank, number, enqueued, completed, kind="ALLREDUCE", size=64, **group):
    """The two lines of a rank that a watchdog writes."""
    return timeout(rank, number, kind, size), status(rank, number, enqueued, completed, **group)


def waits(result):
    return {wait.operation.rank: wait.missing for wait in result.waits}


def test_ranks_in_different_operations(found):
    lines = [*both(0, 7, 7, 6, "BROADCAST", 1), *both(1, 7, 9, 6), *both(2, 7, 8, 6)]
    for order in (lines, lines[::-1]):
        result, text = found(*order)
        assert waits(result) == {0: (1, 2), 1: (0,), 2: (0,)}
        assert result.circle == (0, 1)
        assert (
            "number 7 of group 0 (default_pg) is BROADCAST of 1 element on rank 0, and ALLREDUCE of 64 elements on"
            in text
        )
        assert "last enqueued in group 0 (default_pg): 7 on rank 0, 8 on rank 2, 9 on rank 1" in text
        assert "last completed in group 0 (default_pg): 6 on ranks 0, 1, 2" in text


def test_sizes_differ_only_where_they_must_be_equal(found):
    for kind, differs in (("ALLREDUCE", True), ("_ALLGATHER_BASE", True), ("ALLTOALL", False), ("COALESCED", False)):
        result, _ = found(*both(0, 7, 7, 6, kind, 8), *both(1, 7, 7, 6, kind, 9))
        assert bool(result.differences) == differs, kind
    # The size of a line that has been cut is not known.
    result, _ = found(timeout(0, 7), timeout(1, 7)[:150])
    assert not result.differences


def test_a_rank_that_has_not_enqueued_the_operation(found):
    result, text = found(*both(0, 7, 8, 6), *both(2, 7, 8, 6), status(1, None, 6, 6))
    assert waits(result) == {0: (1,), 2: (1,)}
    assert result.suspects == (1,)
    assert "rank 1 has not enqueued it" in text
    assert "look first at rank 1: others wait, and the last that it has enqueued is number 6 of group 0" in text


def test_a_rank_that_has_enqueued_it_is_in_it_though_the_line_with_its_kind_is_missing(found):
    result, text = found(*both(0, 7, 8, 6), status(1, None, 9, 6))
    assert waits(result) == {0: (), 1: ()}
    assert not result.differences
    assert "an operation that the log does not name, number 7 of unknown size" in text


def test_a_rank_without_a_line(found):
    result, text = found(*both(0, 7, 8, 6), *both(2, 7, 8, 6))
    assert waits(result) == {0: (1,), 2: (1,)}  # there is a rank 2, so there is a rank 1
    assert "no line: rank 1" in text
    assert "add --ranks N" in text
    result, text = found(*both(0, 7, 8, 6), *both(2, 7, 8, 6), world=5)
    assert waits(result)[0] == (1, 3, 4)
    assert "ranks 0, 2 of 5" in text
    assert "add --ranks" not in text
    assert waits(found("world_size=4", *both(0, 7, 8, 6))[0]) == {0: (1, 2, 3)}
    # A log with the lines of few ranks is one of several.
    result, text = found(*both(64, 7, 8, 6), *both(65, 7, 8, 6))
    assert waits(result) == {64: (), 65: ()}
    assert "no line" not in text
    # An all-gather of 64 elements into 256 is of four ranks.
    gather = [timeout(0, 7, "_ALLGATHER_BASE", 64, 256), status(0, 7, 8, 6)]
    assert waits(found(*gather)[0]) == {0: (1, 2, 3)}
    gather[1] = status(0, 7, 8, 6, group="ID 1 PG GUID 1")
    result, text = found(*gather)
    assert waits(result) == {0: ()}
    assert "no line: ranks 1, 2, 3 of group 1, counted in the group" in text
    with pytest.raises(UsageError, match="has rank 2; give at least 3"):
        found(*both(0, 7, 8, 6), *both(2, 7, 8, 6), world=2)


def test_a_rank_behind_the_others(found):
    result, text = found(*both(0, 7, 7, 6), *both(1, 8, 12, 7), *both(2, 8, 12, 7))
    assert waits(result) == {0: (), 1: (0,), 2: (0,)}
    assert (
        "rank 0 waits in ALLREDUCE number 7 of 64 elements, group 0 (default_pg); ranks 1, 2 have ended this number"
        in text
    )
    # It may have enqueued number 8: the old lines do not say.
    result, text = found(*(timeout(rank, 7 + (rank > 0), form="2.0") for rank in range(3)))
    assert (waits(result), result.differences) == ({0: (), 1: (0,), 2: (0,)}, ())
    assert "do not name their group, which is taken to be one of all ranks; numbers that differ may be" in text
    # A rank that is silent, too: the call that rank 1 has ended is not one of an unknown kind.
    result, text = found(*both(0, 7, 7, 6), *both(1, 8, 12, 7), world=3)
    assert "for rank 2; rank 1 has ended this number" in text
    assert (
        "first difference: number 7 of group 0 (default_pg) is ALLREDUCE of 64 elements on rank 0; no line of" in text
    )


def test_operations_and_their_groups_meet_by_rank_and_number(found):
    tp = {"group": "ID 3 PG GUID 17(tp)"}
    lines = [timeout(rank, 12, inner=0) for rank in (4, 5, 7)]
    lines += [status(rank, 12, 12, 11, inner=rank - 4, **tp) for rank in (4, 5, 7)]
    result, text = found(*both(2, 4, 4, 3), *lines)
    # The hole in the group is one rank wide in the job, too.
    assert {rank: waits(result)[rank] for rank in (4, 5, 7)} == {4: (6,), 5: (6,), 7: (6,)}
    assert "group 3 (GUID 17, tp)" in text
    result, text = found(*(status(r, 12, 12, 11, inner=i, **tp) for r, i in ((4, 0), (8, 2))))
    assert waits(result) == {4: (), 8: ()}  # rank 1 of the group is one of 5, 6 and 7
    assert "no line: rank 1 of group 3 (GUID 17, tp), counted in the group" in text
    # A number of a group on one rank may be that of another group elsewhere.
    text = found(status(4, 1, 1, 0, **tp), status(6, 1, 1, 0, group="ID 3 PG GUID 18"))[1]
    assert "group 17 (PG ID 3, tp)" in text
    assert "group 18 (PG ID 3)" in text
    # Two ranks have given the group different numbers, so that its name is shown.
    assert "group 17 (tp)" in found(status(4, 1, 1, 0, **tp), status(5, 1, 1, 0, group="ID 4 PG GUID 17(tp)"))[1]


def test_last_numbers_of_a_group_that_is_not_named(found):
    said = "[Rank {}] Timeout at NCCL work: 7, last enqueued NCCL work: {}, last completed NCCL work: 6."
    lines = [timeout(0, 7), said.format(0, 8), timeout(1, 7), said.format(1, 7)]
    result, text = found(
        *lines, "[Rank 2] Received a dump signal. Last enqueued NCCL work: 6, last completed NCCL work: 6."
    )
    assert waits(result) == {0: (2,), 1: (2,)}
    assert "last enqueued in a group that the log does not name: 6 on rank 2, 7 on rank 1, 8 on rank 0" in text


def test_records_that_do_not_name_the_group_are_of_the_one_that_another_rank_names(found):
    ended = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
    result, text = found(*both(0, 7, 7, 6), timeout(1, 7), timeout(2, 7, "BROADCAST"), ended + timeout(1, 7)[50:])
    assert [(each.group, each.sequence) for each in result.differences] == [("0", 7)]
    assert "do not name" not in text
    # Two groups have a number 7.
    result, text = found(*both(0, 7, 7, 6), *both(1, 7, 7, 6, group="ID 1 PG GUID 9(tp)"), timeout(2, 7))
    assert {wait.operation.rank: wait.operation.group for wait in result.waits} == {0: "0", 1: "1", 2: ""}


def test_a_number_of_ranks_below_that_of_a_rank_is_of_a_part_of_the_job(found):
    _, text = found("world_size=2", *both(0, 7, 7, 6), *both(2, 7, 7, 6))
    assert "add --ranks N" in text


def test_a_rank_that_waits_in_another_group(found):
    pp = {"group": "ID 2 PG GUID 5(pp)", "inner": 1}
    result, text = found(*both(0, 12, 12, 11), *both(1, 12, 12, 11), *both(2, 7, 7, 6, "BROADCAST", 3, **pp))
    assert waits(result) == {0: (2,), 1: (2,), 2: ()}
    assert result.suspects == ()
    assert "rank 2 waits in BROADCAST number 7 of 3 elements, group 2 (GUID 5, pp)" in text


def test_lines_of_the_oldest_version_have_no_number(found):
    result, text = found(timeout(0, 1, "BROADCAST", form="1.9"), timeout(1, 1, form="1.9"))
    assert result.circle == (0, 1)
    assert "rank 0 waits in BROADCAST without a number of [64]" in text


def test_messages_have_no_other_side(found):
    result, text = found(*both(0, 3, 3, 2, "SEND"), *both(1, 3, 3, 2, "RECV"))
    assert (waits(result), result.differences) == ({0: (), 1: ()}, ())
    assert "the log does not name the other side of this message" in text


def test_a_rank_that_raises_is_where_to_look(found):
    result, text = found(*both(0, 7, 7, 6), *both(1, 7, 7, 6), "[rank2]: KeyError: 'x'")
    assert waits(result) == {0: (2,), 1: (2,)}
    assert "rank 2 raised KeyError: 'x'" in text
    assert "look first at rank 2, whose exception is not a timeout" in text
    assert "no line: " not in text
    assert text.count("look first") == 1
    # A rank that has no line has had no time for one: the exception has ended the job.
    _, text = found(*both(0, 7, 7, 6), *both(2, 7, 7, 6), "[rank3]: KeyError: 'x'", world=4)
    assert text.count("look first") == 1
    assert "look first at rank 3" in text
    # A rank that is behind is behind before another one raises.
    _, text = found(*both(0, 7, 7, 6), status(1, None, 6, 6), "[rank2]: KeyError: 'x'")
    assert "look first at rank 1: others wait, and the last" in text
    assert "look first at rank 2, whose" in text


def test_barriers_and_gloo_alone(found):
    _, text = found("[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 2 ms", world=4)
    assert "ranks 1, 3 did not reach a monitored barrier in time" in text
    assert "look first at ranks 1, 3, for which others have waited" in text
    assert "no line: ranks 1, 2, 3" in text
    _, text = found("RuntimeError: Timed out waiting 9ms for recv operation to complete", world=4)
    assert "a rank timed out while it waited for a peer" in text
    assert "no line:" not in text  # it may be of any rank


def test_a_log_with_dumps(found, tmp_path):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    for rank in (0, 1):
        content = dump(entry(0, state="completed"), entry(1), pg_config=config)
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(content))
    for line, missing in (
        (timeout(2, 2, "BROADCAST"), (2,)),
        (timeout(2, 2, size=4), ()),
        (timeout(2, 2, "COALESCED"), ()),
    ):
        result, text = found(line, status(2, 2, 2, 1), folder=True)
        assert waits(result) == {0: missing, 1: missing, 2: (0, 1) if missing else ()}, line
        assert "2 dumps: ranks 0, 1" in text
    assert "number 2 of Float [4], group 0 (default_pg), at train.py:31 in step" in text
    # A rank with a dump is not read from the log.
    result, _ = found(timeout(1, 9), status(2, None, 1, 1), folder=True)
    assert waits(result) == {0: (2,), 1: (2,)}


LINES = [
    *both(0, 7, 8, 6),
    *both(3, 9, 9, -1, "SEND", group="ID 2 PG GUID 9(tp)", inner=1),
    status(2, None, 6, 6),
    timeout(1, 7, "_ALLGATHER_BASE", 8, 32, form="2.0"),
    timeout(1, 7, form="1.9"),
    "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 2 ms",
    "[default2]: KeyError: 1",
    "  rank      : 2 (local_rank: 2)",
    "  exitcode  : -9 (pid: 77)",
    "world_size=4, worker_count=3",
    "Stack trace of the failed collective: ",
    "#1 step from train.py:5",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LINES), st.integers(0, 250), st.integers(0, 30), st.booleans()), max_size=12))
def test_lines_that_are_cut_and_mixed_are_a_report_or_a_sentence(tmp_path_factory, pieces):
    file = tmp_path_factory.mktemp("log") / "job.log"
    file.write_text("".join(line[:at] + line[at + cut :] + "\n" * ends for line, at, cut, ends in pieces))
    for world in (0, 5):
        try:
            result = diagnose_files(file, world)
        except UsageError:
            continue
        assert all(line and "\n" not in line for line in result.lines())
        json.dumps(result.as_dict())
