"""Asynchronous schedules in train and compare: equal to a replay with the same delays, volumes in closed form, one
sentence.
"""

import shutil
import tempfile
from itertools import pairwise

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.comm.launching import execute
from minidist.commands.runner import run_training, summarize
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import Checkpoint
from minidist.job.checkpoint.directory import complete_checkpoints
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.metrics import read_metrics
from minidist.job.train.start import number_of_ranks
from minidist.job.train.trainer import train
from minidist.pipeline.runtime.versions import UnitVersions
from minidist.techniques.asynchronous.replay import replay
from tests.cases import each
from tests.equality.test_equality import verdict
from tests.jobs import SMALL_GPT

SMALL = SMALL_GPT | {"layers": 3, "width": 8, "steps": 6, "micro_batch": 2, "reduction": "ordered"}
TWO_AND_ONE = {"replicas": "2,1"}
NAMES = ["pipedream", "pipedream-vertical-sync", "pipedream-2bw"]


@each("optimizer", ["sgd", "adamw"])
@each("name", NAMES)
def test_every_step_equals_the_replay(name, optimizer):
    """Tied embeddings, dropout, a warm-up of the learning rate; loss, gradients, weights and state of every update."""
    result = verdict(3, **SMALL, pp=3, schedule=name, dropout=0.1, warmup=2, decay="cosine", optimizer=optimizer)
    assert result.equal, result.first_difference
    assert (result.tier, result.steps, result.ranks) == ("ordered", 6, 3)
    assert result.losses == result.reference_losses


@each(
    ("ranks", "values"),
    [
        (3, {"model": "mlp", "data": "glyphs", "replicas": "2,1"}),
        (4, {"model": "llama", "replicas": "1,2,1", "steps": 5}),
        (4, {"model": "mlp", "data": "glyphs", "replicas": "1,3", "partition": "1,3"}),
        (2, {"model": "mlp", "data": "glyphs", "partition": "3,1"}),
        # With what else a job has: precision, recomputation, evaluations, experts, dropout, batches read ahead.
        (2, {"precision": "bf16", "recompute": "selective", "evaluate_every": 4}),
        (3, {"replicas": "1,2", "experts": 2, "dropout": 0.1, "evaluate_every": 3, "recompute": "full"}),
        (4, {"replicas": "2,2", "model": "llama", "precision": "bf16", "optimizer": "lamb"}),
        (3, {"replicas": "2,1", "attention_dropout": 0.1, "prefetch_batches": 2, "steps": 5}),
        (2, {"schedule": "pipedream-2bw", "global_batch": 5, "microbatches": 3, "micro_batch": None, "steps": 4}),
        (2, {"schedule": "pipedream-2bw", "experts": 2, "model": "llama", "evaluate_every": 2, "steps": 4}),
        (2, {"model": "cnn", "data": "glyphs", "evaluate_every": 3, "steps": 4}),
    ],
    sampled=2,
)
def test_replicated_and_uneven_stages(ranks, values):
    result = verdict(ranks, **{**SMALL, "schedule": "pipedream", "pp": ranks, **values})
    assert result.equal, result.first_difference


@pytest.mark.parametrize("values", [*({"schedule": name} for name in NAMES), {"schedule": "pipedream", **TWO_AND_ONE}])
def test_the_replay_keeps_the_versions_that_are_needed_and_no_older_ones(values):
    """As many for 24 steps as for 8: at most the longest delay, and the latest one."""
    most = []
    for steps in (8, 24):
        config = TrainConfig.make(**{**SMALL, "model": "mlp", "data": "glyphs", "steps": steps, "pp": 3, **values})
        kept = []
        replay(
            config, resolve_batches(config, 3), [lambda s, k=kept: k.extend(len(u.versions) for u in s.strategy.units)]
        )
        most.append(max(kept))
    assert most[0] == most[1] <= 4


def test_a_delay_of_one_too_few_is_found(monkeypatch):
    """The comparison sees a stage that forgets to keep the weights that forward saw."""
    backward = UnitVersions.backward
    monkeypatch.setattr(UnitVersions, "backward", lambda self, i, newest: backward(self, i, True))
    result = verdict(3, **SMALL, pp=3, schedule="pipedream")
    assert not result.equal


@pytest.mark.parametrize(
    "values",
    [
        {"schedule": "pipedream", "pp": 3},
        {"schedule": "pipedream-2bw", "pp": 2, "microbatches": 3, "clip": None},
        {"schedule": "pipedream", "pp": 3, "model": "mlp", "data": "glyphs", "replicas": "2,1"},
        {"schedule": "pipedream-vertical-sync", "pp": 2},
    ],
)
def test_volumes_equal_the_closed_form(values, tmp_path):
    config = TrainConfig.make(**{**SMALL, **values})
    outcome = execute(train, config, ranks=values["pp"])
    summary = summarize(config, outcome, tmp_path / "run.jsonl", 1.0)
    assert {"pipeline_activation", "pipeline_gradient", "metrics"} <= set(summary.bytes_by_purpose)
    assert summary.volumes_hold(), summary.table()


@pytest.mark.parametrize("values", [{"schedule": "pipedream", "pp": 3}, {"schedule": "pipedream-2bw", "pp": 2}])
def test_each_record_of_metrics_is_of_its_own_step(values, tmp_path):
    """Rank 0 sends activations and gets gradients, so a step of k micro-batches adds k activations to its bytes."""
    config = TrainConfig.make(**{**SMALL, "model": "llama", "steps": 8, **values})
    summary = run_training(config, None, 60.0, tmp_path / "t.jsonl", metrics=tmp_path / "m.jsonl")
    records = read_metrics(tmp_path / "m.jsonl")
    assert [record["loss"] for record in records] == summary.losses
    assert all(before["seconds"] < after["seconds"] for before, after in pairwise(records))
    k = resolve_batches(config, values["pp"]).accumulation
    activation = config.micro_batch * config.context * config.width * 4
    sent = [after["bytes_sent"] - before["bytes_sent"] for before, after in pairwise(records)]
    assert sent[:-2] == [k * activation] * 5  # then the last micro-batches have entered


RESUMED = [
    (3, {"schedule": "pipedream", "pp": 3, "optimizer": "adamw", "warmup": 2, "dropout": 0.1}),
    (2, {"schedule": "pipedream-vertical-sync", "pp": 2, "optimizer": "sgd", "momentum": 0.9}),
    (2, {"schedule": "pipedream-2bw", "pp": 2, "microbatches": 3, "recompute": "full"}),
    (3, {"schedule": "pipedream", "pp": 3, "replicas": "2,1", "evaluate_every": 2}),
    (4, {"schedule": "pipedream", "pp": 4, "replicas": "1,3", "model": "llama", "precision": "bf16"}),
]


class KilledError(Exception):
    """Ends a job as a signal would."""


def kill_after(steps):
    """Return an observer that ends the job, with micro-batches on their way, after this number of steps."""

    def observer(state):
        if state.step + 1 == steps:
            raise KilledError

    observer.reads_tensors = False
    return observer


def tensors_of(directory):
    checkpoint = Checkpoint(directory)
    return checkpoint.state, {name: checkpoint.tensor(name) for name in checkpoint.tensors}


def assert_same(first, second):
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        assert np.array_equal(value, second[1][name]), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "values"), RESUMED)
def test_a_killed_job_resumes_with_the_bits_of_the_undisturbed_one(ranks, values, tmp_path):
    """Every weight and optimizer state, on every rank and in the last checkpoint; the drains are those of --every."""
    common = {**SMALL, **values, "steps": 7, "every": 3, "keep": 2}
    whole = SimWorld(ranks).run(train, TrainConfig.make(**common, save=str(tmp_path / "a")))
    assert complete_checkpoints(tmp_path / "a") == ["step-00000006", "step-00000007"]

    # Killed in step 4, one step after the checkpoint, and killed again; then from the checkpoint before the last.
    made = TrainConfig.make(**common, save=str(tmp_path / "b"))
    with pytest.raises(KilledError):
        SimWorld(ranks).run(train, made, [kill_after(4)])
    again = TrainConfig.make(**common, save=str(tmp_path / "b"), resume=True)
    for first_step, config in ((3, again), (6, again.model_copy(update={"from_step": 6}))):
        resumed = SimWorld(ranks).run(train, config)
        assert [r.digest for r in resumed] == [r.digest for r in whole]
        assert (resumed[0].losses, resumed[0].first_step) == (whole[0].losses, first_step)
        assert resumed[0].held_out.items() <= whole[0].held_out.items()
        assert_same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))


def test_a_job_changes_its_schedule_at_a_checkpoint(tmp_path):
    """1F1B, then PipeDream, without and with an interruption, and back: Adam's numbers of updates go along."""

    def run(name, schedule, steps, **more):
        values = {**SMALL, "pp": 2, "optimizer": "adam", "microbatches": 1, "schedule": schedule, "steps": steps}
        return SimWorld(2).run(train, TrainConfig.make(**values, save=str(tmp_path / name), **more))[0]

    run("a", "1f1b", 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run("a", "pipedream", 6, every=2, resume=True)
    run("b", "pipedream", 4, resume=True)
    run("b", "pipedream", 6, resume=True)
    assert_same(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))
    assert Checkpoint(tmp_path / "a").state["optimizer_steps"] == 6
    assert run("a", "1f1b", 7, resume=True).first_step == 6
    assert Checkpoint(tmp_path / "a").state["optimizer_steps"] == 7


@pytest.mark.exhaustive
@pytest.mark.mpi(3)
def test_under_mpi_a_resumed_job_has_the_bits_of_the_undisturbed_one(comm):
    """From the checkpoint that a job killed after it would leave; and the bits are those of simulated ranks."""
    directory = comm.recv_object(0) if comm.rank else tempfile.mkdtemp()
    for rank in range(1, comm.size) if comm.rank == 0 else ():
        comm.send_object(directory, rank)
    common = {**SMALL, **RESUMED[0][1], "steps": 5, "every": 3}
    whole = train(comm, TrainConfig.make(**common, save=directory))
    before = tensors_of(directory)
    resumed = train(comm, TrainConfig.make(**common, save=directory, resume=True, from_step=3))
    assert (resumed.digest, resumed.losses, resumed.first_step) == (whole.digest, whole.losses, 3)
    assert_same(before, tensors_of(directory))
    if comm.rank == 0:
        simulated = SimWorld(3).run(train, TrainConfig.make(**common, save=f"{directory}-simulated"))[0]
        assert (simulated.digest, simulated.losses) == (whole.digest, whole.losses)
        assert_same(before, tensors_of(f"{directory}-simulated"))


def test_a_step_is_one_mini_batch_but_for_2bw():
    assert resolve_batches(TrainConfig.make(pp=4, schedule="pipedream"), 4).accumulation == 1
    assert resolve_batches(TrainConfig.make(pp=4, schedule="pipedream-2bw"), 4).accumulation == 8


def test_a_batch_of_2bw_has_several_micro_batches():
    with pytest.raises(UsageError, match="it needs at least 2 in a batch"):
        number_of_ranks(TrainConfig.make(**SMALL, pp=2, schedule="pipedream-2bw", microbatches=1), None)
