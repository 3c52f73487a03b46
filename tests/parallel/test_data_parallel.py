"""DistributedDataParallel equals one device: exactly on integers, bit for bit in rank order on anything, at every size.

Each of the checks is shown to fail with the bug that it is for in tests/museum.
"""

from contextlib import nullcontext

import numpy as np
import pytest

from minidist.collectives.closed_forms import volume
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base.errors import CommunicationError, MismatchError
from minidist.core.collectives import all_reduce
from minidist.core.nn import MLP, Linear, Module
from minidist.optim import SGD
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.unreduced import UnusedParameterError
from minidist.parallel.zero import ZeroOptimizer
from tests.cases import each
from tests.parallel.replicas import (
    ROWS,
    WIDTH,
    Nested,
    batch,
    gradient_of,
    integers,
    ordered_gradient,
    run,
    shard,
    with_integer_weights,
)

RANKS = [1, 2, 3, 4, 5, 8]
TINY = 1e-4  # MB: 100 B, so that every parameter is a separate bucket


def trained(comm, model, arrays, scale=1.0, **options):
    """The wrapped model after one forward and backward on this rank's rows."""
    ddp = DistributedDataParallel(model, comm, **options)
    run(ddp, shard(arrays, comm.rank, comm.size), scale)
    return ddp


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", ["ring", "ordered", "naive"])
@pytest.mark.parametrize("cap", [25.0, TINY])
def test_integers_are_exact_with_ragged_shards(ranks, algorithm, cap):
    expected = gradient_of(with_integer_weights(Nested(np.float64)), integers())
    assert np.max(np.abs(expected)) < 2**53

    def program(comm):
        model = with_integer_weights(Nested(np.float64))
        options = {"reduction": "sum", "algorithm": algorithm, "bucket_cap_mb": cap}
        return trained(comm, model, integers(), **options).flat.grad.copy()

    for gradient in SimWorld(ranks).run(program):
        assert np.array_equal(gradient, expected)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_mean_of_equal_shards_is_the_mean_over_the_batch(ranks):
    rows = 4 * ranks
    expected = gradient_of(with_integer_weights(Nested(np.float64)), integers(rows=rows), 1 / rows)

    def program(comm):
        model = with_integer_weights(Nested(np.float64))
        return trained(comm, model, integers(rows=rows), 1 / 4, reduction="mean").flat.grad.copy()

    for gradient in SimWorld(ranks).run(program):
        if ranks in (1, 2, 4, 8):
            assert np.array_equal(gradient, expected)
        else:  # a third and a fifth are rounded
            assert np.max(np.abs(gradient - expected)) <= 1e-12 * np.max(np.abs(expected))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("cap", [25.0, TINY])
@pytest.mark.parametrize("eager_bytes", [0, 1 << 20])
def test_any_data_to_the_bit_in_rank_order(ranks, cap, eager_bytes):
    expected = ordered_gradient(Nested, [[shard(batch(), r, ranks)] for r in range(ranks)])

    def program(comm):
        return trained(
            comm, Nested(), batch(), reduction="sum", algorithm="ordered", bucket_cap_mb=cap
        ).flat.grad.copy()

    for gradient in SimWorld(ranks, eager_bytes=eager_bytes).run(program):
        assert gradient.tobytes() == expected.tobytes()


@each("ranks", [1, 2, 3, 5])
@each("synchronize_each", [False, True])
def test_accumulation_over_micro_batches(ranks, synchronize_each):
    """`no_sync` for all but the last, or a reduction each: other orders of addition, each as declared."""
    k = 3
    micro = [[batch(r * k + i, rows=4) for i in range(k)] for r in range(ranks)]
    expected = ordered_gradient(Nested, micro, synchronize_each)

    def program(comm):
        ddp = DistributedDataParallel(Nested(), comm, reduction="sum", algorithm="ordered", bucket_cap_mb=TINY)
        for i in range(k):
            if synchronize_each or i == k - 1:
                run(ddp, micro[comm.rank][i])
            else:
                with ddp.no_sync():
                    run(ddp, micro[comm.rank][i])
        return ddp.flat.grad.copy()

    world = SimWorld(ranks)
    for gradient in world.run(program):
        assert gradient.tobytes() == expected.tobytes()
    sent = [trace.bytes_by_purpose().get("gradient_reduce", 0) for trace in world.traces]
    once = SimWorld(ranks)
    once.run(lambda comm: trained(comm, Nested(), batch(), algorithm="ordered", bucket_cap_mb=TINY) and None)
    factor = k if synchronize_each else 1
    assert sent == [factor * trace.bytes_by_purpose().get("gradient_reduce", 0) for trace in once.traces]


def test_zero_grad_between_forward_and_backward():
    """As many training loops do it: nothing of an earlier step may come back."""
    expected = ordered_gradient(Nested, [[shard(batch(1), r, 3)] for r in range(3)])

    def program(comm):
        ddp = trained(comm, Nested(), batch(0), reduction="sum", algorithm="ordered")
        from minidist.core.autograd import Tensor

        inputs, weights = shard(batch(1), comm.rank, comm.size)
        outputs = ddp(Tensor(inputs))
        ddp.flat.zero_grad()
        outputs.backward(weights)
        return ddp.flat.grad.copy()

    for gradient in SimWorld(3).run(program):
        assert gradient.tobytes() == expected.tobytes()


@pytest.mark.parametrize("cap", [25.0, TINY])
def test_frozen_parameters_are_neither_reduced_nor_missed(cap):
    def frozen():
        model = Nested()
        model.blocks[0].first.weight.requires_grad = False
        return model

    whole = ordered_gradient(Nested, [[shard(batch(), r, 3)] for r in range(3)])

    def program(comm):
        ddp = trained(comm, frozen(), batch(), reduction="sum", algorithm="ordered", bucket_cap_mb=cap)
        place = ddp.flat.slice_of(ddp.module.blocks[0].first.weight)
        return ddp.flat.grad.copy(), place

    world = SimWorld(3)
    for gradient, place in world.run(program):
        assert not gradient[place].any()
        kept = np.ones(gradient.size, bool)
        kept[place] = False
        assert gradient[kept].tobytes() == whole[kept].tobytes()
    elements = sum(t.bytes_by_purpose()["gradient_reduce"] for t in world.traces) // 4
    assert elements == 2 * (3 - 1) * (whole.size - WIDTH * WIDTH)


def test_a_comm_hook_replaces_the_reduction():
    """Called once a bucket, in index order, on every rank; here it reduces with its own state."""
    expected = gradient_of(with_integer_weights(Nested(np.float64)), integers())

    def program(comm):
        ddp = DistributedDataParallel(with_integer_weights(Nested(np.float64)), comm, bucket_cap_mb=TINY)
        seen = []

        def hook(state, bucket):
            state.append(bucket.index)
            bucket.buffer[...] *= 2.0
            return all_reduce(comm, bucket.buffer, algorithm="naive", async_op=True)

        ddp.register_comm_hook(seen, hook)
        run(ddp, shard(integers(), comm.rank, comm.size))
        assert seen == list(range(len(ddp.reducer.buckets)))
        return ddp.flat.grad.copy()

    for gradient in SimWorld(3).run(program):
        assert np.array_equal(gradient, 2 * expected)


@each("ranks", RANKS, sampled=6)
@each("algorithm", ["ring", "ordered"])
@each("cap", [25.0, 3e-4, TINY])
def test_each_buckets_bytes_are_the_closed_form(ranks, algorithm, cap):
    buckets = []

    def program(comm):
        ddp = trained(comm, Nested(), batch(), algorithm=algorithm, bucket_cap_mb=cap)
        buckets[:] = [bucket.slice.stop - bucket.slice.start for bucket in ddp.reducer.buckets]

    world = SimWorld(ranks)
    world.run(program)
    assert len(buckets) > 1 or cap == 25.0
    for rank, trace in enumerate(world.traces):
        sent = trace.sent("gradient_reduce")
        volumes = [volume("all_reduce", "ring", size, ranks, rank) for size in buckets]
        assert len(sent) == sum(messages for messages, _ in volumes)
        assert sum(m.nbytes for m in sent) == 4 * sum(elements for _, elements in volumes)
        assert {m.lane for m in sent} <= {"lane:world"}


assert ROWS % 2


@each("kind", ["ddp", "zero"])
@each("who", [{0}, {1}, {0, 1, 2}])
@each("through", ["wrapper", "module"])
def test_load_state_dict_on_some_ranks_or_of_other_values_is_refused(kind, who, through):
    """After wrapping; replicas would train apart. The same values on every rank are right."""

    def main(comm, values):
        model = MLP([6, 5, 3], seed=0)
        if kind == "ddp":
            wrapped = DistributedDataParallel(model, comm)
            step = SGD(wrapped.flat, lr=0.1).step
        else:
            wrapped, step = model, ZeroOptimizer(model, SGD, comm=comm, lr=0.1).step
        if comm.rank in who:
            target = wrapped if through == "wrapper" else model
            other = MLP([6, 5, 3], seed=values(comm.rank)).state_dict()
            names = list(target.state_dict())
            target.load_state_dict(dict(zip(names, other.values(), strict=True)))
        cross_entropy(wrapped(Tensor(np.ones((2, 6), np.float32))), np.array([0, 1])).backward()
        step()
        return model.state_dict()

    if len(who) == 3:
        first, *others = SimWorld(3).run(main, lambda rank: 7)
        assert all(np.array_equal(first[name], other[name]) for other in others for name in first)
        with pytest.raises(MismatchError, match=r"rank 1: load_state_dict gave its replica other values than rank 0's"):
            SimWorld(3).run(main, lambda rank: rank)
    else:
        with pytest.raises(CommunicationError, match="load_state_dict"):
            SimWorld(3).run(main, lambda rank: 7)


def test_load_state_dict_before_wrapping_needs_one_rank_only():
    def main(comm):
        model = MLP([6, 5, 3], seed=comm.rank)
        if comm.rank == 0:
            model.load_state_dict(MLP([6, 5, 3], seed=9).state_dict())
        return DistributedDataParallel(model, comm).state_dict()

    for state in SimWorld(2).run(main):
        expected = MLP([6, 5, 3], seed=9).state_dict()
        assert all(np.array_equal(state[f"module.{name}"], array) for name, array in expected.items())


@pytest.mark.parametrize("last_is_local", [False, True])
def test_a_pass_over_two_forwards_synchronizes_when_one_of_them_ran_outside_no_sync(last_is_local):
    def program(comm):
        ddp = DistributedDataParallel(Nested(), comm)
        x, y = (Tensor(np.full((2, WIDTH), comm.rank + i, np.float32)) for i in range(2))
        with ddp.no_sync() if not last_is_local else nullcontext():
            first = ddp(x)
        with ddp.no_sync() if last_is_local else nullcontext():
            second = ddp(y)
        (first.sum() + second.sum()).backward()
        return ddp.flat.grad.copy()

    mine, theirs = SimWorld(2).run(program)
    assert np.array_equal(mine, theirs)
    assert mine.any()


def test_the_pass_after_an_unused_parameter_error_begins_anew():
    class Branch(Module):
        def __init__(self):
            self.left, self.right = Linear(3, 2, dtype=np.float64), Linear(3, 2, dtype=np.float64)
            self.initialize(4)

        def forward(self, x, both):
            return self.left(x).sum() + (self.right(x).sum() if both else 0.0)

    def program(comm, fails):
        ddp = DistributedDataParallel(Branch(), comm, bucket_cap_mb=1e-5)
        x = Tensor(np.random.default_rng(comm.rank).standard_normal((4, 3)))
        if fails:
            words = r"rank \d: parameter 'right\.\w+' got no gradient.*bucket \d of 4"  # museum 17
            with pytest.raises(UnusedParameterError, match=words):
                ddp(x * 2.0, False).backward()
            ddp.zero_grad()
        ddp(x, True).backward()
        return ddp.flat.grad.copy()

    expected = SimWorld(3).run(program, False)
    for mine, theirs in zip(SimWorld(3).run(program, True), expected, strict=True):
        assert np.array_equal(mine, theirs)


def test_the_pass_after_an_error_in_the_middle_of_backward_begins_anew():
    def program(comm, fails):
        model = MLP([4, 5, 5, 3])
        ddp = DistributedDataParallel(model, comm, bucket_cap_mb=1e-5)
        x = Tensor(np.random.default_rng(comm.rank).standard_normal((4, 4)).astype(np.float32))

        def stop(parameter):
            raise RuntimeError("in a hook")

        if fails:  # the buckets of the last layers are on their way when it is raised
            remove = model.layers[0].weight.register_post_accumulate_grad_hook(stop)
            with pytest.raises(RuntimeError, match="in a hook"):
                ddp(x * 2.0).sum().backward()
            remove()
            ddp.zero_grad()
        ddp(x).sum().backward()
        return ddp.flat.grad.copy()

    expected = SimWorld(2).run(program, False)
    for mine, theirs in zip(SimWorld(2).run(program, True), expected, strict=True):
        assert np.array_equal(mine, theirs)
