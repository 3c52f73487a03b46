"""Shards in, tensors out; every damage is one sentence; a crash at any write leaves the previous checkpoint."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from minidist.base.half import named_dtype
from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.job.checkpoint import Checkpoint, CheckpointShard, ReplicaId, Storage, save
from minidist.job.checkpoint.directory import _digest, save_bytes
from tests.cases import each

SHAPES = {"a": (7, 3), "b": (5,), "c": (2, 2, 2)}


def values(version):
    return {
        name: np.random.default_rng([version, i]).standard_normal(shape).astype(np.float32)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def sharded(comm, version):
    """Every tensor cut over the ranks."""
    for name, array in values(version).items():
        start = offsets(chunk_sizes(array.size, comm.size))[comm.rank : comm.rank + 2]
        if start[0] < start[1]:
            yield CheckpointShard(name, array.shape, array.reshape(-1)[start[0] : start[1]], start[0], start[1])


def write(comm, directory, version, storage=None):
    return save(comm, directory, version, list(sharded(comm, version)), {"version": version}, storage)


def assert_holds(directory, version):
    checkpoint = Checkpoint(directory)
    assert (checkpoint.step, checkpoint.state) == (version, {"version": version})
    assert set(checkpoint.tensors) == set(SHAPES)
    for name, array in values(version).items():
        assert np.array_equal(checkpoint.tensor(name), array)


def record_of(directory):
    """The metadata of the checkpoint of step 1, without their checksum."""
    record = json.loads((directory / "step-00000001" / "metadata.json").read_bytes())
    del record["checksum"]
    return record


def edit(directory, record):
    """Write the metadata with the checksum that belongs to them."""
    body = json.dumps({**record, "checksum": _digest(json.dumps(record).encode())})
    (directory / "step-00000001" / "metadata.json").write_text(body)


@settings(max_examples=30)
@given(ranks=st.integers(1, 5), start=st.integers(0, 21), length=st.integers(0, 21))
def test_any_range_can_be_read_whoever_wrote_it(ranks, start, length, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    SimWorld(ranks).run(write, directory, 1)
    stop = min(21, start + length)
    assert np.array_equal(
        Checkpoint(directory).read("a", start, max(start, stop)), values(1)["a"].reshape(-1)[start : max(start, stop)]
    )
    assert_holds(directory, 1)


def test_boxes_of_a_two_dimensional_split(tmp_path):
    def main(comm):
        whole, columns = np.arange(24.0).reshape(4, 6), (3 * comm.rank, 3 * comm.rank + 3)
        save(
            comm, tmp_path, 1, [CheckpointShard("w", whole.shape, whole[:, slice(*columns)], box=((0, 4), columns))], {}
        )

    SimWorld(2).run(main)
    assert np.array_equal(Checkpoint(tmp_path).tensor("w"), np.arange(24.0).reshape(4, 6))
    assert np.array_equal(Checkpoint(tmp_path).read("w", 2, 9), np.arange(2.0, 9.0))


@each("dtype", ["float32", "float64", "float16", "bfloat16", "bool"])
@each("kept", [0.0, 0.2, 1.0])
def test_sparse_shards_store_what_is_not_zero_and_a_bit_for_each_element(dtype, kept, tmp_path):
    draws = np.random.default_rng(0)
    whole = (draws.random(1001) < kept) * draws.uniform(1, 2, 1001)
    if 0 < kept < 1:
        whole[:3] = -0.0, np.nan, np.inf  # a zero with a sign is kept
    whole = whole.astype(named_dtype(dtype))

    def main(comm):
        start, stop = offsets(chunk_sizes(1001, comm.size))[comm.rank : comm.rank + 2]
        save(comm, tmp_path, 1, [CheckpointShard("w", (7, 143), whole[start:stop], start, stop, sparse=True)], {})

    SimWorld(3).run(main)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensor("w").tobytes() == whole.tobytes()
    assert checkpoint.read("w", 300, 700).tobytes() == whole[300:700].tobytes()

    # In the files: the values, and an eighth of a byte for each element.
    found = np.count_nonzero(whole.view(f"u{whole.itemsize}"))
    expected = 3 * 42 + (0 if dtype == "bool" else found * whole.itemsize)
    files = [load_file(path) for path in sorted(checkpoint.path.glob("*.safetensors"))]
    assert sum(array.nbytes for file in files for array in file.values()) == expected


@pytest.mark.parametrize(
    ("kept", "why"), [(5, "has 3 values and not 5"), (1, "has 3 values and not 1"), (10**6, "that keeps")]
)
def test_a_sparse_shard_that_does_not_fit_its_metadata_is_refused(kept, why, tmp_path):
    array = np.array([0, 1, 0, 2, 3], np.float32)
    SimWorld(1).run(lambda comm: save(comm, tmp_path, 1, [CheckpointShard("w", (5,), array, sparse=True)], {}))
    record = record_of(tmp_path)
    record["tensors"]["w"]["pieces"][0]["kept"] = kept
    edit(tmp_path, record)
    with pytest.raises(UsageError, match=why):
        Checkpoint(tmp_path).tensor("w")


def test_replicas_are_written_once_and_by_turns(tmp_path):
    def main(comm):
        shards = [
            CheckpointShard(name, array.shape, array, replica=ReplicaId(comm.rank, comm.size))
            for name, array in values(1).items()
        ]
        save(comm, tmp_path, 1, shards, {"version": 1})

    SimWorld(3).run(main)
    assert_holds(tmp_path, 1)
    checkpoint = Checkpoint(tmp_path)
    assert all(len(entry["pieces"]) == 1 for entry in checkpoint.tensors.values())


def test_who_writes_a_replica_does_not_depend_on_what_else_a_rank_has(tmp_path):
    def main(comm):
        names = [f"shared {i}" for i in range(30)]
        shards = [CheckpointShard(name, (2,), np.ones(2), replica=ReplicaId(comm.rank, comm.size)) for name in names]
        own = [CheckpointShard(f"own {comm.rank}.{i}", (1,), np.ones(1)) for i in range(comm.rank)]
        save(comm, tmp_path, 1, [*own, *shards], {"version": 1})

    SimWorld(3).run(main)
    tensors = Checkpoint(tmp_path).tensors
    writers = [tensors[f"shared {i}"]["pieces"][0]["file"] for i in range(30)]
    assert set(writers) == {f"rank-000{r}.safetensors" for r in range(3)}


class Killed(Exception):
    pass


class Fatal(Storage):
    """Dies at operation number `at`; a write is cut in half first."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def do(self, name, *arguments, dying=lambda: None):
        self.count += 1
        if self.count - 1 == self.at:
            dying()
            raise Killed
        getattr(super(), name)(*arguments)

    def make(self, path):
        self.do("make", path)

    def write(self, path, data):
        self.do("write", path, data, dying=lambda: path.write_bytes(data[: len(data) // 2]))

    def remove(self, path):
        self.do("remove", path)

    def rename(self, source, target):
        self.do("rename", source, target)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_at_any_write_the_checkpoint_before_it_still_loads(victim, tmp_path):
    SimWorld(3).run(write, tmp_path, 1)
    for at in range(100):
        fatal = Fatal(at)
        try:
            SimWorld(3).run(lambda comm, fatal=fatal: write(comm, tmp_path, 2, fatal if comm.rank == victim else None))
        except Killed:
            assert_holds(tmp_path, 1)
            continue
        break
    assert at == (10 if victim == 0 else 2)  # make, tensors, list, metadata, 3 lists away, rename, latest, rename
    assert_holds(tmp_path, 2)


@each("at", range(9))
def test_saving_a_step_again_does_not_touch_the_first_one(at, tmp_path):
    first = SimWorld(2).run(write, tmp_path, 1)[0]
    with pytest.raises(Killed):
        SimWorld(2).run(lambda comm: write(comm, tmp_path, 1, Fatal(at) if comm.rank == 0 else None))
    assert_holds(tmp_path, 1)
    assert Checkpoint(tmp_path).path == first


DAMAGE = {
    "is missing": lambda path, data: path.unlink(),
    "B instead of": lambda path, data: path.write_bytes(data[:-3]),
    "checksum": lambda path, data: path.write_bytes(data[:-1] + bytes([data[-1] ^ 1])),
    "damaged": lambda path, data: path.write_bytes(data[:9] + bytes([data[9] ^ 255]) + data[10:]),
}


@each("words", DAMAGE)
def test_damage_is_one_sentence_that_names_file_and_tensor(words, tmp_path):
    SimWorld(2).run(write, tmp_path, 1)
    path = tmp_path / "step-00000001" / "rank-0001.safetensors"
    DAMAGE[words](path, path.read_bytes())
    with pytest.raises(UsageError, match=words) as caught:
        [Checkpoint(tmp_path).tensor(name) for name in SHAPES]
    assert "rank-0001.safetensors" in str(caught.value)
    assert any(f"tensor {name!r}" in str(caught.value) for name in SHAPES)


def test_the_remedy_names_the_newest_checkpoint_before_a_damaged_one(tmp_path):
    for version in (1, 2, 3, 10):
        SimWorld(2).run(write, tmp_path, version)
    (tmp_path / "step-00000010" / "rank-0001.safetensors").unlink()
    with pytest.raises(UsageError, match=r"or write step-00000003 into '.*latest' to use that one$"):
        Checkpoint(tmp_path).tensor("a")
    (tmp_path / "step-00000001" / "metadata.json").write_text("{}")
    with pytest.raises(UsageError, match="damaged; there is no older checkpoint next to it, so train anew in another"):
        Checkpoint(tmp_path, "step-00000001")


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(UsageError, match="has no checkpoint"):
        Checkpoint(tmp_path)
    SimWorld(1).run(write, tmp_path, 1)
    with pytest.raises(UsageError, match="has no tensor 'd'"):
        Checkpoint(tmp_path).read("d")


@pytest.mark.parametrize("ranges", [[(0, 3)], [(0, 3), (2, 5)]])
def test_gaps_and_overlaps_are_refused(ranges, tmp_path):
    with pytest.raises(UsageError, match=r"each must be in one: give .* CheckpointShard\(\.\.\., replica=ReplicaId"):
        SimWorld(1).run(
            lambda comm: save(
                comm, tmp_path, 1, [CheckpointShard("b", (5,), np.zeros(b - a), a, b) for a, b in ranges], {}
            )
        )


def test_only_the_token_of_the_save_is_sent(tmp_path):
    world = SimWorld(4)
    world.run(write, tmp_path, 1)
    assert sum(trace.bytes_by_purpose()["checkpoint"] for trace in world.traces) == save_bytes(4) == 3 * 16


@pytest.mark.mpi(3)
def test_mpi_writes_what_one_process_reads(comm):
    import tempfile
    from pathlib import Path

    directory = comm.recv_object(0) if comm.rank else tempfile.mkdtemp()
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.send_object(directory, rank)
    write(comm, Path(directory), 1)
    assert_holds(directory, 1)


def test_what_a_killed_save_left_is_not_in_the_next_one(tmp_path):
    left = tmp_path / ".saving"
    left.mkdir()
    for name in ("rank-0003.safetensors", "rank-0003.json", "metadata.json"):
        (left / name).write_bytes(b"of another save")
    (path,) = SimWorld(1).run(write, tmp_path, 1)
    assert sorted(file.name for file in path.iterdir()) == ["metadata.json", "rank-0000.safetensors"]
    assert_holds(tmp_path, 1)
