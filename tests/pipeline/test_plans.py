"""Plans against the closed forms, the papers' published figures, the field's grammar, and broken plans."""

import itertools
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.core.base.errors import UsageError
from minidist.core.pipeline.plan import B, F, I, Plan, W, lower
from minidist.pipeline.passes import computations, lower_blocking, recompute
from minidist.pipeline.plan_methods import show
from minidist.pipeline.schedules import from_csv, from_text, get_schedule, read, schedules
from minidist.pipeline.simulate import Dependencies
from minidist.pipeline.times import Times, parse_times, read_profile, uniform
from minidist.pipeline.timing import over_limit, time_plan
from minidist.pipeline.validate import PlanError, validate
from tests.cases import each

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8, 13) for m in sorted({1, 3, p, 2 * p - 1, 2 * p, 3 * p})]


def plan(name, p, m, v=None, **options):
    return get_schedule(name).plan(p, m, v, **options)


@cache
def takes(name, p, m):
    try:
        plan(name, p, m)
    except UsageError:
        return False
    return True


CLOSED_FORMS = (
    *("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-min", "v-half", "interleaved", "dualpipe", "dualpipev"),
    "looped-bfs",
)


def test_the_published_table():
    """T_F = T_I = T_W = 1, p = 4: idle of the worst rank in its own window, peak, versions."""
    table = {
        "gpipe": (9, [8] * 4, [1] * 4),
        "1f1b": (9, [4, 3, 2, 1], [1] * 4),
        "interleaved": (9, [11, 9, 7, 5], [1] * 4),
        "zb-h1": (3, [4] * 4, [1] * 4),
        "zb-h2": (0, [7] * 4, [1] * 4),
        "zb-v": (0, [8] * 4, [1] * 4),
        "v-min": (11, [4] * 4, [1] * 4),
        "v-half": (5, [6] * 4, [1] * 4),
        "dualpipe": (2, [5] * 4, [1] * 4),
        "pipedream": (9, [4, 3, 2, 1], [4, 3, 2, 1]),
        "pipedream-vertical-sync": (9, [4, 3, 2, 1], [4] * 4),
        "pipedream-2bw": (9, [4, 3, 2, 1], [2] * 4),
    }
    for name, (idle, peak, versions) in table.items():
        facts, timing = validate(plan(name, 4, 8)), time_plan(plan(name, 4, 8))
        assert (max(timing.idle), facts.peak, facts.weight_versions) == (idle, peak, versions), name
        assert timing.peak == peak
    assert max(time_plan(plan("dualpipe", 4, 12)).idle) == 2


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (3, 2, 1), (2, 3, 2)])
def test_closed_forms_of_time_and_memory(f, i, w):
    check_closed_forms(SIZES, f, i, w)


def check_closed_forms(sizes, f, i, w):
    """Idle, bubble and peak of every plan where the forms hold. SIZES has m = 1, 3, p, 2p-1, 2p and 3p for some p;
    all sizes up to p = 16, m = 64 are in test_exhaustive.py.
    """
    for p, m in sizes:
        for name in CLOSED_FORMS:
            if not takes(name, p, m):
                continue
            made = plan(name, p, m)
            timing = time_plan(made, uniform(made.stages, f, i, w))
            worst, stages = max(timing.idle), range(p)
            if name in ("gpipe", "1f1b"):
                assert worst == (p - 1) * (f + i + w), (name, p, m)
                assert timing.bubble_of_ideal == pytest.approx((p - 1) / m)
                assert timing.bubble_of_total == pytest.approx((p - 1) / (m + p - 1))
                assert timing.peak == ([m] * p if name == "gpipe" else [min(m, p - s) for s in stages])
            elif name in ("zb-h1", "zb-h2") and m >= 2 * p - 1:
                k = 1 if name == "zb-h1" else 2
                assert worst == max(0, (p - 1) * (f + i - k * w)), (name, p, m)
                assert timing.peak == [p if k == 1 else 2 * p - 1] * p
            elif name == "zb-h1" and m <= p and w < i:
                assert timing.cost == (m + p - 1) * (f + i) + w
            elif name == "zb-v" and f == i == w and m >= 2 * p - 1:
                assert worst == 0
                assert timing.peak == [2 * p] * p
            elif name in ("v-min", "v-half"):
                alive = (p + 4) // 3 if name == "v-min" else (p + 2) // 2
                assert max(timing.peak) == 2 * min(m, alive), (name, p, m)  # half-stage chunks
                if f == i == w and m >= p > 1:
                    assert worst == max(1, 6 * (p - alive) - 1), (name, p, m)
            elif name == "interleaved" and m >= p:
                group = m // (m // p)
                assert worst == (p - 1) * (f + i + w), (name, p, m)  # in chunk units: 1/v of the whole stage's
                assert timing.peak == [min(2 * m, group + 2 * (p - 1 - r) + 1) for r in stages]
            elif name == "looped-bfs":
                assert timing.peak == [2 * m] * p
            elif name in ("dualpipe", "dualpipev") and f == i == w:
                P = made.stages
                assert worst == (P // 2 - 1) * ((f + i + w) + (i + w) - 3 * w), (name, p, m)
                assert timing.peak == [P + 1] * p
            assert timing.lower_bound <= timing.makespan + 1e-9


def test_what_each_action_waits_for():
    """By hand, for two stages and two micro-batches; in a lowered plan the transfers stand in between."""
    made = plan("zb-h1", 2, 2)
    table = {"0F1": [], "1F1": ["0F1"], "1I1": ["1F1"], "0I1": ["0F1", "1I1"], "0W1": ["0I1"], "1W0": ["1I0"]}
    needs = Dependencies(made).needs
    assert {name: [str(needed) for needed in needs(read(name))] for name in table} == table
    table = {
        "1F1": ["0SEND_F1"],
        "0I1": ["0F1", "1SEND_B1"],
        "0W1": ["0I1"],
        "0SEND_F1": ["0F1", "1RECV_F1"],
        "1SEND_B1": ["1I1", "0RECV_B1"],
        "1RECV_F1": [],
    }
    needs = Dependencies(lower(made)).needs
    assert {name: [str(needed) for needed in needs(read(name))] for name in table} == table


def groups_of(p, m):
    """Sizes of groups that Megatron-LM takes: at least p, at most m, and p left for the last one."""
    return [group for group in range(p, m + 1) if m % group == 0 or m % group >= p]


def orders_of_torch(p, m, v, group, last):
    """ScheduleInterleaved1F1B: its warm-up, and the chunk of its n-th forward and n-th backward, by arithmetic.

    last: micro-batches of the last group, which is as large as the others in torch and may be smaller in Megatron-LM.
    """
    full = (m - last) * v  # passes before the last group

    def forward(n):
        first, size, inside = (
            (n // (group * v) * group, group, n % (group * v)) if n < full else (m - last, last, n - full)
        )
        return inside // size, first + inside % size

    for rank in range(p):
        warm_up = min(m * v, (v - 1) * group + 2 * (p - 1 - rank))
        forwards = [f"{c * p + rank}F{i}" for c, i in map(forward, range(m * v))]
        backwards = [f"{(v - 1 - c) * p + rank}B{i}" for c, i in map(forward, range(m * v))]
        expected = forwards[:warm_up]
        for n, backward in enumerate(backwards):
            expected += forwards[warm_up + n : warm_up + n + 1] + [backward]
        yield expected


# How many plans there are for 1 to 14 micro-batches, 951 in all, so that none is left out.
INTERLEAVED_PLANS = (18, 24, 30, 39, 42, 57, 51, 75, 72, 90, 87, 126, 102, 138)


@pytest.mark.parametrize(
    "m", [pytest.param(m, marks=[pytest.mark.exhaustive] * (m not in (1, 8))) for m in range(1, 15)]
)
def test_interleaved_takes_groups_larger_than_the_ranks(m):
    """torch's rounds where the caller gives no size, Megatron-LM's groups where it does; both for every size."""
    tried = 0
    for p, v in itertools.product(range(1, 6), (1, 2, 3)):
        rounds = max(1, m // p)
        if m % rounds:
            with pytest.raises(UsageError, match=f"do not make {rounds} equal groups"):
                plan("interleaved", p, m, v)
        for group in ([0] if m % rounds == 0 else []) + groups_of(p, m):
            made = plan("interleaved", p, m, v, group=group)
            size = group or m // rounds
            last = m % size or size
            orders = [[str(action) for action in made.actions(rank)] for rank in range(p)]
            assert orders == list(orders_of_torch(p, m, v, size, last))
            facts = validate(made)
            assert validate(lower(made)) == facts
            assert facts.peak == [min(m * v, (v - 1) * size + 2 * (p - 1 - r) + 1) for r in range(p)]
            tried += 1
    # Three chunk counts for each of five numbers of ranks, except where rounds do not divide, and Megatron's groups.
    assert tried == INTERLEAVED_PLANS[m - 1]


def test_the_bubble_is_of_the_longest_window_and_not_of_the_makespan():
    """ZB-H2 has no idle time in any rank's own window, which begin one after the other."""
    timing = time_plan(plan("zb-h2", 4, 8))
    assert (timing.cost, timing.bubble_of_ideal, timing.bubble_of_total) == (3 * 8, 0, 0)
    assert timing.makespan > timing.cost


def check_versions(sizes):
    for p, m in sizes:
        if m >= 2 * p:
            assert validate(plan("pipedream", p, m)).weight_versions == [p - s for s in range(p)]
            assert validate(plan("pipedream-2bw", p, m, batches=3)).weight_versions == [2] * p
            assert validate(plan("pipedream-vertical-sync", p, m)).weight_versions == [p] * p


def test_versions_are_those_of_the_update_rules():
    check_versions(SIZES)
    with pytest.raises(PlanError, match="rank 0: 0B1 would see version 1 of the weights and its forward saw version 0"):
        validate(plan("pipedream", 4, 8, stashing=False))
    validate(plan("pipedream", 4, 8, stashing=False), allow_wrong_gradients=True)


@pytest.mark.parametrize("m", [1, 9, *(pytest.param(m, marks=pytest.mark.exhaustive) for m in (*range(2, 9), 16, 20))])
def test_every_schedule_is_valid_lowered_and_timed_alike_at_every_size(m):
    for name, p in itertools.product(schedules(), (1, 2, 3, 4, 5, 8)):
        if not takes(name, p, m):
            continue
        made = plan(name, p, m)
        facts, lowered = validate(made), lower(made)
        assert validate(lowered) == facts
        assert computations(lowered) == made
        costs = uniform(made.stages, 1, 2, 1.5, comm=0.25)
        assert time_plan(made, costs).last_end == time_plan(made, costs, spans=True).last_end
        quick, full = time_plan(made), time_plan(made, spans=True)
        assert (quick.idle, quick.makespan, quick.first_start) == (full.idle, full.makespan, full.first_start)
        assert time_plan(lowered).idle == quick.idle


@each("name", ["1f1b", "gpipe", "zb-h2", "zb-v", "interleaved", "naive", "forward-only", "pipedream"], sampled=4)
def test_many_ranks_are_timed_as_by_the_simulation(name):
    made = plan(name, 64, 4 if name == "naive" else 64)
    rng = np.random.default_rng(0)
    times = Times(
        *(rng.integers(1, 9, made.stages).tolist() for _ in "FIW"), rng.integers(0, 3, made.stages - 1).tolist()
    )
    for costs in (times, uniform(made.stages)):
        full = time_plan(made, costs, spans=True)
        quick = time_plan(made, costs)
        assert quick.last_end == full.last_end
        assert (quick.first_start, quick.busy) == (full.first_start, full.busy)
    stuck = made.with_orders([list(order)[::-1] for order in made.orders])
    if name != "forward-only":
        with pytest.raises(UsageError, match=r"cannot finish: 64 ranks wait for ever, rank 0 for"):
            time_plan(stuck)


def test_orders_of_other_implementations():
    """1F1B as torch.distributed.pipelining and Megatron-LM have it; DualPipe as in its repository's README, rank 0."""
    assert (
        plan("1f1b", 3, 4).to_text()
        == "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\nrank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\nrank 2: 2F0 2B0 2F1 2B1"
        " 2F2 2B2 2F3 2B3\n"
    )
    assert (
        plan("interleaved", 2, 2).to_text()
        == "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nrank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1\n"
    )
    assert plan("gpipe", 1, 3).to_text() == "rank 0: 0F0 0F1 0F2 0B2 0B1 0B0\n"  # the paper's order
    assert plan("looped-bfs", 1, 2).to_text() == "rank 0: 0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0\n"
    assert plan("gpipe", 1, 3, backward_order="forward").to_text() == "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\n"
    assert get_schedule("ScheduleInterleaved1F1B") is get_schedule("interleaved")


def test_one_rule_makes_both_zero_bubble_schedules_and_1f1b():
    """ZB-H1 without its lag and with I and W merged is 1F1B."""
    for p, m in SIZES:
        for made, other in zip(plan("zb-h1", p, m).orders, plan("1f1b", p, m).orders, strict=True):
            assert [show(a).replace("I", "B") for a in made if "W" not in show(a)] == [show(a) for a in other]


def test_grammar_round_trips():
    for name in schedules():
        made = lower(plan(name, 4, 8))
        for back in (from_csv(made.to_csv()), from_text(made.to_text())):
            assert back.orders == made.orders
    assert read("(1F4;2B1)OVERLAP_F_B") == (F(1, 4), B(2, 1))
    assert [show(a) for a in (F(2, 0), I(1, 3), W(1, 3), read("0SEND_F1"), read("2REDUCE_GRAD"))] == [
        "2F0",
        "1I3",
        "1W3",
        "0SEND_F1",
        "2REDUCE_GRAD",
    ]
    assert from_csv("0F0,,0B0\n1F0, 1B0 ,\n\n").orders == [[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]]


@each(
    ("call", "sentence"),
    [
        (lambda: from_csv("0F0,0B0\n1F0,,1X0\n", where="my.csv"), "my.csv, line 2, cell 3: '1X0' is not an action"),
        (lambda: from_csv("0F,0B0\n"), "line 1, cell 1"),
        (lambda: from_csv("\n"), "has no action"),
        (lambda: read("(1F4;2F1)OVERLAP_F_B"), "must overlap one F with one B or I"),
        (lambda: get_schedule("1f1bb"), "unknown schedule '1f1bb' .did you mean '1f1b'"),
        (lambda: plan("1f1b", 4, 0), "--microbatches is 0; it must be at least 1"),
        (lambda: plan("interleaved", 4, 8, 0), "--chunks is 0"),
        (
            lambda: plan("interleaved", 3, 7),
            "cannot take 7 micro-batches: .* 2 equal groups; take 6 or 8, or the option",
        ),
        (lambda: plan("interleaved", 2, 7), "3 equal groups; take 6 or 8"),
        (
            lambda: plan("interleaved", 4, 8, group=3),
            "a group has at least 4 of them, one per rank, and at most 8, not 3",
        ),
        (lambda: plan("interleaved", 4, 10, group=8), "groups of 8 leave 2 for the last one, which needs at least 4"),
        (lambda: plan("dualpipe", 3, 6), "must be even; take 4"),
        (lambda: plan("dualpipe", 4, 6), "even number of at least 8"),
        (lambda: plan("dualpipev", 4, 6), "at least 8"),
        (lambda: plan("pipedream-2bw", 4, 3), "at least 4"),
        (lambda: plan("1f1b", 4, 4, 2), "has 1 chunk per rank, not 2"),
        (lambda: plan("gpipe", 4, 4, order="x"), "has no option 'order'"),
        (lambda: plan("gpipe", 4, 4, backward_order="x"), "must be 'reversed' or 'forward'"),
        (lambda: lower(lower(plan("1f1b", 2, 2))), "has sends and receives already"),
        (lambda: recompute(plan("dualpipe", 4, 8)), "cannot recompute in the overlapped"),
        (lambda: time_plan(plan("1f1b", 2, 2), receives="blocking"), "lower it first"),
        (lambda: time_plan(from_csv("0B0,0F0\n1F0,1B0")), "cannot finish: 2 ranks wait for ever, rank 0"),
        (lambda: parse_times("F=1,X=2", 4), "--times has no 'X'"),
        (lambda: parse_times("F=-1", 4), "must be 0, or a number"),
        (lambda: parse_times("F", 4), "is not a number"),
    ],
)
def test_wrong_input_is_one_sentence(call, sentence):
    with pytest.raises(UsageError, match=re.compile(sentence)) as error:
        call()
    assert "\n" not in str(error.value)


BROKEN = {
    "0F0,0B0,0F0": "0F0 appears twice",
    "0F0,0F1,0B0": "0B1 is missing",
    "0F0,0I0": "0W0 is missing",
    "0F0,0W0,0I0": "0W0 comes before 0I0",
    "0F0,0B0,0I0,0W0": "B is I and W together",
    "0F0\n0B0,1F0,1B0": "0B0 comes before 0F0",
    "0F0,0B0\n1F0,1B0\n0F1,1F1,1B1,0B1": None,  # replicated by micro-batch: allowed
    "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0": "deadlock: rank 0 at 0B0 waits for 1B0 on rank 1",
    "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0": "0RECV_B0 is missing",
    "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0": "1RECV_F0 comes after the action that needs it",
    "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0": "0SEND_F0 comes before the action",
    "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0,1SEND_F0": "1SEND_F0 has no partner",
    "0F0,0B0,0REDUCE_GRAD,0F1,0B1": "after 0REDUCE_GRAD sent it",
    "0F0,0B0,0RECOMPUTE0": "comes after the backward",
}


@each("csv", BROKEN)
def test_validate_names_what_is_wrong(csv):
    if BROKEN[csv] is None:
        validate(from_csv(csv))
        return
    with pytest.raises(PlanError, match=BROKEN[csv]):
        validate(from_csv(csv))


def test_a_version_that_two_buffers_no_longer_hold():
    late = replace(from_csv("0F0,0F1,0B1,0F2,0B2,0B0"), updates="2bw", batch=1)
    with pytest.raises(PlanError, match="0B0 needs version 0 of the weights, which two buffers no longer hold"):
        validate(late)
    validate(replace(from_csv("0F0,0F1,0B0,0F2,0B1,0B2"), updates="2bw", batch=1))


def test_validate_finds_every_dropped_doubled_and_swapped_action():
    """Mutations of a valid lowered plan: what is dropped, doubled or put before what it needs is found."""
    made = lower(plan("zb-h1", 3, 3))
    for rank, order in enumerate(made.orders):
        for at in range(len(order)):
            for broken in (order[:at] + order[at + 1 :], [*order[:at], order[at], *order[at:]]):
                if show(order[at]).endswith("REDUCE_GRAD") and len(broken) < len(order):
                    continue
                with pytest.raises(PlanError):
                    validate(made.with_orders([broken if r == rank else o for r, o in enumerate(made.orders)]))


@given(st.data())
def test_no_malformed_plan_passes_and_then_hangs(data):
    """Shuffle a plan's ranks: either validation rejects it, or the plan finishes and lowers to a valid one."""
    p, m = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    made = plan("1f1b", p, m)
    made = made.with_orders([data.draw(st.permutations(order)) for order in made.orders])
    try:
        validate(made)
    except PlanError:
        return
    assert time_plan(made).makespan > 0
    validate(lower(made))


@st.composite
def random_plans(draw):
    """Valid plans of no named schedule: random actions whose needs are met, on stages dealt out at random."""
    ranks, m = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, ranks - 1), min_size=ranks, max_size=2 * ranks))
    owner = [*range(ranks), *owner[ranks:]]
    stages, split_ = len(owner), draw(st.booleans())
    orders = [[] for _ in range(ranks)]
    open_ = {("F", s, i) for s in range(stages) for i in range(m)}
    done = set()
    while open_:
        ready = sorted(
            (k, s, i)
            for k, s, i in open_
            if (k == "F" and (s == 0 or ("F", s - 1, i) in done))
            or (k in "IB" and (s == stages - 1 or ("I", s + 1, i) in done or ("B", s + 1, i) in done))
            or k == "W"
        )
        k, s, i = draw(st.sampled_from(ready))
        orders[owner[s]].append({"F": F, "I": I, "W": W, "B": B}[k](s, i))
        done.add((k, s, i))
        open_.remove((k, s, i))
        if k == "F":
            open_.add(("I" if split_ else "B", s, i))
        elif k == "I":
            open_.add(("W", s, i))
    return Plan("random", orders, stages, m)


@given(random_plans())
def test_random_valid_plans_are_accepted_and_lowered(made):
    facts = validate(made)
    lowered = lower(made)
    assert validate(lowered) == facts
    assert time_plan(lowered, spans=True).idle == time_plan(made).idle
    validate(lower_blocking(made))


def test_blocking_receives_cost_what_posting_them_saves():
    made = plan("1f1b", 4, 8)
    assert max(time_plan(lower_blocking(made), receives="blocking").idle) == 21
    assert max(time_plan(lower(made)).idle) == 9


def test_lowering_posts_one_receive_ahead():
    for order in lower(plan("gpipe", 3, 8)).orders:
        ahead = most = 0
        for text in map(show, order):
            ahead += "RECV_F" in text
            ahead -= bool(re.fullmatch(r"[12]F\d", text))
            most = max(most, ahead)
        assert most <= 1


def test_latency_delays_and_does_not_occupy():
    made = plan("1f1b", 2, 1)
    timing = time_plan(made, uniform(2, comm=0.5))
    assert timing.makespan == 7.0
    assert timing.busy == [3.0, 3.0]
    spans = time_plan(made, uniform(2, comm=0.5), spans=True).spans
    assert [(show(a), start, end) for a, start, end in spans[1]] == [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5)]
    assert time_plan(plan("zb-v", 1, 4), uniform(2, comm=9)).makespan == 24  # both stages on one rank: nothing travels


def test_overlapped_pairs_take_their_own_time():
    made = plan("dualpipe", 4, 8)
    assert max(time_plan(made, uniform(4, FB=2.5)).idle) == 2.5 + 2 - 3


def test_unequal_stages_and_bytes():
    made = plan("zb-h1", 2, 3)
    times = Times([1, 2], [1, 1], [1, 1], [0], until_b=[10, 10], until_w=[4, 4], inputs=[1, 1])
    timing = time_plan(made, times)
    assert timing.busy == [9, 12]
    assert (timing.bubble_of_ideal, timing.bubble_of_total) == (
        (timing.cost - 12) / 12,
        (timing.cost - 12) / timing.cost,
    )
    # Four F, four I, a W: longer than any rank's work after its first start.
    assert time_plan(plan("zb-h1", 4, 1)).lower_bound == 9
    assert timing.peak_bytes == [28.0, 18.0]  # W lags one behind I on rank 1: 14 + 4
    assert time_plan(recompute(made), times).peak_bytes == [16.0, 20.0]
    assert "rank 0 needs 28 bytes" in over_limit(timing, 20)
    assert over_limit(timing, 28) is None
    assert "rank 0 needs 2 micro-batches" in over_limit(time_plan(made), 1)


def test_profile_files(tmp_path):
    path = tmp_path / "stages.json"
    path.write_text(
        '{"stages": [{"F": 1, "I": 2, "W": 3, "bytes_until_w": 5}, {"F": 1, "I": 1, "W": 1}], "edges": [0.5]}'
    )
    times = read_profile(path, 2)
    assert (times.I, times.comm, times.until_w) == ([2.0, 1.0], [0.5], [5.0, 0.0])
    for text, sentence in {
        "[": "is not JSON",
        "{}": "no list of stages",
        '{"stages": [{"F": 1, "I": 1}, {}]}': "stage 0, W: None is not a number",
        '{"stages": [{"F": 1, "I": 1, "W": 1, "G": 1}, {}]}': "unknown 'G'",
        '{"stages": [{"F": 1, "I": 1, "W": 1}, {"F": 1, "I": 1, "W": 1}], "edges": []}': "needs 1 edges",
    }.items():
        path.write_text(text)
        with pytest.raises(UsageError, match=sentence):
            read_profile(path, 2)


def test_evaluation_keeps_nothing():
    assert validate(plan("forward-only", 3, 4)).peak == time_plan(plan("forward-only", 3, 4)).peak == [1, 1, 1]


def test_the_timing_tool_is_linear():
    """No quadratic step: eight times the actions of 64 ranks take less than thirty times as long (8x in theory)."""
    import time

    def seconds(m):
        made = plan("1f1b", 64, m)
        begin = time.process_time()
        time_plan(made)
        return time.process_time() - begin

    seconds(64)
    assert seconds(1024) < 30 * max(seconds(128), 0.01)


@given(st.integers(2, 6), st.integers(1, 12))
def test_eager_1f1b_hides_latency_for_more_activations(p, m):
    """Without latency it takes as long as 1F1B; with some it is never later, and with enough micro-batches earlier."""
    eager, plain = plan("eager-1f1b", p, m), plan("1f1b", p, m)
    assert time_plan(eager).makespan == time_plan(plain).makespan
    assert time_plan(eager).peak == [min(m, 2 * (p - 1 - s) + 1) for s in range(p)]
    slow = uniform(p, comm=0.5)
    assert time_plan(eager, slow).makespan <= time_plan(plain, slow).makespan
    if m >= 2 * p:
        assert time_plan(eager, slow).makespan < time_plan(plain, slow).makespan
