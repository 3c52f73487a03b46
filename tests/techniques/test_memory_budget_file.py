"""Micro-batches that follow a budget in a file: which are taken, the numbers of one device, the bytes sent."""

from collections import Counter
from dataclasses import make_dataclass

import pytest

from minidist import SimWorld, TrainConfig
from minidist.base.memory import MemoryAccount
from minidist.base.watchers import current
from minidist.data import cut_batch
from minidist.job.config.train_config import resolve_batches
from minidist.job.train.trainer import train
from minidist.planning.volumes import phases_bytes
from minidist.techniques.memory_budget.extension import MemoryBudget, choices

PLENTY = 1e9
JOB = {"layers": 2, "width": 16, "context": 16, "global_batch": 16, "micro_batch": 2}


def run(path, layout, budgets, rank=0, **settings):
    """Train with budgets by step, written by a rank into its file; return (results, micro-batches, bytes)."""
    config = TrainConfig.make(**{**JOB, **layout, **settings}, memory_budget_file=str(path / "rank{rank}"))
    ranks = config.dp * config.pp * config.tp
    for number in range(ranks):
        (path / f"rank{number}").write_text(str(PLENTY))
    micros = []

    def watch(state):
        if state.rank == rank:
            micros.append(state.job.batches.micro_batch)
            if state.step in budgets:
                (path / f"rank{rank}").write_text(str(budgets[state.step]))

    watch.reads_tensors = False
    world = SimWorld(ranks)
    results = world.run(train, config, [watch])
    sent = sum((Counter(trace.bytes_by_purpose()) for trace in world.traces), Counter())
    closed = phases_bytes(config, resolve_batches(config, ranks), [r.phases for r in results], 0, results[0].runs)
    return results, micros, sent, closed


LAYOUTS = [
    {"dp": 2},
    {"dp": 2, "zero": 3, "evaluate_every": 2},
    {"dp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "zero": 3, "evaluate_every": 1},
    {"dp": 1, "pp": 2, "tp": 2, "recompute": "full"},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_micro_batches_follow_the_budget_and_the_bytes_the_closed_form(tmp_path, layout):
    largest = 16 // layout["dp"]
    results, micros, sent, closed = run(tmp_path, layout, {2: 1, 4: PLENTY}, rank=1, steps=7)
    # Plenty from the second step on; nothing fits after the third, when the smallest is taken; then plenty again.
    assert micros == [2, largest, largest, 1, 1, largest, largest]
    assert results[0].measured["micro_batches"] == [(2, 1), (largest, 2), (1, 2), (largest, 2)]
    assert sent == closed
    assert sent["memory_budget"] == 7 * len(results) * (len(results) - 1) * 24


def test_experts_exchange_capacities_with_every_cut_as_the_closed_form_says(tmp_path):
    """The way to the experts is chosen once, and an uneven cut of 3, 3, 2 rows becomes an even one."""
    layout = {"dp": 2, "ep": 2, "experts": 4, "micro_batch": None, "accumulation": 3}
    _, micros, sent, closed = run(tmp_path, layout, {}, steps=3)
    assert micros == [3, 8, 8]
    assert sent == closed


def test_micro_batches_and_stages_change_in_one_job(tmp_path):
    """What a step adds is measured anew in the new layout, and the bytes are those of each layout with its cuts."""
    layout = {"dp": 2, "pp": 2, "layers": 6, "partition": "5,1", "repartition_every": 3, "evaluate_every": 2}
    results, micros, sent, closed = run(tmp_path, layout, {4: 1}, steps=7)
    assert len(results[0].phases) == 2
    assert micros == [2, 8, 8, 8, 8, 1, 1]
    assert sent == closed
    plain = SimWorld(4).run(train, TrainConfig.make(**{**JOB, **layout}, steps=7))
    assert results[0].losses == pytest.approx(plain[0].losses, rel=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_the_losses_are_those_of_the_same_batches_in_other_micro_batches(tmp_path, layout):
    results, *_ = run(tmp_path, layout, {1: 1, 3: PLENTY}, steps=6)
    plain = SimWorld(len(results)).run(train, TrainConfig.make(**{**JOB, **layout}, steps=6))
    assert results[0].losses == pytest.approx(plain[0].losses, rel=1e-5)


def test_a_step_stays_below_the_budget_from_the_second_time_on(tmp_path):
    """The first step of a size may exceed it, as not all temporaries shrink with the rows; then the bytes are known."""
    budget, peaks = 420_000, []
    config = TrainConfig.make(**{**JOB, "micro_batch": 8}, dp=2, steps=6, memory_budget_file=str(tmp_path / "all"))
    (tmp_path / "all").write_text(str(budget))

    def watch(state):
        peaks.append((state.job.batches.micro_batch, current(MemoryAccount).peak))

    watch.reads_tensors = False
    SimWorld(2).run(train, config, [watch])
    assert peaks[0][0] == 8
    assert peaks[0][1] > budget
    assert all(peak <= budget for _, peak in peaks[-4:])
    assert 1 < peaks[-1][0] < 8


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2, "zero": 1}], ids=str)
def test_a_resumed_job_goes_on_with_the_saved_micro_batch_to_the_same_bits(tmp_path, layout):
    """Also where the budget changes after that, because the checkpoint knows what the sizes before have added."""
    budgets, saved = {1: 1, 6: PLENTY, 8: 420_000}, str(tmp_path / "saved")
    whole, micros, *_ = run(tmp_path, layout, budgets, steps=11, save=saved, every=5)
    assert micros[5] not in (2, micros[-1])

    (tmp_path / "saved" / "latest").write_text("step-00000005\n")
    later = {5: 1, **{step: budget for step, budget in budgets.items() if step > 5}}
    again, rest, sent, closed = run(tmp_path, layout, later, steps=11, save=saved, resume=True)
    assert rest == micros[5:]
    assert again[0].losses == whole[0].losses
    assert [result.digest for result in again] == [result.digest for result in whole]
    assert sent - Counter(checkpoint=sent["checkpoint"]) == closed


@pytest.mark.parametrize("layout", [["--dp", "2"], ["--dp", "2", "--pp", "2", "--zero", "3"]], ids=str)
def test_compare_tells_one_device_the_cuts(tmp_path, layout, minidist):
    (tmp_path / "all").write_text(str(PLENTY))
    flags = ["--global-batch", "16", "--micro-batch", "2", "--steps", "3", "--layers", "2", "--width", "16"]
    flags += ["--context", "16", "--memory-budget-file", tmp_path / "all"]
    assert "agree bit for bit (ordered tier)" in minidist("compare", *layout, *flags).out


def test_a_file_that_becomes_unreadable_and_a_budget_that_nothing_fits_are_said_once(tmp_path, capsys):
    run(tmp_path, {"dp": 2}, {0: "much", 3: 1}, steps=6)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("minidist: ")]
    assert len(lines) == 2
    assert lines[0].endswith("rank0' holds 'much', which is no number above 0; the last budget stays")
    assert "a rank has a budget that no micro-batch fits, after step 3: rank 0 may hold 1 B and needs" in lines[1]
    assert lines[1].endswith("training goes on with --micro-batch 1")


@pytest.mark.parametrize(("text", "words"), [("-3", "holds '-3'"), ("nan", "holds 'nan'"), (None, "cannot be read")])
def test_a_file_that_is_wrong_from_the_start_is_an_error(tmp_path, minidist, text, words):
    if text is not None:
        (tmp_path / "b").write_text(text)
    error = minidist("train", "--dp", "2", "--steps", "1", "--memory-budget-file", tmp_path / "b", code=2).err
    assert words in error
    assert error.endswith("; write the bytes that a rank may hold at a time, such as 2e9\n")


@pytest.mark.parametrize(("samples", "replicas", "weights"), [(12, 2, None), (7, 2, None), (12, 2, (2.0, 1.0))])
def test_choices_cut_the_same_samples_from_the_largest_micro_batch_on(samples, replicas, weights):
    batches = make_dataclass("Batches", ["global_batch", "dp", "weights", "micro_batch", "accumulation"])
    given = batches(samples, replicas, weights, micro_batch=1, accumulation=1)
    sizes = [after.micro_batch for after in choices(given)]
    assert sizes == sorted(set(sizes), reverse=True)
    for after in choices(given):
        shares = cut_batch(samples, replicas, after.accumulation, weights)
        assert (shares.samples, shares.largest) == (samples, after.micro_batch)


def test_a_new_layout_forgets_what_a_step_added():
    made = MemoryBudget(MemoryBudget.Settings(memory_budget_file="file"))
    made.added = {2: 1.0}
    made.attached(None)
    assert made.added == {}
