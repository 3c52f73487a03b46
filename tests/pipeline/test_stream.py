"""A stream runs a short plan's order: the same actions, updates and losses as a plan that names every micro-batch."""

import math
from itertools import pairwise

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.nn import MLP
from minidist.core.pipeline.runtime import split_model
from minidist.optim.adam import Adam
from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.stream import Stream, plan_length
from minidist.pipeline.runtime.versioned import MicroBatches, VersionedPipeline
from minidist.pipeline.times import GivenTimes, Times
from tests.cases import each
from tests.pipeline.cases import gpt, gpt_loss, mlp_loss, plan_of

# (schedule, ranks of each stage, micro-batches of a step)
LAYOUTS = [
    ("pipedream", (1, 1, 1), 1),
    *(("pipedream", replicas, 1) for replicas in ((3,), (2, 1), (1, 3), (2, 3), (3, 2, 1))),
    ("pipedream-vertical-sync", (1, 1, 1, 1), 1),
    *(("pipedream-2bw", (1,) * p, m) for p, m in ((1, 2), (3, 4))),
]


def make_plan(name, replicas, size, count):
    """The plan of a stream of `count` micro-batches at least."""
    options = {}
    if name == "pipedream-2bw":
        return plan_of(name, len(replicas), size, batches=-(-count // size))
    if max(replicas) > 1:
        options["replicas"] = replicas
    return plan_of(name, sum(replicas), count, **options)


def rows(i):
    """Two rows of four features for micro-batch i, of integers."""
    return np.random.default_rng(i).integers(-3, 4, (2, 4)).astype(np.float64)


def tokens(i):
    return np.random.default_rng(i).integers(0, 11, (2, 6))


def pipeline(comm, plan, tied_model, times=None, **options):
    """A pipeline of linear layers, or of a GPT, with Adam."""
    model = gpt(plan.stages) if tied_model else MLP([4] * (plan.stages + 1), dtype=np.float64, seed=1)
    stages, tied = split_model(model, plan.stages, plan.stages_of(comm.rank))
    versions = WeightVersions(comm, plan, stages, lambda flat: Adam(flat, lr=1e-2), tied=tied)
    observers = [GivenTimes(comm, times)] if times else []
    return VersionedPipeline(
        comm,
        plan,
        stages,
        gpt_loss(24.0) if tied_model else mlp_loss,
        versions=versions,
        observers=observers,
        **options,
    )


def begin(stream, count, read=rows):
    length = stream.pipe.plan.microbatches
    stream.begin(MicroBatches(read, length, [read(0)]), MicroBatches(read, length, [read(0)]), count)


def weights(pipe):
    """What a rank holds at the end: the latest weights and optimizer state of its units."""
    units = [unit for units in pipe.versions.units.values() for unit in units]
    states = [array for unit in units for row in unit.optimizer.state.values() for array in row.values()]
    return [np.array(array) for array in [*(unit.flat.data for unit in units), *states]]


def assert_equal(one, other):
    assert len(one) == len(other)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@each(("name", "replicas", "size"), LAYOUTS, sampled=6)
def test_the_order_of_a_short_plan_is_that_of_the_full_one(name, replicas, size):
    """Every action with its transfers on every rank, and what is released behind it, of streams of many lengths."""
    period = math.lcm(*replicas, size)
    length = plan_length(sum(replicas), period)
    counts = [n * size for n in (1, 2, 3, 7, 12, 25) if n * size >= max(replicas)]

    def main(comm):
        stream = Stream(pipeline(comm, make_plan(name, replicas, size, length), False, period=period), size)
        orders = {}
        for count in counts:
            begin(stream, count)
            orders[count] = [item for _, item in stream._endless()]
            stream.done = stream.count  # nothing runs here
        return orders

    def full(comm, count):
        pipe = pipeline(comm, make_plan(name, replicas, size, count), False)
        pipe.begin([rows(i) for i in range(count)], [rows(i) for i in range(count)])
        return pipe.items

    short = SimWorld(sum(replicas)).run(main)
    for count in counts:
        for rank, items in enumerate(SimWorld(sum(replicas)).run(full, count)):
            mine = short[rank][count]
            assert mine == items, (rank, count)
            late = [a.arrived for a, b in zip(mine, items, strict=True) if a.arrived != b.arrived]
            assert late in ([], late[-1:]), (rank, count)


@each(("name", "replicas", "size"), LAYOUTS, sampled=6)
def test_a_stream_equals_the_full_plan_bit_for_bit(name, replicas, size):
    """Losses, weights and Adam's state, of two streams one after the other, in the same virtual time.

    On an MLP, or on a GPT, whose embedding is on two stages, where every stage is one rank or the first has two.
    """
    tied_model = len(replicas) > 1 and replicas[0] < 3 and name != "pipedream-2bw"
    period, read = math.lcm(*replicas, size), tokens if tied_model else rows
    lengths = [4 * size, 14 * size]
    seconds = [float(k) for k in replicas]
    times = Times(seconds, seconds, seconds, [0.0] * (len(replicas) - 1))

    def stepwise(comm):
        plan = make_plan(name, replicas, size, plan_length(sum(replicas), period))
        stream, losses = Stream(pipeline(comm, plan, tied_model, period=period, times=times), size), []
        for count in lengths:
            begin(stream, count, read)
            losses.append([loss for _ in range(count // size) for loss in stream.advance()])
        most = max(unit.most for units in stream.versions.units.values() for unit in units)
        assert most <= sum(replicas) + 1  # whatever the length: as many as ranks
        return losses, weights(stream.pipe), comm.time()

    def at_once(comm):
        losses, previous = [], None
        for count in lengths:
            pipe = pipeline(comm, make_plan(name, replicas, size, count), tied_model, times=times)
            for mine, before in zip(pipe.versions.units.values(), previous or (), strict=previous is not None):
                for unit, old in zip(mine, before, strict=True):
                    unit.flat.data[...] = old.flat.data
                    unit.optimizer.load_state_dict(old.optimizer.state_dict())
            losses.append(pipe.step([read(i) for i in range(count)], [read(i) for i in range(count)]))
            previous = list(pipe.versions.units.values())
        return losses, weights(pipe), comm.time()

    mine, theirs = (SimWorld(sum(replicas)).run(main) for main in (stepwise, at_once))
    for (losses, arrays, _), (losses_at_once, arrays_at_once, _) in zip(mine, theirs, strict=True):
        assert losses == losses_at_once
        assert_equal(arrays, arrays_at_once)
    assert max(time for *_, time in mine) == pytest.approx(max(time for *_, time in theirs), rel=1e-4)


def test_a_stream_shorter_than_a_turn_of_the_replicas():
    """Two micro-batches on a stage of three ranks: one has none, and makes the update of the others."""

    def main(comm):
        plan = make_plan("pipedream", (1, 3), 1, plan_length(4, 3))
        stream = Stream(pipeline(comm, plan, False, period=3))
        begin(stream, 2)
        losses = [stream.advance(), stream.advance()]
        return losses, weights(stream.pipe)

    results = SimWorld(4).run(main)
    assert len({str(losses) for losses, _ in results}) == 1
    for (_, mine), (_, theirs) in pairwise(results[1:]):
        assert_equal(mine, theirs)


def test_calls_at_the_wrong_time_are_one_sentence():
    def main(comm):
        plan = make_plan("pipedream", (1,), 1, plan_length(1, 1))
        with pytest.raises(UsageError, match=r"needs a VersionedPipeline with versions=WeightVersions\(...\) and p"):
            Stream(pipeline(comm, plan, False))
        with pytest.raises(UsageError, match=r"has 4 micro-batches, too few .* at least 7"):
            Stream(pipeline(comm, make_plan("pipedream", (1,), 1, 4), False, period=1))
        with pytest.raises(UsageError, match="a period of 1 micro-batches does not divide into steps of 2; give the"):
            Stream(pipeline(comm, plan, False, period=1), 2)
        plan = make_plan("pipedream", (1,), 1, plan_length(1, 2))
        stream = Stream(pipeline(comm, plan, False, period=2), 2)
        with pytest.raises(UsageError, match="5 micro-batches does not divide into steps of 2; give it a multiple"):
            begin(stream, 5)
        begin(stream, 4)
        stream.advance()
        with pytest.raises(UsageError, match="the one before it has made all its 4 micro-batches, and that has made 2"):
            begin(stream, 4)
        stream.advance()
        with pytest.raises(UsageError, match="rank 0: the stream has made all its 4 micro-batches; begin another one"):
            stream.advance()

    SimWorld(1).run(main)
