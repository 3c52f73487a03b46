"""What is summed over ranks is summed once, in any order of forwards, backwards, evaluations and `no_sync` blocks.

The expected gradients are sums over ranks of gradients of one device, of float64 models, computed apart.
"""

import numpy as np
import pytest

from minidist.base.memory import account_memory
from minidist.comm import SimWorld
from minidist.core.autograd import AutogradError, Tensor, no_grad
from minidist.core.base.errors import UsageError
from minidist.core.nn import MLP
from minidist.core.nn.flat import FlatParameters
from minidist.optim import SGD
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.zero import ZeroOptimizer

RANKS = 3


def model():
    return MLP([3, 4, 2], dtype=np.float64)


def rows(number, rank):
    return np.random.default_rng(100 * number + rank).standard_normal((5, 3))


def loss(module, number, rank):
    return (module(Tensor(rows(number, rank))) ** 2).sum()


def single(*numbers):
    """The sum over all ranks and the batches `numbers`, without any communication."""
    total = 0.0
    for number in numbers:
        for rank in range(RANKS):
            one = model()
            flat = FlatParameters(one.parameters())
            loss(one, number, rank).backward()
            total = total + flat.grad
    return total


def check(program, *numbers):
    """program(ddp, rank) must leave the sum of the batches `numbers` on every rank."""

    def run(comm):
        ddp = DistributedDataParallel(model(), comm, reduction="sum")
        program(ddp, comm.rank)
        return ddp.flat.grad.copy()

    for gradient in SimWorld(RANKS).run(run):
        assert np.allclose(gradient, single(*numbers), rtol=1e-12, atol=1e-12)


def test_an_evaluation_before_the_step_does_not_lose_the_gradient():
    def program(comm):
        ddp = DistributedDataParallel(model(), comm, reduction="sum")
        before = ddp.flat.data.copy()
        loss(ddp, 0, comm.rank).backward()
        with no_grad():
            ddp(Tensor(rows(7, comm.rank)))
        SGD(ddp.flat, lr=0.5).step()
        return before, ddp.flat.data.copy()

    for before, after in SimWorld(RANKS).run(program):
        assert np.allclose(after, before - 0.5 * single(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("direct", [False, True])
def test_two_forwards_then_two_backwards(direct):
    def program(ddp, rank):
        called = ddp.module if direct else ddp
        first, second = loss(called, 0, rank), loss(called, 1, rank)
        first.backward()
        second.backward()

    check(program, 0, 1)


def test_each_parameter_reads_as_the_whole_sum_in_between():
    def program(ddp, rank):
        loss(ddp, 0, rank).backward()
        for parameter in ddp.flat.parameters:
            assert np.allclose(parameter.grad.reshape(-1), single(0)[ddp.flat.slice_of(parameter)])
        loss(ddp, 1, rank).backward()
        loss(ddp, 2, rank).backward()

    check(program, 0, 1, 2)


def test_no_sync_belongs_to_the_graph_and_not_to_the_latest_forward():
    def evaluation_in_between(ddp, rank):
        first = loss(ddp, 0, rank)
        with ddp.no_sync(), no_grad():
            ddp(Tensor(rows(7, rank)))
        first.backward()

    def forward_first(ddp, rank):
        with ddp.no_sync():
            first = loss(ddp, 0, rank)
        second = loss(ddp, 1, rank)
        first.backward()
        second.backward()

    def forward_last(ddp, rank):
        second = loss(ddp, 1, rank)
        with ddp.no_sync():
            first = loss(ddp, 0, rank)
        first.backward()
        second.backward()

    def backward_in_the_block(ddp, rank):
        first = loss(ddp, 0, rank)
        with ddp.no_sync():
            first.backward()

    check(evaluation_in_between, 0)
    check(forward_first, 0, 1)
    check(forward_last, 0, 1)
    check(backward_in_the_block, 0)


def test_a_reduced_pass_then_a_local_one_then_a_reduced_one():
    def program(ddp, rank):
        loss(ddp, 0, rank).backward()
        with ddp.no_sync():
            loss(ddp, 1, rank).backward()
        with pytest.raises(AutogradError, match="partly summed over ranks"):
            _ = ddp.flat.grad
        loss(ddp, 2, rank).backward()

    check(program, 0, 1, 2)


def test_an_unused_parameter_keeps_its_earlier_sum():
    """Zeros take part in the second pass; the first one's sum, there already, is not summed again."""

    class Skipping(MLP):
        def forward(self, x):
            return super().forward(x) if not self.skip else x @ np.ones((3, 2)) * self.layers[-1].bias

    def program(comm):
        module = Skipping([3, 4, 2], dtype=np.float64)
        module.skip = False
        ddp = DistributedDataParallel(module, comm, reduction="sum", find_unused_parameters=True, bucket_cap_mb=1e-5)
        loss(ddp, 0, comm.rank).backward()
        module.skip = True
        loss(ddp, 1, comm.rank).backward()
        return ddp.flat.grad[ddp.flat.slice_of(module.layers[0].weight)].copy()

    for gradient in SimWorld(RANKS).run(program):
        assert np.allclose(gradient, single(0)[: gradient.size], rtol=1e-12, atol=1e-12)


def test_the_usual_loop_keeps_one_gradient():
    """zero_grad, forward, backward, step: nothing is set aside, so no second gradient is ever allocated."""

    def program(comm):
        with account_memory() as account:
            ddp = DistributedDataParallel(model(), comm)
            for number in range(3):
                ddp.flat.zero_grad()
                loss(ddp, number, comm.rank).backward()
            return account.peak_by_purpose["gradient"], ddp.flat.data.nbytes

    for peak, one in SimWorld(RANKS).run(program):
        assert peak == one


@pytest.mark.parametrize(("wrap", "everything"), [("ddp", False), ("ddp", True), ("zero", False)])
def test_a_parameter_that_was_frozen_at_construction_is_named(wrap, everything):
    def program(comm):
        module = model()
        for parameter in list(module.parameters())[: None if everything else 1]:
            parameter.requires_grad = False
        if wrap == "zero":
            ZeroOptimizer(module, SGD, comm=comm, lr=0.1)
        else:
            DistributedDataParallel(module, comm)
        next(module.parameters()).requires_grad = True
        loss(module, 0, comm.rank).backward()

    with pytest.raises(UsageError, match=r"'layers\.0\.weight' was frozen"):
        SimWorld(RANKS).run(program)
