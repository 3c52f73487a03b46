"""The dumps of simulated runs have the keys, the names and the order of PyTorch's."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_reduce
from minidist.debug.flight_recorder.write import entries_of, groups_of, write_dumps
from tests.flight_recorder.test_dump import entry


@pytest.fixture(scope="module")
def world():
    def main(comm):
        group = comm.split(comm.rank % 2)
        all_reduce(comm, np.ones(3, np.float32))
        if comm.rank < 2:
            both = np.ones(5)
            comm.send(both, 1) if comm.rank == 0 else comm.recv(both, 0)
        all_reduce(group, np.ones(3))
        all_reduce(comm, np.ones(3))

    result = SimWorld(4)
    result.run(main)
    return result


def test_an_entry_has_the_keys_of_pytorch_s(world):
    expected = set(entry()) - {"thread_name"}
    assert all(set(each) == expected for rank in range(4) for each in entries_of(world, rank))


def test_operations_are_numbered_by_group_and_kind(world):
    found = [
        (e["profiling_name"], e["process_group"][1], e["collective_seq_id"], e["p2p_seq_id"], e["record_id"])
        for e in entries_of(world, 1)
    ]
    group = next(iter(set(groups_of(world)) - {"world"} - {n for n in groups_of(world) if n.endswith("0")}))
    assert found == [
        ("nccl:all_reduce", "default_pg", 1, 0, 0),
        ("nccl:recv 1<-0", "default_pg", 0, 1, 1),
        ("nccl:all_reduce", group, 1, 0, 2),
        ("nccl:all_reduce", "default_pg", 2, 0, 3),
    ]
    assert [e["input_sizes"] for e in entries_of(world, 1) if e["is_p2p"]] == [[[5]]]


def test_wrong_form_and_folder(world, tmp_path):
    with pytest.raises(UsageError, match="pickle or json"):
        write_dumps(world, tmp_path, "xml")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        write_dumps(world, tmp_path / "file")


def test_the_ranks_of_a_message_are_those_of_its_group():
    def main(comm):
        group = comm.split(comm.rank // 2)
        if comm.rank >= 2:
            value = np.ones(5)
            group.send(value, 1) if group.rank == 0 else group.recv(value, 0)

    world = SimWorld(4)
    world.run(main)
    assert [e["profiling_name"] for e in entries_of(world, 2)] == ["nccl:send 0->1"]
    assert [e["profiling_name"] for e in entries_of(world, 3)] == ["nccl:recv 1<-0"]
