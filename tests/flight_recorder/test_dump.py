"""Reading dumps: the form that PyTorch writes is understood, and every other file is refused in a sentence."""

import io
import json
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.base.plain_pickle import BadPickleError, read_plain_pickle
from minidist.core.base.errors import UsageError
from minidist.debug.flight_recorder.diagnosis import diagnose
from minidist.debug.flight_recorder.dump import BadDumpError, dump_of
from minidist.debug.flight_recorder.files import read_files


def entry(number=0, name="nccl:all_reduce", **values):
    """An entry as PyTorch 2.13 writes it."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/usr/lib/python3/torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "step", "filename": "train.py", "line": 31},
            {"name": "<module>", "filename": "train.py", "line": 90},
        ],
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "python",
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": name,
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 600000,
        "is_p2p": False,
        **values,
    }


def dump(*entries, **values):
    """A dump with these entries, of a job of two ranks."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries), **values}


def message(kind, mine, peer, number=0, **values):
    """An entry of a send or a receive."""
    arrow = "->" if kind == "send" else "<-"
    return entry(number, f"nccl:{kind} {mine}{arrow}{peer}", **{"is_p2p": True, "p2p_seq_id": number + 1, **values})


def test_an_entry_of_pytorch_is_understood():
    (found,) = dump_of(1, dump(entry())).operations
    assert (found.rank, found.group, found.kind, found.sequence, found.peer) == (1, "0", "all_reduce", 1, None)
    assert (found.inputs, found.dtypes, found.is_done, found.site) == ("[4]", "Float", False, "train.py:31 in step")


@pytest.mark.parametrize(
    ("values", "is_done"),
    [
        ({"state": "completed"}, True),
        ({"state": "started"}, False),
        ({"state": "scheduled", "retired": True}, True),
        ({}, False),
    ],
)
def test_an_operation_has_ended_when_it_is_completed_or_retired(values, is_done):
    (found,) = dump_of(0, dump(entry(**values))).operations
    assert found.is_done == is_done


def test_ranks_of_messages_are_those_of_their_group():
    config = {"1": {"name": "1", "desc": "pp", "ranks": "[3, 7]"}}
    group = ("1", "pp")
    (found,) = dump_of(7, dump(message("recv", 1, 0, process_group=group), pg_config=config)).operations
    assert (found.kind, found.peer, found.is_message) == ("recv", 3, True)


def test_a_coalesced_entry_says_that_the_others_have_ended():
    last = entry(2, "nccl:coalesced", is_p2p=True, p2p_seq_id=1, state="completed")
    both = [message("send", 0, 1, 0), message("recv", 0, 1, 1, p2p_seq_id=1)]
    assert [o.is_done for o in dump_of(0, dump(*both, last)).operations] == [True, True]
    assert [o.is_done for o in dump_of(0, dump(*both)).operations] == [False, False]


def test_a_dump_in_json_of_a_rank_that_has_recorded_nothing():
    empty = {"version": "2.10", "pg_config": {}, "pg_status": {}, "comm_lib_version": "", "nccl_comm_state": {}}
    assert dump_of(3, empty).operations == ()


def test_the_number_at_the_end_of_a_file_s_name_is_the_rank(tmp_path):
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(dump(entry())))
    (tmp_path / "rank0.json").write_text(json.dumps(dump(entry())))
    (tmp_path / "readme.txt").write_text("not a dump")
    assert [each.rank for each in read_files(tmp_path)[0]] == [0, 1]


def put(folder, content):
    """A folder with one dump."""
    (folder / "rank_0").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


class Runs:
    """Its pickle would run a command."""

    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "neither a pickle nor JSON"),
        (b"\x80", "damaged"),
        (pickle.dumps(dump(entry()))[:-40], "damaged"),
        (pickle.dumps(Runs()), "plain values only"),
        (pickle.dumps({"entries": [{1, 2}]}), "plain values only"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "place 2147483647 of a memo"),
        (b"[" * 100_000, "neither a pickle nor JSON"),
        ([], "no list `entries`"),
        (dump(version="1.1"), "version is '1.1'"),
        (dump(version=None), "`version` is None"),
        (dump(3), "is not a table"),
        (dump(entry(record_id=-1)), "`record_id` is -1"),
        (dump(entry(record_id=True)), "`record_id` is True"),
        (dump(entry(process_group="0")), "`process_group`"),
        (dump(entry(profiling_name=None)), "`profiling_name`"),
        (dump(entry(input_sizes=[["a"]])), "not a list of shapes"),
        (dump(entry(input_dtypes="Float")), "not a list of dtypes"),
        (dump(entry(frames=3)), "`frames`"),
        (dump(message("send", 0, 9)), "in a group of 2 ranks"),
        (dump(pg_config={"0": {"ranks": "[0,"}}), "not a list"),
        (dump(pg_config={"0": {"ranks": [-1]}}), "not numbers of ranks"),
        (dump(pg_config=[1]), "`pg_config` is not a table"),
    ],
)
def test_a_file_that_is_no_dump_is_one_sentence(content, part, tmp_path):
    with pytest.raises(UsageError, match=part) as raised:
        read_files(put(tmp_path, content))
    assert "rank_0" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_without_dumps_and_one_with_two_of_a_rank(tmp_path):
    with pytest.raises(UsageError, match="no file whose name ends"):
        read_files(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_files(tmp_path / "none")
    for name in ("rank_0", "rank_0.json"):
        (tmp_path / name).write_text(json.dumps(dump(entry())))
    with pytest.raises(UsageError, match="two dumps of rank 0"):
        read_files(tmp_path)


@given(st.data())
def test_a_damaged_pickle_is_a_dump_or_a_sentence(data):
    """Bytes are changed, left out and doubled: nothing but these two errors is raised, and nothing is imported."""
    content = bytearray(pickle.dumps(dump(entry(), message("send", 0, 1, 1)), protocol=2))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        way = data.draw(st.integers(0, 2))
        if way == 0:
            content[place] = data.draw(st.integers(0, 255))
        elif way == 1:
            del content[place]
        else:
            content[place:place] = content[place : place + 9]
    try:
        found = dump_of(0, read_plain_pickle(bytes(content)))
    except (BadDumpError, BadPickleError):
        return
    diagnose([found]).lines()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.text(max_size=4) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30)
@given(st.sampled_from(sorted(entry())), VALUES, st.sampled_from(["version", "pg_config", "entries"]), VALUES)
def test_a_wrong_value_is_a_dump_or_a_sentence(key, value, field, other):
    for content in (dump(entry(**{key: value})), dump(entry(), **{field: other})):
        try:
            found = dump_of(0, content)
        except BadDumpError:
            continue
        diagnose([found]).lines()


def test_a_pickle_of_protocol_5_is_read():
    content = io.BytesIO()
    pickle.dump(dump(entry()), content, protocol=5)
    assert len(dump_of(0, read_plain_pickle(content.getvalue())).operations) == 1


def test_a_coalesced_entry_says_nothing_of_another_group_with_its_number():
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
        "1": {"name": "1", "desc": "pp", "ranks": "[0]"},
    }
    last = entry(2, "nccl:coalesced", is_p2p=True, p2p_seq_id=1, state="completed")
    other = message("send", 0, 0, 0, process_group=("1", "pp"))
    found = dump_of(0, dump(message("send", 0, 1, 0), other, last, pg_config=config)).operations
    assert [(o.group, o.is_done) for o in found] == [("0", True), ("1", False)]
