"""A checkpoint with right checksums and wrong content, written by another program: nothing is believed unchecked."""

import copy
import os
import random
import tracemalloc
from functools import partial

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.commands.generation import load_model
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import Checkpoint, CheckpointShard, save
from minidist.job.checkpoint.directory import DTYPES
from minidist.job.checkpoint.resume import resume_job
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.job import build
from minidist.job.train.recipe import parallelize
from minidist.job.train.trainer import train
from tests.cases import each
from tests.checkpoint.test_directory import SHAPES, edit, record_of, write

GPT = {"layers": 1, "width": 8, "heads": 2, "context": 4, "data": "markov", "global_batch": 2, "steps": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a small GPT, and its metadata."""
    folder = tmp_path_factory.mktemp("trained")
    SimWorld(1).run(train, TrainConfig.make(**GPT, save=str(folder)))
    return folder, record_of(folder)


def use(folder):
    """Everything that reads a checkpoint: its tensors, generation, and a resumed job."""
    checkpoint = Checkpoint(folder)
    for name in checkpoint.tensors:
        checkpoint.tensor(name)
    load_model(folder)
    config = TrainConfig.make(**{**GPT, "steps": 2})

    def main(comm):
        job = build(config, resolve_batches(config, 1), comm)
        resume_job(folder, job, parallelize(job, comm))

    SimWorld(1).run(main)


WEIGHT = "weights/transformer.wte.weight"
PIECE = ("tensors", WEIGHT, "pieces", 0)
EDITS = [
    (("tensors", WEIGHT, "shape"), [10**12, 8], "has 8000000000000 elements and its shards 128"),
    (("tensors", WEIGHT, "shape"), [128], "is float32.128.; the model has"),
    (("tensors", WEIGHT, "shape"), [-1, -128], "greater than or equal to 0"),
    (("tensors", WEIGHT, "shape"), "16", "valid list"),
    (("tensors", WEIGHT, "dtype"), "float64", "it has 128 elements of float32 instead of 128 of float64"),
    (("tensors", WEIGHT, "dtype"), "int32", "elements of float32 instead of 128 of int32"),
    (("tensors", WEIGHT, "dtype"), "object", "metadata.json"),
    (("tensors", WEIGHT, "pieces"), [], "and its shards 0"),
    (("tensors", WEIGHT, "pieces"), {}, "valid list"),
    ((*PIECE, "range"), [0, 127], "and its shards 127"),
    ((*PIECE, "range"), [0, 2**70], "metadata.json"),
    ((*PIECE, "range"), [-128, 0], "greater than or equal to 0"),
    ((*PIECE, "range"), [0, 128, 1], "at most 2 items"),
    ((*PIECE, "range"), None, "neither a range nor a box"),
    ((*PIECE, "box"), [[0, 16], [0, 8]], "neither a range nor a box"),
    ((*PIECE, "file"), "../latest", "cannot hold"),
    ((*PIECE, "file"), "/dev/zero", "cannot hold"),
    ((*PIECE, "key"), "999", "is damaged"),
    ((*PIECE, "key"), 1, "valid string"),
    ((*PIECE, "checksum"), "", "the tensor's checksum differs"),
    (("files", "rank-0000.safetensors"), 10**15, "B instead of"),
    (("files",), [], "valid dictionary"),
    (("step",), "1", "valid integer"),
    (("step",), True, "valid integer"),
    (("step",), 2, "it has 1 losses of 2 steps"),
    (("format",), "minidist-checkpoint-9", "metadata.json"),
    (("state",), [], "valid dictionary"),
    (("state",), {}, "not one of minidist train"),
    (("state", "losses"), "1.5", "losses: Input should be a valid list"),
    (("state", "losses"), [None], r"losses\.0"),
    (("state", "optimizer_steps"), -1, "optimizer_steps"),
    (("state", "optimizer_steps"), 1.5, "optimizer_steps"),
    (("state", "global_batch"), "2", "global_batch"),
    (("state", "scalars"), {"loss_scale.scale": "x"}, "scalars"),
    (("state", "config"), [], "config: Input should be a valid dictionary"),
    (("state", "config", "layers"), 10**6, "--layers 1000000"),
    (("state", "config", "layers"), 9_999, "describes a model of 9999 layers"),
    (("state", "config", "layers"), 0, "--layers 0"),
    (("state", "config", "width"), 10**9, "the model has"),
    (("state", "config", "context"), 10**9, "describes a model"),
    (("state", "config", "experts"), 10**6, "describes a model"),
    (("state", "config", "heads"), 3, "multiple of"),
    (("state", "config", "model"), "llama", "has no tensor"),
    (("state", "config", "hats"), 1, "unknown setting"),
]


@each(("place", "value", "sentence"), EDITS, ids=[f"{'.'.join(map(str, e[0]))}={e[1]}" for e in EDITS])
def test_an_edit_with_the_right_checksum_is_one_sentence(place, value, sentence, trained):
    folder, record = trained
    edited = copy.deepcopy(record)
    parent = edited
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    edit(folder, edited)
    with pytest.raises(UsageError, match=sentence) as caught:
        use(folder)
    assert "\n" not in str(caught.value).partition("\nraised")[0]
    edit(folder, record)


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


JUNK = (
    *(None, True, -1, 0, 1, 7, 2**63, 10**400, 0.5, float("nan"), float("inf")),
    *("", "x", "../x", "float64", [], {}, [[]], [0, 1]),
)


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_random_edits_with_the_right_checksum(count, trained):
    """What is not refused in one sentence loads, and no more memory is taken than the checkpoint has."""
    folder, record = trained
    draw, outcomes = random.Random(0), {"refused": 0, "loaded": 0}
    everywhere = [path for path in places(record) if path]
    tracemalloc.start()
    for _ in range(count):
        edited = copy.deepcopy(record)
        *way, last = draw.choice(everywhere)
        parent = edited
        for key in way:
            parent = parent[key]
        if draw.random() < 0.2 and isinstance(parent, dict):
            del parent[last]
        else:
            parent[last] = draw.choice(JUNK)
        edit(folder, edited)
        try:
            use(folder)
            outcomes["loaded"] += 1
        except UsageError:
            outcomes["refused"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    edit(folder, record)
    assert outcomes["refused"] > 2 / 3 * count
    assert peak < 50e6


def test_shards_that_overlap_leave_no_element_unread(tmp_path):
    """As many elements as the tensor has, but some twice: the gap would be what is in the memory."""
    SimWorld(2).run(write, tmp_path, 1)
    record = record_of(tmp_path)
    record["tensors"]["a"]["pieces"][1]["range"] = [0, 10]  # of 21 elements: [0, 11) and [11, 21)
    edit(tmp_path, record)
    with pytest.raises(UsageError, match="element 11 of tensor 'a' is in no shard"):
        Checkpoint(tmp_path).tensor("a")


@pytest.mark.parametrize("range_", [(0, 22), (-1, 3), (5, 4)])
def test_a_range_outside_of_the_tensor(range_, tmp_path):
    SimWorld(1).run(write, tmp_path, 1)
    with pytest.raises(UsageError, match="has elements 0 to 21, not"):
        Checkpoint(tmp_path).read("a", *range_)


def test_latest_is_a_short_regular_file(tmp_path):
    """3 GB (sparse), a device, a pipe, a folder, a path that leads elsewhere, no name: all are one sentence."""
    SimWorld(1).run(write, tmp_path, 1)
    latest = tmp_path / "latest"

    def sparse():
        with latest.open("wb") as file:
            file.truncate(3 * 10**9)

    ways = (
        sparse,
        lambda: latest.symlink_to("/dev/zero"),
        lambda: os.mkfifo(latest),
        latest.mkdir,
        lambda: latest.write_text("../" + tmp_path.name + "/step-00000001"),
        lambda: latest.write_text(str(tmp_path / "step-00000001")),
        lambda: latest.write_text("."),
        lambda: latest.write_text("x" * 300),
        *(partial(latest.write_bytes, text) for text in (b"", b"step-\xb0\xff", b"step-00000002\0", b"stop-00000001")),
    )
    for way in ways:
        if latest.is_dir():
            latest.rmdir()
        else:
            latest.unlink()
        way()
        with pytest.raises(UsageError, match=r"'latest' in .* names no checkpoint .*; write step-00000001 into it"):
            Checkpoint(tmp_path)
        assert Checkpoint(tmp_path, "step-00000001").step == 1


def test_metadata_that_are_changed_or_no_object_or_never_end_are_not_read(tmp_path):
    SimWorld(1).run(write, tmp_path, 1)
    metadata = tmp_path / "step-00000001" / "metadata.json"
    changed = metadata.read_text().replace('"step": 1', '"step": 2')
    for text in (changed, "[1]", "[" * 100_000, '{"a":' * 100_000):
        metadata.write_text(text)
        with pytest.raises(UsageError, match="missing or damaged"):
            Checkpoint(tmp_path)
    metadata.unlink()
    metadata.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="missing or damaged"):
        Checkpoint(tmp_path)


def test_all_dtypes_that_can_be_saved_can_be_read(tmp_path):
    import ml_dtypes

    arrays = {name: np.ones((2, 3), ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPES}
    arrays["scalar"], arrays["empty"] = np.array(3.0), np.zeros((0, 4), np.float32)
    SimWorld(1).run(
        lambda comm: save(comm, tmp_path, 1, [CheckpointShard(n, a.shape, a) for n, a in arrays.items()], {})
    )
    for name, array in arrays.items():
        read = Checkpoint(tmp_path).tensor(name)
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert (read == array).all()
    assert set(SHAPES) == {"a", "b", "c"}
