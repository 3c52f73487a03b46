"""A sample of `make chaos`: three jobs under mpiexec are killed or interrupted at random moments, and resumed."""

import sys

import pytest

from tests.chaos.chaos import Outcome, campaign, table


@pytest.mark.exhaustive  # tests/checkpoint/test_killed.py kills a rank, and comm/mpi/test_interrupts.py interrupts one
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a job in /proc")
def test_a_sample_of_faults():
    pytest.importorskip("mpi4py")
    outcomes: list[Outcome] = []
    # On a busy machine a job may have ended before its fault; then other moments are drawn.
    for first in range(0, 15, 3):
        outcomes += campaign(range(first, first + 3), 0, ("kill", "interrupt"), ("dp 2",))
        if not all(outcome.late for outcome in outcomes):
            break
    assert not [outcome for outcome in outcomes if outcome.wrong]
    assert {outcome.fault for outcome in outcomes} == {"kill", "interrupt"}
    assert not all(outcome.late for outcome in outcomes)


def test_the_table_counts_what_went_wrong():
    outcomes = [
        Outcome("dp 2", "kill", [], 0.5),
        Outcome("dp 2", "kill", ["no sentence"], 2.0),
        Outcome("zero 3", "stop", [], late=True),
    ]
    rows = {line.split()[0]: line.split()[1:] for line in table(outcomes).splitlines()}
    assert rows["kill"] == ["2", "0", "0", "0", "0", "2", "0", "1", "2.0"]
    assert rows["stop"] == ["0", "1", "0", "0", "0", "0", "1", "0", "0.0"]
    assert table(outcomes).endswith("3 faults, 1 went wrong")
