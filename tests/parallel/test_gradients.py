"""Buckets: cut from the end, whole parameters, launched in index order on every rank, while backward still runs."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.autograd import Parameter, Tensor
from minidist.core.base.errors import UsageError
from minidist.core.nn.flat import FlatParameters
from minidist.core.parallel.data_parallel import GradientReducer, make_buckets
from tests.parallel.replicas import Nested, batch, shard


def flat_of(sizes, frozen=()):
    parameters = [Parameter(np.zeros(n, np.float32), name=f"p{i}") for i, n in enumerate(sizes)]
    for i in frozen:
        parameters[i].requires_grad = False
    return FlatParameters(parameters)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 60), st.data())
def test_buckets_cover_every_trainable_parameter_once_from_the_end(sizes, cap, data):
    frozen = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    flat = flat_of(sizes, frozen)
    buckets = make_buckets(flat, cap)
    covered = [parameter.name for bucket in buckets for parameter in bucket.parameters]
    assert covered == [f"p{i}" for i in reversed(range(len(sizes))) if i not in frozen]
    for index, bucket in enumerate(buckets):
        elements = sum(parameter.size for parameter in bucket.parameters)
        assert bucket.index == index
        assert bucket.slice.stop - bucket.slice.start == elements  # no frozen one inside
        assert 4 * elements <= cap or len(bucket.parameters) == 1
    assert all(a.slice.start >= b.slice.stop for a, b in pairwise(buckets))


def test_buckets_launch_in_index_order_whatever_gets_ready_first():
    """Ranks get ready in different orders (here: reversed on odd ranks) and must not meet with different buckets."""

    def program(comm):
        flat = flat_of([4, 4, 4])
        reducer = GradientReducer(flat, comm, bucket_cap_mb=16e-6)
        launched = []
        send, reducer.send = reducer.send, lambda bucket: (launched.append(bucket.index), send(bucket))[1]
        for parameter in flat.parameters[:: -1 if comm.rank % 2 else 1]:
            parameter.accumulate(np.full(4, comm.rank + int(parameter.name[1]), np.float32))
            reducer.ready(parameter)
        reducer.finish()
        return launched, flat.grad.copy()

    for launched, gradient in SimWorld(3).run(program):
        assert launched == [0, 1, 2]
        assert np.array_equal(gradient, np.repeat([3.0, 6.0, 9.0], 4))


def test_wrong_options():
    with pytest.raises(UsageError):
        SimWorld(1).run(lambda comm: GradientReducer(flat_of([1]), comm, bucket_cap_mb=0.0))


def test_each_bucket_leaves_at_the_time_that_backward_has_reached():
    """Links without cost: time passes by the counted computation alone, a part of it between any two buckets."""

    def program(comm):
        from minidist.base.flop_counter import FlopCounter
        from minidist.parallel.data_parallel import DistributedDataParallel

        with FlopCounter() as counter:
            ddp = DistributedDataParallel(Nested(), comm, bucket_cap_mb=1e-4)
            arrays = shard(batch(), comm.rank, comm.size)
            outputs = ddp(Tensor(arrays[0]))
            comm.compute(counter.take())
            outputs.backward(arrays[1])
        return len(ddp.reducer.buckets)

    world = SimWorld(2, links=LinkModel(alpha=0.0, beta=0.0))
    buckets = world.run(program)[0]
    assert len({m.posted for m in world.traces[0].sent("gradient_reduce")}) > buckets // 2
