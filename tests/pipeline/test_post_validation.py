"""The optimizer's step before the norm is known: equal, bit for bit, to the step that waits for it; and without its
wait.
"""

from functools import partial

import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.base.memory import account_memory
from minidist.base.traces import sequences
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.core.pipeline.runtime import split_model
from minidist.optim import DynamicLossScaler
from minidist.pipeline.runtime.clip import clip_grad_norm_
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.runtime.post_validation import PostValidation
from minidist.pipeline.runtime.skips import SkipPipeline
from minidist.pipeline.times import GivenTimes, uniform
from tests.pipeline.cases import gpt, gpt_batches, gpt_loss, make_optimizer, mlp, mlp_batches, mlp_loss, plan_of

STEPS = 5


class Scaler(DynamicLossScaler):
    """Halves at an overflow, doubles after two good steps; notes what it was told."""

    def __init__(self):
        super().__init__(8.0, growth_interval=2, hysteresis=1)
        self.words = []

    def update(self, overflow):
        self.words.append(overflow)
        super().update(overflow)


def everything(stages, optimizers):
    weights = {(s.number, p.name): np.array(p.data) for s in stages for p in s.flat.parameters}
    state = {
        (n, name, key): np.array(a)
        for n, o in optimizers.items()
        for name, row in o.state.items()
        for key, a in row.items()
    }
    return weights | state | {(n, "step"): o.step_count for n, o in optimizers.items()}


def make(comm, plan, dropout=0.1):
    return split_model(gpt(plan.stages, dropout), plan.stages, plan.stages_of(comm.rank))


def loss_of(now, scaler, bad):
    """Step `bad` of the run has an infinite loss in its last micro-batch."""

    def loss(logits, targets):
        value = gpt_loss(96.0)(logits, targets)
        value = value if scaler is None else value * scaler.scale
        if now["step"] == bad and len(targets) == 1:
            value = value * float("inf")
        return value

    return loss


def pipeline_of(comm, plan, scaled, bad):
    stages, tied = make(comm, plan)
    now, scaler = {"step": 0}, Scaler() if scaled else None
    place = lambda i: batch_coordinates(now["step"], 2 * i, 9)  # noqa: E731
    pipe = Pipeline(comm, plan, stages, loss_of(now, scaler, bad), tied=tied, coordinates=place)
    return pipe, stages, now, scaler


def waiting(comm, plan, optimizer, max_norm, scaled, bad):
    """The reference: everybody waits for the norm, then clips and steps, or skips."""
    pipe, stages, now, scaler = pipeline_of(comm, plan, scaled, bad)
    optimizers = {s.number: make_optimizer(optimizer, s.flat) for s in stages}
    told = []
    for step in range(STEPS):
        now["step"] = step
        pipe.zero_grad()
        losses = pipe.step(*gpt_batches(plan.microbatches, step))
        if scaler is not None:
            for flat in pipe.flats:
                flat.grad[...] *= 1 / scaler.scale
            losses = [value / scaler.scale for value in losses]
        norm = clip_grad_norm_(pipe, max_norm or 1e300)
        finite = np.isfinite(norm)
        for one in optimizers.values():
            one.lr_factor = 1.0 / (step + 1)
            if finite:
                one.step()
        if scaler is not None:
            scaler.update(not finite)
        told.append((norm, losses))
    return told, everything(stages, optimizers)


def optimistic(comm, plan, optimizer, max_norm, scaled, bad):
    pipe, stages, now, scaler = pipeline_of(comm, plan, scaled, bad)
    trainer = PostValidation(pipe, partial(make_optimizer, optimizer), max_norm=max_norm, scaler=scaler)
    told = []
    for step in range(STEPS):
        now["step"] = step
        for one in trainer.optimizers.values():
            one.lr_factor = 1.0 / (step + 1)
        told.append(trainer.step(*gpt_batches(plan.microbatches, step)))
    outcomes = trainer.finish()
    assert told[0] == []
    assert [repr(x) for x in told[1:]] == [repr(outcome.losses) for outcome in outcomes[:-1]]
    return (
        [(outcome.norm, outcome.losses) for outcome in outcomes],
        everything(stages, trainer.optimizers),
        [outcome.kind for outcome in outcomes],
        scaler and scaler.words,
    )


CASES = [  # the share of the steps' norms that is above max_norm
    ("1f1b", 3, 5, None, False, None),
    ("zb-h1", 3, 5, 0.5, False, None),
    ("zb-h2", 4, 8, 0.7, False, None),
    ("gpipe", 2, 3, 0.5, True, 2),
    ("zb-h2", 3, 6, None, True, 1),
    ("interleaved", 2, 4, 0.5, False, 3),
    ("zb-v", 3, 6, 0.3, True, 2),
    ("dualpipe", 2, 4, 0.5, False, 2),
    ("1f1b", 1, 2, 0.4, True, 0),
    ("zb-h1", 5, 3, 0.9, False, 4),
]


def limit(plan, optimizer, share):
    """A norm that about `share` of the steps exceed."""
    if share is None:
        return None
    told, _ = SimWorld(plan.ranks).run(waiting, plan, optimizer, None, False, None)[0]
    return float(np.quantile([norm for norm, _ in told], 1 - share))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("name", "p", "m", "share", "scaled", "bad"), CASES)
def test_it_equals_the_step_that_waits(name, p, m, share, scaled, bad, optimizer):
    plan = plan_of(name, p, m)
    max_norm = limit(plan, optimizer, share)
    with np.errstate(all="ignore"):
        expected = SimWorld(p).run(waiting, plan, optimizer, max_norm, scaled, bad)
        results = SimWorld(p).run(optimistic, plan, optimizer, max_norm, scaled, bad)
    for (told, tensors), (mine, own, outcomes, words) in zip(expected, results, strict=True):
        assert repr(mine) == repr(told)
        assert own.keys() == tensors.keys()
        for key, value in own.items():
            assert np.array_equal(value, tensors[key]), key
        assert outcomes == results[0][2]
        assert words == results[0][3]
        if bad is not None:
            assert outcomes[bad] == "skipped"
        assert ("amended" in outcomes) == (share is not None)


def timed(comm, plan, times, validated):
    stages, _ = split_model(mlp(plan.stages), plan.stages, plan.stages_of(comm.rank))
    pipe = Pipeline(comm, plan, stages, mlp_loss, observers=[GivenTimes(comm, times)])
    trainer = PostValidation(pipe, partial(make_optimizer, "sgd"), max_norm=1e300) if validated else None
    begin = comm.time()
    for step in range(4):
        batches = mlp_batches(plan.microbatches, step)
        if trainer is not None:
            trainer.step(*batches)
        else:
            pipe.step(*batches)
            clip_grad_norm_(pipe, 1e300)
            pipe.zero_grad()
    if trainer is not None:
        assert {outcome.kind for outcome in trainer.finish()} == {"kept"}
    spans = [(s.start - begin, s.end - begin) for s in comm.trace.spans if s.name[:1].isdigit()]
    return spans[-1][1] - spans[0][0] - sum(end - start for start, end in spans)


@pytest.mark.parametrize(("name", "p", "m", "each"), [("zb-h2", 4, 8, 0), ("zb-h1", 4, 8, 3), ("1f1b", 3, 6, 6)])
def test_there_is_no_wait_between_steps(name, p, m, each):
    """Idle time of four steps on the virtual clock: none for ZB-H2; a barrier after each step costs it the skew of its
    ranks each time. (Under ZB-H1 and 1F1B rank 0, which begins first, also ends last: it never waits for a norm.)
    """
    plan = plan_of(name, p, m)
    times = uniform(plan.stages)
    no_latency = {"links": LinkModel(0.0, 0.0)}
    idle = SimWorld(p, **no_latency).run(timed, plan, times, True)
    barrier = SimWorld(p, **no_latency).run(timed, plan, times, False)
    assert max(idle) == pytest.approx(4 * each)
    assert max(barrier) == pytest.approx(4 * each + (3 * (p - 1) if name == "zb-h2" else 0))


@pytest.mark.parametrize("name", ["zb-h1", "interleaved"])
def test_volume_and_stash(name):
    plan = plan_of(name, 2, 4)

    def main(comm):
        with account_memory() as account:
            stages, _ = split_model(mlp(plan.stages), plan.stages, plan.stages_of(comm.rank))
            trainer = PostValidation(Pipeline(comm, plan, stages, mlp_loss), partial(make_optimizer, "adam"))
            for step in range(3):
                trainer.step(*mlp_batches(4, step))
            trainer.finish()
        size = sum(s.flat.padded_numel for s in stages) * 8
        return comm.trace.bytes_by_purpose(), account.peak_by_purpose["stash"] / size

    first, last = SimWorld(2).run(main)
    message, hops = 8 * (1 + 4), plan.stages - 1
    assert first[0]["clip_norm"] == 3 * message * -(-hops // 2)
    assert last[0]["clip_norm"] == 3 * message * (hops // 2 + 1)
    assert "metrics" not in first[0]
    assert first[1] == last[1] == 3  # weights and two states of Adam; those of the step before are gone by then


def record(comm):
    with np.errstate(all="ignore"):
        told, tensors, outcomes, _ = optimistic(comm, plan_of("zb-h2", 2, 4), "adam", 0.4, True, 2)
    return repr(told), outcomes, {str(k): np.asarray(v).tobytes() for k, v in tensors.items()}, sequences(comm.trace)


@pytest.mark.exhaustive
@pytest.mark.mpi(2)
def test_under_mpi_it_has_the_same_bits_and_messages(comm):
    assert record(comm) == SimWorld(2).run(record)[comm.rank]


class OverflowsOnRank0(Pipeline):
    """In the second step a gradient of rank 0, and of no other rank, is infinite."""

    summed = 0  # steps

    def sum_gradients(self):
        super().sum_gradients()
        self.summed += 1
        if self.comm.rank == 0 and self.summed == 2:
            self.flats[0].grad[0] = np.inf


def test_an_overflow_on_one_rank_is_that_of_every_rank():
    def main(comm):
        stages, _ = split_model(mlp(2), 2, [comm.rank])
        pipe = OverflowsOnRank0(comm, plan_of("zb-h1", 2, 3), stages, mlp_loss)
        trainer = PostValidation(pipe, partial(make_optimizer, "sgd"))
        for step in range(3):
            trainer.step(*mlp_batches(3, step))
        return [outcome.kind for outcome in trainer.finish()]

    assert SimWorld(2).run(main) == [["kept", "skipped", "kept"]] * 2


def test_wrong_settings_are_one_sentence():
    def main(comm, plan, kind=Pipeline, **options):
        stages, _ = split_model(mlp(2), 2, plan.stages_of(comm.rank))
        pipe = kind(comm, plan, stages, lambda y, t: (y * Tensor(t)).sum())
        PostValidation(pipe, partial(make_optimizer, "sgd"), **options)

    with pytest.raises(UsageError, match="max_norm=0; it must be a finite number above 0"):
        SimWorld(2).run(main, plan_of("1f1b", 2, 2), max_norm=0)
    with pytest.raises(UsageError, match="'pipedream' updates its weights on the way"):
        SimWorld(2).run(main, plan_of("pipedream", 2, 2))
    with pytest.raises(UsageError, match="'forward-only' has no update to validate"):
        SimWorld(2).run(main, plan_of("forward-only", 2, 2, chunks=1))
    with pytest.raises(UsageError, match="a SkipPipeline sends its skips once"):
        SimWorld(2).run(main, plan_of("1f1b", 2, 2), partial(SkipPipeline, skips=[]))
