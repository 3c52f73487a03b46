"""Asynchronous pipelines against a single-device replay with the delays of the update laws, bit for bit."""

import math

import numpy as np
import pytest

from minidist.autograd import Parameter, Tensor
from minidist.base.errors import UsageError
from minidist.comm import SimWorld
from minidist.nn import MLP
from minidist.optim import SGD
from minidist.pipeline.pipedream import PipeDream
from minidist.pipeline.plan import from_csv
from minidist.pipeline.runtime import PipelineStage, split_model
from minidist.pipeline.validate import validate
from tests.pipeline.cases import gpt, make_optimizer, mlp_loss, plan_of

LAWS = {
    "pipedream": lambda t, s, p, m: max(0, t - (p - 1 - s)),
    "pipedream-vertical-sync": lambda t, s, p, m: max(0, t - (p - 1)),
    "pipedream-2bw": lambda t, s, p, m: max(t // m - 1, 0),
}


def model(p):
    return MLP([4] * (p + 1), activation="relu", seed=p)


def stream(count):
    """Micro-batches of 2 rows, a last one of 1."""
    rng = np.random.default_rng(count)
    rows = [2] * (count - 1) + [1]
    return [rng.standard_normal((n, 4)).astype(np.float32) for n in rows], [rng.standard_normal((n, 4)).astype(np.float32) for n in rows]


def replay(p, count, m, law, optimizer, backward_law=None):
    """One device: micro-batch t through all stages, each with the version that the law names; then the stages' updates."""
    stages, _ = split_model(model(p), p, range(p))
    steps = [make_optimizer(optimizer, stage.flat) for stage in stages]
    history = [[stage.flat.data.copy()] for stage in stages]
    for stage in stages:
        stage.flat.zero_grad()
    for t, (x, y) in enumerate(zip(*stream(count), strict=True)):
        out = Tensor(x)
        for s, stage in enumerate(stages):
            version = law(t, s, p, m)
            stage.flat.bind(history[s][version].copy(), version)
            out = stage.module(out)
        loss = mlp_loss(out, y)
        for s, stage in enumerate(stages):
            if backward_law is not None:
                stage.flat.bind(history[s][backward_law(t, s, p, m)].copy(), law(t, s, p, m))
        loss.backward()
        if (t + 1) % m == 0:
            for s, stage in enumerate(stages):
                stage.flat.bind(history[s][-1].copy(), len(history[s]) - 1)
                steps[s].step()
                history[s].append(stage.flat.data.copy())
                stage.flat.zero_grad()
    return history


def run(comm, plan, optimizer):
    stages, tied = split_model(model(comm.size), comm.size, [comm.rank])
    pipe = PipeDream(comm, plan, stages, mlp_loss, lambda flat: make_optimizer(optimizer, flat), tied=tied, keep_history=True)
    losses = pipe.step(*stream(plan.microbatches))
    spans = {s.name for s in comm.trace.spans if s.category == "version"}
    return losses, pipe.history[comm.rank], pipe.versions_used, pipe.versions[comm.rank].most, spans


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", LAWS)
def test_every_update_equals_the_replay_with_the_delays_of_the_law(name, optimizer):
    for p, m in [(1, 3), (2, 5), (3, 4), (4, 9), (5, 6)]:
        batches = 3 if name == "pipedream-2bw" else 1
        plan = plan_of(name, p, m, **({"batches": 3} if batches == 3 else {}))
        batch = m if batches == 3 else 1
        expected = replay(p, m * batches, batch, LAWS[name], optimizer)
        results = SimWorld(p).run(run, plan, optimizer)
        facts = validate(plan)
        for s, (losses, history, used, most, spans) in enumerate(results):
            assert losses == results[0][0]
            assert len(history) == len(expected[s]) == m * batches // batch + 1
            for mine, theirs in zip(history, expected[s], strict=True):
                assert np.array_equal(mine, theirs), (name, p, m, s)
            for t in range(m * batches):
                assert used["F", s, t] == used["B", s, t] == LAWS[name](t, s, p, batch)
                assert f"version {used['F', s, t]} for {s}B{t}" in spans
            assert most <= facts.weight_versions[s]
            if m >= 2 * p and name != "pipedream-2bw":
                assert most == facts.weight_versions[s]


def test_without_stashing_backward_sees_newer_weights():
    """B of t sees version t on every stage: equal to a replay with that mistake, and unlike the true gradient's weights."""
    plan = plan_of("pipedream", 3, 6, stashing=False)
    wrong = replay(3, 6, 1, LAWS["pipedream"], "sgd", backward_law=lambda t, s, p, m: t)
    right = replay(3, 6, 1, LAWS["pipedream"], "sgd")
    differs = False
    for s, (_, history, used, *_) in enumerate(SimWorld(3).run(run, plan, "sgd")):
        assert all(np.array_equal(a, b) for a, b in zip(history, wrong[s], strict=True))
        assert [used["B", s, t] for t in range(6)] == list(range(6))
        differs |= not np.array_equal(history[-1], right[s][-1])
    assert differs


class Scale:
    """y = w x on stage 0; the others pass on."""

    def __init__(self, number):
        self.w = [Parameter(np.ones(1), name="w")] if number == 0 else []

    def parameters(self):
        return self.w

    def __call__(self, x):
        return x * self.w[0] if self.w else x * 1.0


@pytest.mark.parametrize("p", [2, 3, 5])
def test_the_stability_bound_of_delayed_gradients(p):
    """w(t+1) = w(t) - lr w(t-tau), tau = p-1: stable below 2 sin(pi / (4 tau + 2)), unstable above."""
    bound = 2 * math.sin(math.pi / (4 * (p - 1) + 2))

    def main(comm, rate, count):
        stage = PipelineStage(Scale(comm.rank), comm.rank)
        pipe = PipeDream(
            comm, plan_of("pipedream", p, count), [stage], lambda y, _: (y * y * 0.5).sum(), lambda flat: SGD(flat, lr=rate), keep_history=True
        )
        pipe.step([np.ones(1)] * count, [None] * count)
        return [abs(float(w[0])) for w in pipe.history[0]] if comm.rank == 0 else None

    stable = SimWorld(p).run(main, 0.9 * bound, 400)[0]
    unstable = SimWorld(p).run(main, 1.1 * bound, 400)[0]
    assert max(stable[-20:]) < 1e-2
    assert max(unstable[-20:]) > 1e2


def record(comm):
    _, history, *_ = run(comm, plan_of("pipedream", 2, 5), "adam")
    return [array.tobytes() for array in history], comm.trace.sequences()


@pytest.mark.mpi(2)
def test_mpi_has_the_same_bits_and_the_same_messages(comm):
    assert record(comm) == SimWorld(2).run(record)[comm.rank]


def test_two_streams_one_after_the_other():
    def main(comm):
        stages, _ = split_model(model(2), 2, [comm.rank])
        pipe = PipeDream(comm, plan_of("pipedream", 2, 3), stages, mlp_loss, lambda flat: SGD(flat, lr=0.125), keep_history=True)
        for _ in range(2):
            pipe.step(*stream(3))
        return pipe.history[comm.rank], stages[0].flat.data.copy()

    for history, final in SimWorld(2).run(main):
        assert len(history) == 7
        assert np.array_equal(history[-1], final)


@pytest.mark.parametrize(("plan", "sentence"), [
    (plan_of("1f1b", 2, 3), "updates them once; run it with Pipeline"),
    (from_csv("0F0,0B0\n1F0,1B0\n"), "updates them once"),
])  # fmt: skip
def test_a_plan_with_a_flush_is_refused(plan, sentence):
    def main(comm):
        stages, _ = split_model(model(2), 2, [comm.rank])
        PipeDream(comm, plan, stages, mlp_loss, lambda flat: SGD(flat, lr=1.0))

    with pytest.raises(UsageError, match=sentence):
        SimWorld(2).run(main)


def test_tied_parameters_are_refused():
    def main(comm):
        stages, tied = split_model(gpt(2), 2, [comm.rank])
        PipeDream(comm, plan_of("pipedream", 2, 3), stages, mlp_loss, lambda flat: SGD(flat, lr=1.0), tied=tied)

    with pytest.raises(UsageError, match="copies would drift apart; untie it"):
        SimWorld(2).run(main)
