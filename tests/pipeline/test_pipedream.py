"""Asynchronous pipelines against a single-device replay with the delays of the update rules, bit for bit."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.memory import account_memory
from minidist.collectives.closed_forms import volume
from minidist.comm import SimWorld
from minidist.core.autograd import Parameter, Tensor
from minidist.core.base.errors import UsageError
from minidist.core.nn import MLP
from minidist.core.pipeline.plan import lower
from minidist.core.pipeline.runtime import PipelineStage, messages, split_model
from minidist.optim import SGD
from minidist.pipeline.runtime.pipedream import WeightVersions, separate
from minidist.pipeline.runtime.versioned import VersionedPipeline
from minidist.pipeline.schedules import from_csv
from minidist.pipeline.times import Times
from minidist.pipeline.timing import time_plan
from minidist.pipeline.validate import validate
from tests.cases import each
from tests.pipeline.cases import gpt, gpt_batches, gpt_loss, make_optimizer, mlp_loss, plan_of

RULES = {
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
    return [rng.standard_normal((n, 4)).astype(np.float32) for n in rows], [
        rng.standard_normal((n, 4)).astype(np.float32) for n in rows
    ]


def replay(p, count, m, rule, optimizer, backward_rule=None):
    """One device: micro-batch t through all stages, each with the version of its rule; then the stages' updates."""
    stages, _ = split_model(model(p), p, range(p))
    steps = [make_optimizer(optimizer, stage.flat) for stage in stages]
    history = [[stage.flat.data.copy()] for stage in stages]
    for stage in stages:
        stage.flat.zero_grad()
    for t, (x, y) in enumerate(zip(*stream(count), strict=True)):
        out = Tensor(x)
        for s, stage in enumerate(stages):
            version = rule(t, s, p, m)
            stage.flat.bind(history[s][version].copy(), version)
            out = stage.module(out)
        loss = mlp_loss(out, y)
        for s, stage in enumerate(stages):
            if backward_rule is not None:
                stage.flat.bind(history[s][backward_rule(t, s, p, m)].copy(), rule(t, s, p, m))
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
    versions = WeightVersions(
        comm, plan, stages, lambda flat: make_optimizer(optimizer, flat), tied=tied, keep_history=True
    )
    losses = VersionedPipeline(comm, plan, stages, mlp_loss, versions=versions).step(*stream(plan.microbatches))
    spans = {s.name for s in comm.trace.spans if s.category == "version"}
    return losses, versions.history[comm.rank], versions.used, versions.own[comm.rank].most, spans


@each("optimizer", ["sgd", "adam"])
@each("name", RULES)
def test_every_update_equals_the_replay_with_the_delays_of_its_rule(name, optimizer):
    for p, m in [(1, 3), (2, 5), (3, 4), (4, 9), (5, 6)]:
        batches = 3 if name == "pipedream-2bw" else 1
        plan = plan_of(name, p, m, **({"batches": 3} if batches == 3 else {}))
        batch = m if batches == 3 else 1
        expected = replay(p, m * batches, batch, RULES[name], optimizer)
        results = SimWorld(p).run(run, plan, optimizer)
        facts = validate(plan)
        for s, (losses, history, used, most, spans) in enumerate(results):
            assert losses == results[0][0]
            assert len(history) == len(expected[s]) == m * batches // batch + 1
            for mine, theirs in zip(history, expected[s], strict=True):
                assert np.array_equal(mine, theirs), (name, p, m, s)
            for t in range(m * batches):
                assert used["F", s, t] == used["B", s, t] == RULES[name](t, s, p, batch)
                assert f"version {used['F', s, t]} for {s}B{t}" in spans
            assert most <= facts.weight_versions[s]
            if m >= 2 * p and name != "pipedream-2bw":
                assert most == facts.weight_versions[s]


def test_without_stashing_backward_sees_newer_weights():
    """B of t sees version t on every stage: equal to a replay with that mistake, and unlike the true gradient's
    weights.
    """
    plan = plan_of("pipedream", 3, 6, stashing=False)
    wrong = replay(3, 6, 1, RULES["pipedream"], "sgd", backward_rule=lambda t, s, p, m: t)
    right = replay(3, 6, 1, RULES["pipedream"], "sgd")
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


@pytest.mark.parametrize("p", [3, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (2, 5))])
def test_the_stability_bound_of_delayed_gradients(p):
    """w(t+1) = w(t) - lr w(t-tau), tau = p-1: stable below 2 sin(pi / (4 tau + 2)), unstable above."""
    bound = 2 * math.sin(math.pi / (4 * (p - 1) + 2))

    def main(comm, rate, count):
        stages, plan = [PipelineStage(Scale(comm.rank), comm.rank)], plan_of("pipedream", p, count)
        versions = WeightVersions(comm, plan, stages, lambda flat: SGD(flat, lr=rate), keep_history=True)
        pipe = VersionedPipeline(comm, plan, stages, lambda y, _: (y * y * 0.5).sum(), versions=versions)
        pipe.step([np.ones(1)] * count, [None] * count)
        return [abs(float(w[0])) for w in versions.history[0]] if comm.rank == 0 else None

    stable = SimWorld(p).run(main, 0.9 * bound, 400)[0]
    unstable = SimWorld(p).run(main, 1.1 * bound, 400)[0]
    assert max(stable[-20:]) < 1e-2
    assert max(unstable[-20:]) > 1e2


def test_a_stream_longer_than_there_are_tags(monkeypatch):
    expected = SimWorld(2).run(run, plan_of("pipedream", 2, 20), "adam")
    monkeypatch.setattr(messages, "TAGS", 32)  # four messages of eight tensors
    results = SimWorld(2).run(run, plan_of("pipedream", 2, 20), "adam")
    for (_, mine, *_), (_, theirs, *_) in zip(results, expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_two_streams_one_after_the_other():
    def main(comm):
        stages, _ = split_model(model(2), 2, [comm.rank])
        plan = plan_of("pipedream", 2, 3)
        versions = WeightVersions(comm, plan, stages, lambda flat: SGD(flat, lr=0.125), keep_history=True)
        pipe = VersionedPipeline(comm, plan, stages, mlp_loss, versions=versions)
        for _ in range(2):
            pipe.step(*stream(3))
        return versions.history[comm.rank], stages[0].flat.data.copy()

    for history, final in SimWorld(2).run(main):
        assert len(history) == 7
        assert np.array_equal(history[-1], final)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (plan_of("1f1b", 2, 3), "updates the weights once, at its end; run it with Pipeline alone"),
        (from_csv("0F0,0B0\n1F0,1B0\n"), "updates the weights once"),
    ],
)
def test_a_plan_with_a_flush_is_refused(plan, sentence):
    def main(comm):
        stages, _ = split_model(model(2), 2, [comm.rank])
        WeightVersions(comm, plan, stages, lambda flat: SGD(flat, lr=1.0))

    with pytest.raises(UsageError, match=sentence):
        SimWorld(2).run(main)


# --- replicated stages ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 20))
def test_noam_and_the_clock_of_replicated_plans(replicas, more):
    m = max(replicas) + more
    plan = plan_of("pipedream", sum(replicas), m, replicas=tuple(replicas))
    peak = validate(plan).peak
    on_their_way = -(-sum(replicas) // replicas[0])  # PipeDream's NOAM
    assert peak[0] == min(on_their_way, -(-m // replicas[0]))
    validate(lower(plan))
    timing = time_plan(plan)
    assert timing.peak == peak
    assert timing.lower_bound <= timing.makespan
    if len(replicas) > 1 and all(k == 1 for k in replicas):
        assert timing.idle == time_plan(plan_of("pipedream", len(replicas), m)).idle


def test_two_replicas_of_a_slow_stage_double_the_throughput():
    """Stage 0 takes twice as long: on one rank it sets the pace, on two the pipeline runs at stage 1's."""
    slow = Times([2, 1], [2, 1], [2, 1], [0])
    m = 40
    assert time_plan(plan_of("pipedream", 2, m), slow).makespan == 6 * m + 1
    assert time_plan(plan_of("pipedream", 3, m, replicas="2,1"), slow).makespan <= 3 * m + 12


@pytest.mark.parametrize(
    ("replicas", "p", "m", "sentence"),
    [
        ("2,x", 3, 6, "write the ranks of each stage, such as 2,1"),
        ("2,2", 3, 6, "make 4 ranks and there are 3"),
        ((0, 3), 3, 6, "at least one"),
        ((3, 1), 4, 2, "2 mini-batches leave a replica of the 3 without work"),
    ],
)
def test_wrong_replicas_are_one_sentence(replicas, p, m, sentence):
    with pytest.raises(UsageError, match=sentence):
        plan_of("pipedream", p, m, replicas=replicas)


# --- parameters that several stages share -----------------------------------------------------------------------------


def replay_tied(name, p, count, m, optimizer):
    """One device with two copies of wte, both with the delay of stage 0; their sums are added, stage 0's first."""
    stages, tied = split_model(gpt(p), p, range(p))
    for stage in stages:
        separate(stage, tied)
    units = {stage.number: stage.flats for stage in stages}
    steps = {
        (n, k): make_optimizer(optimizer, flat)
        for n, flats in units.items()
        for k, flat in enumerate(flats)
        if len(flat)
    }
    history = {(n, k): [flat.data.copy()] for n, flats in units.items() for k, flat in enumerate(flats)}
    rule = RULES[name]
    for t, (x, y) in enumerate(zip(*gpt_batches(count), strict=True)):
        out = x
        for n, flats in units.items():
            for k, flat in enumerate(flats):
                version = rule(t, 0 if k else n, p, m)
                flat.bind(history[n, k][version].copy(), version)
            out = stages[n].module(out)
        gpt_loss(96.0)(out, y).backward()
        if (t + 1) % m:
            continue
        if p > 1:
            total = units[0][1].grad + units[p - 1][1].grad
            for n in (0, p - 1):
                units[n][1].grad[...] = total
        for (n, k), step in steps.items():
            flat = units[n][k]
            flat.bind(history[n, k][-1].copy(), len(history[n, k]) - 1)
            step.step()
            history[n, k].append(flat.data.copy())
            flat.zero_grad()
    return history


def run_tied(comm, plan, optimizer):
    stages, tied = split_model(gpt(plan.stages), plan.stages, [comm.rank])
    versions = WeightVersions(
        comm, plan, stages, lambda flat: make_optimizer(optimizer, flat), tied=tied, keep_history=True
    )
    losses = VersionedPipeline(comm, plan, stages, gpt_loss(96.0), versions=versions).step(
        *gpt_batches(plan.microbatches)
    )
    histories = [unit.history for unit in versions.units[comm.rank]]
    final = [unit.flat.data.copy() for unit in versions.units[comm.rank]]
    return losses, histories, final, comm.trace.bytes_by_purpose().get("tied", 0)


@each("optimizer", ["sgd", "adam"])
@each("name", RULES, sampled=3)
def test_tied_embeddings_have_one_delay_and_stay_equal(name, optimizer):
    for p, m in [(1, 3), (2, 4), (3, 5), (4, 7)]:
        batch, options = (m, {"batches": 4}) if name == "pipedream-2bw" else (1, {})
        count = m * options.get("batches", 1)
        expected = replay_tied(name, p, count, batch, optimizer)
        results = SimWorld(p).run(run_tied, plan_of(name, p, m, **options), optimizer)
        for s, (losses, histories, final, sent) in enumerate(results):
            assert losses == results[0][0]
            for k, history in enumerate(histories):
                assert len(history) == len(expected[s, k]) == count // batch + 1, (name, p, s, k)
                for v, (mine, theirs) in enumerate(zip(history, expected[s, k], strict=True)):
                    assert np.array_equal(mine, theirs), (name, p, s, k, v)
                assert np.array_equal(final[k], history[-1])
            # A part, or the total, of wte (11, 8).
            assert sent == (count // batch * 11 * 8 * 8 if p > 1 and s in (0, p - 1) else 0)


def test_the_tied_copies_hold_a_bounded_number_of_versions_and_sends():
    def main(comm, m):
        with account_memory() as account:
            run_tied(comm, plan_of("pipedream", 3, m), "sgd")
        return account.peak_by_purpose.get("stash", 0), account.peak_by_purpose["communication"]

    assert SimWorld(3).run(main, 12) == SimWorld(3).run(main, 24)


def replay_tied_replicas(replicas, count, optimizer):
    """One device: own parameters in rounds of their stage's replicas, both copies of wte in rounds of the least common
    multiple of both; each is updated by the mean, in which a rank's mini-batches come first, then the ranks in order.
    """
    stages, tied = split_model(gpt(len(replicas)), len(replicas), range(len(replicas)))
    for stage in stages:
        separate(stage, tied)
    units = {(n, k): flat for n, stage in enumerate(stages) for k, flat in enumerate(stage.flats)}
    last, ahead = len(replicas) - 1, [sum(replicas[n:]) - 1 for n in range(len(replicas))]
    rounds = {key: replicas[key[0]] if key[1] == 0 else math.lcm(replicas[0], replicas[-1]) for key in units}
    delays = {(n, 0): ahead[n] // k for n, k in enumerate(replicas)}
    of_both = math.ceil(replicas[0] * (ahead[0] // replicas[0]) / math.lcm(replicas[0], replicas[-1]))
    delays |= {(n, 1): of_both for n in {0, last}}
    steps = {key: make_optimizer(optimizer, flat) for key, flat in units.items()}
    history = {key: [flat.data.copy()] for key, flat in units.items()}
    parts = {key: {} for key in units}  # of the round: replica -> sum of its gradients
    for t, (x, y) in enumerate(zip(*gpt_batches(count), strict=True)):
        for key, flat in units.items():
            version = max(0, t // rounds[key] - delays[key])
            flat.bind(history[key][version].copy(), version)
        out = x
        for stage in stages:
            out = stage.module(out)
        gpt_loss(96.0)(out, y).backward()
        for (n, k), flat in units.items():
            turn, gradient = t % replicas[n], flat.grad.copy()
            parts[n, k][turn] = parts[n, k][turn] + gradient if turn in parts[n, k] else gradient
            flat.zero_grad()
        for key, flat in units.items():
            if (t + 1) % rounds[key] and t + 1 < count:
                continue
            places = [key] if key[1] == 0 else [(0, 1), (last, 1)]
            sums = [part for place in places for _, part in sorted(parts[place].items())]
            total = sums[0].copy()
            for part in sums[1:]:
                total += part
            members = t % rounds[key] + 1
            flat.bind(history[key][-1].copy(), len(history[key]) - 1)
            flat.grad[...] = total * (1.0 / members)
            steps[key].step()
            history[key].append(flat.data.copy())
            flat.zero_grad()
        for key in units:
            if (t + 1) % rounds[key] == 0:
                parts[key] = {}
    return history


def run_tied_replicas(comm, plan, optimizer):
    (n,) = plan.stages_of(comm.rank)
    stages, tied = split_model(gpt(plan.stages), plan.stages, [n])
    versions = WeightVersions(
        comm, plan, stages, lambda flat: make_optimizer(optimizer, flat), tied=tied, keep_history=True
    )
    pipe = VersionedPipeline(comm, plan, stages, gpt_loss(96.0), versions=versions)
    losses = pipe.step(*gpt_batches(plan.microbatches))
    units = [(unit.history, unit.flat.data.copy()) for unit in versions.units[n]]
    spans = {s.name for s in comm.trace.spans if s.category == "version"}
    return n, losses, units, (versions.used, spans, versions.own[n].most), comm.trace.bytes_by_purpose()


@each("optimizer", ["sgd", "adam"], sampled=3)
@each(
    ("replicas", "m"),
    [
        ((2, 1), 6),
        ((2,), 5),
        ((2, 1), 7),
        ((1, 2), 5),
        ((3, 2), 8),
        ((1, 1, 3), 7),
        ((2, 3), 13),
        ((2, 2, 1), 8),
        ((1, 2, 1), 6),
        ((2, 1, 2), 9),
        ((4, 1), 9),
        ((2, 3, 3), 11),
    ],
)
def test_replicated_stages_with_tied_embeddings_equal_the_replay(replicas, m, optimizer):
    expected = replay_tied_replicas(replicas, m, optimizer)
    plan = plan_of("pipedream", sum(replicas), m, replicas=replicas)
    facts = validate(plan)
    tied = 0
    results = SimWorld(plan.ranks).run(run_tied_replicas, plan, optimizer)
    for rank, (n, losses, units, (used, spans, most), sent) in enumerate(results):
        assert losses == results[0][1]
        for k, (history, final) in enumerate(units):
            assert len(history) == len(expected[n, k]), (replicas, n, k)
            for v, (mine, theirs) in enumerate(zip(history, expected[n, k], strict=True)):
                assert np.array_equal(mine, theirs), (replicas, n, k, v)
            assert np.array_equal(final, history[-1])
        tied += sent.get("tied", 0)

        # A rank takes every k-th mini-batch, with the version of its stage's warm-up.
        k, first = replicas[n], rank - sum(replicas[:n])
        for t in range(first, m, k):
            assert used["F", n, t] == used["B", n, t] == max(0, t // k - (sum(replicas[n:]) - 1) // k)
            assert f"version {used['B', n, t]} for {n}B{t}" in spans
        assert {t for _, _, t in used} == set(range(first, m, k))
        assert most <= facts.weight_versions[rank]
        own = expected[n, 0][0].size
        assert sent.get("gradient_reduce", 0) == -(-m // k) * 8 * volume("all_reduce", "ring", own, k, first).elements
    updates, places = -(-m // math.lcm(replicas[0], replicas[-1])), replicas[0] + replicas[-1]
    # wte (11, 8) in float64, to the first place and back.
    assert tied == (updates * 2 * (places - 1) * 11 * 8 * 8 if len(replicas) > 1 else 0)


def test_ranks_of_a_stage_take_micro_batches_in_turn():
    plan = plan_of("pipedream", 3, 4, replicas=(2, 1))
    plan = plan.with_orders([plan.orders[1], plan.orders[0], plan.orders[2]])

    def main(comm):
        stages, tied = split_model(gpt(2), 2, plan.stages_of(comm.rank))
        WeightVersions(comm, plan, stages, lambda flat: SGD(flat, lr=1.0), tied=tied)

    with pytest.raises(
        UsageError, match=r"gives micro-batch [01] of stage 0 to rank [01]; its 2 ranks must take them in turn"
    ):
        SimWorld(3).run(main)
