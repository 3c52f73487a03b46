"""The museum's pipeline wing: each bug planted in the runtime, or handed to the judge as a plan, must turn a check red."""

import numpy as np
import pytest

from minidist.autograd import DeferredWeights, Parameter, Tensor
from minidist.base.errors import MinidistError
from minidist.comm import SimWorld
from minidist.optim import SGD
from minidist.pipeline.plan import from_text, get_schedule
from minidist.pipeline.post_validation import PostValidatedPipeline
from minidist.pipeline.runtime import Pipeline, PipelineStage, messages, pipeline, shared, split_model
from minidist.pipeline.validate import PlanError, validate
from tests.pipeline import test_runtime
from tests.pipeline.cases import mlp, mlp_batches, mlp_loss, plan_of

RED = (AssertionError, MinidistError)


class TwoSites:
    """x @ w @ w: one weight at two sites of one stage."""

    def __init__(self):
        self.w = Parameter(np.array([[1.0, 2.0], [3.0, -1.0]]), name="w")

    def parameters(self):
        return [self.w]

    def __call__(self, x):
        return x @ self.w @ self.w


def two_sites_under_zero_bubble():
    def main(comm):
        stage = PipelineStage(TwoSites(), 0)
        ones = [np.ones((1, 2))] * 2
        Pipeline(comm, plan_of("zb-h1", 1, 2), [stage], lambda y, t: (y * Tensor(t)).sum()).step(ones, ones)
        return stage.flat.grad.copy()

    w, one = np.array([[1.0, 2.0], [3.0, -1.0]]), np.ones((1, 2))
    once = (one @ w).T @ one + one.T @ (one @ w.T)
    assert np.array_equal(SimWorld(1).run(main)[0], 2 * once.reshape(-1))


def one_receive_buffer(monkeypatch):
    """1: a stage receives every micro-batch into the same buffer."""
    buffers, empty = {}, np.empty

    class Shared:
        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def empty(shape, dtype):
            return buffers.setdefault((shape, str(dtype)), empty(shape, dtype))

    monkeypatch.setattr(messages, "np", Shared())


def data_axis_before_tied(monkeypatch):
    """13: replicas are summed before the copies of the tied embedding are."""
    add, step = shared.SharedGradients.add, Pipeline.step
    monkeypatch.setattr(shared.SharedGradients, "add", lambda self: None)

    def late(self, *batches):
        losses = step(self, *batches)
        add(self.shared)
        return losses

    monkeypatch.setattr(Pipeline, "step", late)


def tied_copies_apart(monkeypatch):
    """13: each copy keeps the gradient of its own site."""
    monkeypatch.setattr(shared.SharedGradients, "add", lambda self: None)


def largest_buffer(monkeypatch):
    """18: all micro-batches are received into buffers of the first one's size."""
    exchange = pipeline.exchange_shapes

    def largest(comm, home, stages, inputs, run):
        borders = exchange(comm, home, stages, inputs, run)
        borders.meta = {(a, b, i): borders.meta.get((a, b, 0), meta) for (a, b, i), meta in borders.meta.items()}
        return borders

    monkeypatch.setattr(pipeline, "exchange_shapes", largest)


def twice(monkeypatch):
    """22: the put-off pass counts a weight again at its second site."""
    add = DeferredWeights.add

    def doubled(self, parameter, *rest):
        if any(work[0] is parameter for work in self._work):
            add(self, parameter, *rest)
            self._owner.sites[parameter] += 1
        add(self, parameter, *rest)

    monkeypatch.setattr(DeferredWeights, "add", doubled)


class OverflowsOnRank0(PostValidatedPipeline):
    """In its second step a gradient of rank 0, and of nobody else, is infinite."""

    def _sum_gradients(self):
        super()._sum_gradients()
        self.now = getattr(self, "now", -1) + 1
        if self.comm.rank == 0 and self.now == 1:
            self.flats[0].grad[0] = np.inf


def overflow_on_one_rank():
    def main(comm):
        stages, _ = split_model(mlp(2), 2, [comm.rank])
        pipe = OverflowsOnRank0(comm, plan_of("zb-h1", 2, 3), stages, mlp_loss, lambda flat: SGD(flat, lr=0.125))
        for step in range(3):
            pipe.step(*mlp_batches(3, step))
        return [verdict.outcome for verdict in pipe.finish()]

    assert SimWorld(2).run(main) == [["kept", "skipped", "kept"]] * 2


def overflow_seen_by_one_rank(monkeypatch):
    """15: each rank judges its own gradients: one skips the step, the others make it."""
    original = PostValidatedPipeline._coefficient

    def own(self, squares):
        return original(self, float(sum(blocks.sum() for blocks in self._sums.values())))

    monkeypatch.setattr(PostValidatedPipeline, "_coefficient", own)


def ragged_gpt():
    test_runtime.equal_gpt(plan_of("1f1b", 2, 3), steps=1)


def one_size_fits():
    test_runtime.equal_gpt(plan_of("gpipe", 2, 4), steps=2)


def data_axis():
    test_runtime.test_with_a_data_axis("1f1b")


PLANTED = [
    (one_receive_buffer, one_size_fits), (tied_copies_apart, one_size_fits), (data_axis_before_tied, data_axis),
    (tied_copies_apart, data_axis), (largest_buffer, ragged_gpt), (overflow_seen_by_one_rank, overflow_on_one_rank), (twice, two_sites_under_zero_bubble),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "check"), PLANTED)
def test_a_planted_bug_is_caught(plant, check, monkeypatch):
    check()
    plant(monkeypatch)
    with pytest.raises(RED):
        check()


ORDER_21 = "rank 0: 2SEND_F1 0F2 0SEND_F2 2RECV_B0\nrank 1: 3RECV_F1 3SEND_B0 3F1 3B1 1RECV_F2\n"


def test_21_an_order_that_deadlocks_with_synchronous_sends_only():
    with pytest.raises(PlanError, match=r"deadlock with synchronous sends: rank 0 at 0SEND_F2 .* rank 1 at 3SEND_B0 waits for 2RECV_B0"):
        validate(from_text(ORDER_21))


def test_21_in_a_whole_plan():
    """Complete in every other respect: with both sends after the receives that they need, it passes."""
    rank0 = "0F0 {a} {b} 0B0"
    rank1 = "1RECV_F0 1F0 1B0 1SEND_B0"
    good = from_text(f"{rank0.format(a='0RECV_B0', b='0SEND_F0')}\n{rank1}\n")
    validate(good)
    crossed = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1\n"
    with pytest.raises(PlanError, match="deadlock with synchronous sends"):
        validate(from_text(crossed))


def test_24_the_last_ranks_micro_batches_are_numbered_from_one():
    plan = get_schedule("1f1b").plan(3, 3)
    last = plan.to_text().splitlines()[-1].replace("2F2", "2F3").replace("2F1", "2F2").replace("2F0", "2F1")
    with pytest.raises(PlanError, match="rank 2: 2B0 stands before 2F0"):
        validate(from_text("\n".join([*plan.to_text().splitlines()[:-1], last])))
