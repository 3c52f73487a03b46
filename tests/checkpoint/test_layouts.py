"""A job saved on any layout of (dp, tp, pp, ep, zero) resumes on any other, with every weight and optimizer state in
its place.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.core.autograd import Parameter
from minidist.core.base.layout import Layout
from minidist.core.parallel.tensor_parallel import take_shard
from minidist.job.checkpoint import Checkpoint
from minidist.job.checkpoint.held import LocalShard
from minidist.job.checkpoint.parameter_shards import boxes_of_range, checkpoint_shards
from minidist.job.checkpoint.resume import resume_job, save_job
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.job import build
from minidist.job.train.recipe import parallelize
from minidist.job.train.trainer import train
from tests.jobs import SMALL_GPT

SMALL = SMALL_GPT | {"width": 24, "heads": 4, "clip": 0.5, "global_batch": 8, "warmup": 3, "reduction": "ordered"}
SMALL |= {"precision": "fp64"}
LAYOUTS = {
    "one device": (1, {}),
    "ZeRO 3": (4, {"zero": 3}),
    "tensor parallel": (2, {"tp": 2}),
    "tensor parallel and ZeRO": (4, {"tp": 2, "zero": 2}),
    "stages": (2, {"pp": 2}),
    "shards of stages": (4, {"pp": 2, "zero": 3}),
    "all three": (8, {"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True}),
    "parts of sequences": (4, {"cp": 2, "zero": 1}),
}


def run(layout, **values):
    ranks, flags = LAYOUTS[layout]
    return SimWorld(ranks).run(train, TrainConfig.make(**{**SMALL, **flags, **values}))


def again(comm, before, after, flags):
    """Load and save with no step between."""
    config = TrainConfig.make(**{**SMALL, **flags, "steps": 9})
    job = build(config, resolve_batches(config, comm.size), comm)
    strategy = parallelize(job, comm)
    step, losses = resume_job(before, job, strategy)
    save_job(comm, after, job, strategy, step, losses)


@settings(max_examples=4)
@given(
    before=st.sampled_from(sorted(LAYOUTS)),
    after=st.sampled_from(sorted(LAYOUTS)),
    model=st.sampled_from(["gpt", "llama"]),
)
def test_any_layout_resumes_from_any_other(before, after, model, tmp_path_factory):
    first, second = (tmp_path_factory.mktemp("checkpoint") for _ in range(2))
    run(before, steps=2, save=str(first), model=model)
    ranks, flags = LAYOUTS[after]
    SimWorld(ranks).run(again, str(first), str(second), {**flags, "model": model})
    one, two = Checkpoint(first), Checkpoint(second)
    assert one.state == two.state
    assert set(one.tensors) == set(two.tensors)
    assert any(name.startswith("optimizer/") for name in one.tensors)
    for name in one.tensors:
        assert (one.tensor(name) == two.tensor(name)).all(), name


@pytest.mark.parametrize(
    "layout", ["tensor parallel and ZeRO", "stages", pytest.param("all three", marks=pytest.mark.exhaustive)]
)
def test_on_the_same_layout_the_next_steps_have_the_bits_of_the_uninterrupted_run(layout, tmp_path):
    whole = run(layout, steps=4)
    run(layout, steps=2, save=str(tmp_path), decay="constant")
    resumed = run(layout, steps=4, save=str(tmp_path), resume=True)
    assert [r.digest for r in resumed] == [r.digest for r in whole]
    assert resumed[0].losses == whole[0].losses


def test_on_another_layout_the_next_steps_are_equal_in_the_float_tier(tmp_path):
    run("all three", steps=2, save=str(tmp_path))
    elsewhere = run("ZeRO 3", steps=4, save=str(tmp_path), resume=True)
    assert elsewhere[0].losses == pytest.approx(run("one device", steps=4)[0].losses, rel=1e-12)


def test_distributed_experts_are_saved_whole(tmp_path):
    flags = {"experts": 4, "dp": 2, "zero": 1}
    config = TrainConfig.make(**{**SMALL, **flags, "ep": 2, "steps": 2, "save": str(tmp_path / "a")})
    SimWorld(2).run(train, config)
    SimWorld(2).run(again, str(tmp_path / "a"), str(tmp_path / "b"), flags)
    one, two = Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b")
    assert all((one.tensor(name) == two.tensor(name)).all() for name in one.tensors)
    assert one.tensors["weights/transformer.h.0.mlp.fc_weight"]["shape"] == [4, 24, 96]


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_boxes_cover_a_range_once_and_in_order(shape, data):
    numbers = np.arange(np.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    stop = data.draw(st.integers(start, numbers.size))
    found = boxes_of_range(tuple(shape), start, stop)
    seen = [(first, numbers[tuple(slice(*pair) for pair in box)].reshape(-1)) for first, box in found]
    assert [n for _, values in seen for n in values.tolist()] == list(range(start, stop))
    assert all(values[0] == first for first, values in seen)


@given(
    blocks=st.sampled_from([1, 3]),
    ranks=st.integers(1, 4),
    each=st.integers(1, 3),
    other=st.integers(1, 3),
    dim=st.integers(0, 1),
    padding=st.integers(0, 2),
    data=st.data(),
)
def test_the_shards_of_all_ranks_are_the_tensor(blocks, ranks, each, other, dim, padding, data):
    padding = 0 if blocks > 1 else min(padding, ranks * each - 1)
    length = blocks * ranks * each - padding
    shape = (length, other) if dim == 0 else (other, length)
    whole = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    layout = Layout(shape, ("tp",), (dim,), blocks=blocks, padding=padding)
    result = np.zeros(shape)
    for rank in range(ranks):
        parameter = Parameter(take_shard(whole, layout, rank, ranks))
        parameter.layout = layout
        middle = data.draw(st.integers(0, parameter.size))
        for start, stop in ((0, middle), (middle, parameter.size)):
            axes = {"tp": SimpleNamespace(rank=rank, size=ranks)}
            local = LocalShard(parameter, parameter.data.reshape(-1)[start:stop], start, stop)
            for shard in checkpoint_shards("w", local, axes):
                place = tuple(slice(*pair) for pair in shard.box)
                assert not result[place].any()
                result[place] = shard.array
    assert (result == whole).all()
