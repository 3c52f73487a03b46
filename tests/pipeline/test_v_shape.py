"""V-Min and V-Half against the authors' program: no plan is longer, and no rank keeps more activations."""

from collections import deque
from operator import le

import pytest

from minidist.core.pipeline.plan import F
from minidist.pipeline.schedules import get_schedule
from minidist.pipeline.schedules.v_shape import _take
from minidist.pipeline.times import uniform
from minidist.pipeline.timing import time_plan
from minidist.pipeline.validate import validate
from tests.cases import each

# Units from the first start to the last end of the schedules that the authors' program makes, for m = 1 to 24, when F,
# I and W of a chunk take 1 each and messages take 0. Source: github.com/sail-sg/zero-bubble-pipeline-parallelism,
# commit 39f2c186, zerobubble/scheduler/zbv_greedy.py, run with memory "min" and "half"; counts, no code.
# fmt: off
AUTHORS = {
    "v-half": {
        2: [10, 15, 19, 25, 31, 37, 43, 49, 55, 61, 67, 73, 79, 85, 91, 97, 103, 109, 115, 121, 127, 133, 139, 145],
        3: [14, 19, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149],
        4: [18, 22, 27, 34, 38, 41, 47, 53, 59, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149],
        5: [22, 26, 31, 38, 44, 47, 53, 59, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149, 155],
        6: [26, 30, 35, 40, 47, 48, 56, 59, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149, 155],
        7: [30, 34, 39, 44, 51, 55, 66, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149, 155, 161],
        8: [34, 38, 43, 48, 53, 60, 59, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149, 155, 161],
    },
    "v-min": {
        2: [9, 15, 21, 27, 33, 39, 45, 51, 57, 63, 69, 75, 81, 87, 93, 99, 105, 111, 117, 123, 129, 135, 141, 147],
        3: [13, 19, 26, 29, 35, 41, 47, 53, 59, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149],
        4: [17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149, 155],
        5: [21, 26, 33, 39, 45, 51, 57, 63, 69, 75, 81, 87, 93, 99, 105, 111, 117, 123, 129, 135, 141, 147, 153, 159],
        6: [25, 30, 37, 43, 49, 53, 59, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149, 155, 161],
        7: [29, 34, 41, 47, 53, 59, 65, 71, 77, 83, 89, 95, 101, 107, 113, 119, 125, 131, 137, 143, 149, 155, 161, 167],
        8: [33, 38, 44, 51, 57, 63, 69, 75, 81, 87, 93, 99, 105, 111, 117, 123, 129, 135, 141, 147, 153, 159, 165, 171],
    },
}
# fmt: on


def alive(name, p):
    """The limit of the paper's construction, in half-stage chunks."""
    return 2 * ((p + 4) // 3 if name == "v-min" else (p + 2) // 2)


@each(("name", "p"), [(name, p) for name in AUTHORS for p in AUTHORS[name]], sampled=2)
def test_no_plan_is_longer_than_the_authors_programs(name, p):
    for m, most in enumerate(AUTHORS[name][p], 1):
        plan = get_schedule(name).plan(p, m)
        assert time_plan(plan).makespan <= most, (p, m)
        assert max(validate(plan).peak) == min(2 * m, alive(name, p)), (p, m)


@pytest.mark.parametrize(("last", "long"), [(13, 6), pytest.param(24, 24, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", AUTHORS)
def test_length_and_peak_follow_from_the_micro_batches_alive(name, last, long):
    """For p to `last`, so that every p mod 6 occurs with few and many ranks; with 64 micro-batches for p to `long`."""
    for p in range(2, last + 1):
        chunks = alive(name, p)
        for m in {1, p // 3, p // 2, p - 1, p, p + 1, *((2 * p + 1, 64) if p <= long else ())} - {0}:
            timing = time_plan(get_schedule(name).plan(p, m))
            assert max(timing.peak) == min(2 * m, chunks), (p, m)
            if m >= p:
                idle = max(1, 6 * p - 3 * chunks - 1)
                assert (timing.makespan, max(timing.idle)) == (6 * m + idle, idle), (p, m)
            elif 2 * m < chunks:
                assert timing.makespan == 4 * p + 2 * m - 1, (p, m)


@pytest.mark.parametrize(
    ("costs", "half", "least"),
    [
        ((3, 2, 1, 0), [53, 99, 122, 173, 193, 247, 264], [53, 99, 167, 191, 242, 305, 332]),
        ((1, 2, 1, 0), [35, 59, 77, 109, 121, 156, 165], [35, 59, 109, 124, 161, 199, 218]),
        ((1, 1.5, 1, 0.5), [32.5, 55, 76, 104, 122, 150, 168], [32.5, 55, 104, 120.5, 156, 197, 216.5]),
    ],
)
def test_other_times_of_f_i_w_and_messages(costs, half, least):
    """The plans are made for equal times; for m = 2p these lengths were measured, and a change may only lower them."""
    for name, most in (("v-half", half), ("v-min", least)):
        lengths = [time_plan(get_schedule(name).plan(p, 2 * p), uniform(2 * p, *costs)).makespan for p in range(2, 9)]
        assert all(map(le, lengths, most)), (name, lengths)


def test_a_forward_that_runs_early_leaves_room_for_the_one_it_passes():
    """Otherwise ranks could wait for each other. F(1, 0) waits for its input, F(0, 1) for nothing."""
    for room, taken in ((1, None), (2, F(0, 1))):
        assert _take(deque([F(1, 0), F(0, 1)]), 2, room, 3, set()) == taken
