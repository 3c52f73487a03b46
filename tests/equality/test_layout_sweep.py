"""The layout sweep: a sample on 8 ranks, another under mpiexec, and its own functions.

`make matrix` runs all layouts.
"""

import json
from functools import cache

import numpy as np
import pytest

from minidist.base.traces import sequences
from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.parallel.data_parallel import GradientReducer
from minidist.job.equality import layout_sweep
from minidist.job.train.trainer import train
from tests.cases import each

RANKS = 8
PLAIN = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "zero": 0, "schedule": "1f1b", "recompute": "none"}
PLAIN |= {"precision": "fp64", "sequence_parallel": False}


ENUMERATE = layout_sweep.enumerate_layouts


# Layouts are enumerated inside the tests: every process that collects tests would do it otherwise.
@cache
def layouts(ranks):
    return ENUMERATE(ranks)


@cache
def sample(ranks, count, seed):
    """Return `count` valid layouts, chosen among 150 combinations: to check all of them takes seconds."""
    every = [layout for layout in layout_sweep.combinations(ranks) if ranks == RANKS or layout["precision"] != "fp16"]
    drawn = [every[i] for i in np.random.default_rng(seed).permutation(len(every))[:150]]
    return layout_sweep.stratified([one for one in drawn if not layout_sweep.refusal(one, ranks)], count, seed)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("number", range(12))
def test_a_layout_equals_one_device(number):
    row = layout_sweep.judge(sample(RANKS, 12, seed=1)[number], RANKS, {})
    assert row.equal, layout_sweep.line(row)
    assert row.tensors > 100
    assert row.tier in ("ordered", "float", "rounding")
    if row.tier == "ordered":
        assert row.difference == 0


@pytest.mark.parametrize("ranks", [2, pytest.param(RANKS, marks=pytest.mark.exhaustive)])
def test_the_sweep_is_large_and_has_every_kind_of_parallelism(ranks):
    valid, refused = layouts(ranks)
    assert len(valid) >= 200
    assert len({layout_sweep.name_of(layout) for layout in valid}) == len(valid)
    for axis in ("pp", "dp", "cp", "tp"):
        assert {layout[axis] for layout in valid} == {degree for degree in (1, 2, 4, 8) if degree <= ranks}, axis
    assert {layout["zero"] for layout in valid} == {0, 1, 2, 3}
    assert {layout["schedule"] for layout in valid if layout["pp"] > 1} >= set(layout_sweep.SCHEDULES) - {"dualpipe"}
    assert {layout["recompute"] for layout in valid} == set(layout_sweep.RECOMPUTE)
    assert len(valid) + sum(refused.values()) == sum(1 for _ in layout_sweep.combinations(ranks))


def test_what_is_refused_is_refused_with_the_sentence_of_the_job():
    """A layout that is left out is named, in the same words as for a user."""
    layout = {**PLAIN, "pp": 8, "schedule": "dualpipe", "precision": "fp32"}
    refused = layouts(2)[1]
    assert layout_sweep.refusal({**layout, "pp": 2, "recompute": "full"}, 2) in refused
    assert layout_sweep.refusal(layout, RANKS).startswith("schedule 'dualpipe' on 8 stages cannot take 8 micro-batches")
    assert "does not fit" not in "".join(refused)  # degrees multiply to the ranks
    assert layout_sweep.refusal({**layout, "pp": 2, "dp": 2, "tp": 4}, RANKS).startswith(
        "--pp 2 --dp 2 --tp 4 does not fit 8 ranks"
    )


def test_a_sample_holds_every_value_and_is_the_same_for_the_same_seed():
    valid, _ = layouts(2)
    chosen = layout_sweep.stratified(valid, 24)
    first, again, other = (layout_sweep.stratified(valid[:60], 9, seed=seed) for seed in (0, 0, 5))
    assert first == again != other
    for name in layout_sweep.LAYOUT:
        values = {layout[name] for layout in valid if name != "schedule" or layout["pp"] > 1}
        assert {layout[name] for layout in chosen} >= values, name
    assert len(layout_sweep.stratified(valid[:3], 10)) == 3


def test_a_bug_is_a_row_that_differs_and_an_error_one_too(monkeypatch):
    layout = {**PLAIN, "dp": 2}
    assert layout_sweep.judge(layout, 2, {}).equal
    monkeypatch.setattr(
        GradientReducer,
        "launch",
        lambda self, bucket: self.works.append(type("Nothing", (), {"wait": lambda self: None})()),
    )
    row = layout_sweep.judge(layout, 2, {})
    assert not row.equal
    assert "gradients" in row.first_difference
    assert "DIFFERS" in layout_sweep.line(row)
    monkeypatch.setattr(GradientReducer, "launch", lambda self, bucket: (_ for _ in ()).throw(UsageError("no")))
    assert layout_sweep.judge(layout, 2, {}).first_difference == "UsageError: no"


def test_the_command_prints_a_table_and_fails_when_a_layout_differs(minidist, monkeypatch):
    monkeypatch.setattr(layout_sweep, "enumerate_layouts", layouts)  # once, for it takes a second
    arguments = ["compare", "--matrix", "--ranks", "2", "--sample", "2"]
    answer = json.loads(minidist(*arguments, "--json").out)
    assert answer["equal"]
    assert len(answer["layouts"]) == 2
    assert answer["ranks"] == 2
    assert sum(answer["refused"].values()) > 0
    monkeypatch.setattr(
        GradientReducer, "send", lambda self, bucket: type("Nothing", (), {"wait": lambda self: None})()
    )
    text = minidist(*arguments, "--sample", "6", code=1).out
    assert "DIFFERS" in text
    assert "combinations are refused" in text


@pytest.mark.parametrize("flags", [["--zero", "1"], ["--dp", "4"], ["--sequence-parallel"]])
def test_a_layout_cannot_be_given_beside_the_matrix(flags, minidist):
    assert "is varied by --matrix" in minidist("compare", "--matrix", *flags, code=2).err


@each(
    ("flags", "words"),
    [
        (["--matrix", "--sample", "0"], "--sample is 0"),
        (["--matrix", "--sample", "-3"], "--sample is -3"),
        (["--matrix", "--ranks", "0"], "--ranks is 0"),
        (["--matrix", "--processes", "0"], "--processes is 0"),
        (["--sample", "3"], "add --matrix"),
        (["--matrix", "--trace", "t.jsonl"], "--trace is of one job, and --matrix runs many"),
        (["--matrix", "--set", "axes.dp=2"], "--dp is varied by --matrix"),
        (["--steps", "1", "--timeout", "nan"], "--timeout is nan"),
    ],
)
def test_nothing_compared_is_not_everything_equal(flags, words, minidist):
    said = minidist("compare", *flags, code=2).err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_several_processes_give_the_rows_of_one():
    some = sample(2, 2, seed=0)
    rows = list(layout_sweep.run_sweep(some, 2, processes=2))
    assert [(row.layout, row.equal, row.difference) for row in rows] == [
        (row.layout, row.equal, row.difference) for row in layout_sweep.run_sweep(some, 2)
    ]


@pytest.mark.exhaustive
@pytest.mark.mpi(4, timeout=60)
@pytest.mark.parametrize("number", range(4))
def test_under_mpiexec_the_bits_and_the_messages_are_those_of_the_simulated_world(comm, number):
    config = layout_sweep.config_of(sample(4, 4, seed=3)[number])
    world = SimWorld(comm.size)
    expected = world.run(train, config)[comm.rank]
    result = train(comm, config)
    assert result.losses == expected.losses
    assert result.digest == expected.digest
    assert sequences(comm.trace) == sequences(world.traces[comm.rank])
