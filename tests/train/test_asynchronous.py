"""Asynchronous schedules in train and compare: equal to a replay with the same delays, volumes in closed form, one
sentence.
"""

import pytest

from minidist.base.errors import UsageError
from minidist.comm.launch import execute
from minidist.commands.runner import number_of_ranks, summarize
from minidist.config.train_config import TrainConfig, resolve_batches
from minidist.equality.compare import compare_rank
from minidist.equality.delayed_replay import replay
from minidist.pipeline.runtime.versions import UnitVersions
from minidist.train.trainer import train
from tests.equality.test_equality import verdict

SMALL = {
    "width": 8,
    "heads": 2,
    "context": 6,
    "data": "markov",
    "steps": 6,
    "micro_batch": 2,
    "layers": 3,
    "reduction": "ordered",
}
TWO_AND_ONE = {"replicas": "2,1"}
NAMES = ["pipedream", "pipedream-vertical-sync", "pipedream-2bw"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", NAMES)
def test_every_step_equals_the_replay(name, optimizer):
    """Tied embeddings, dropout, a warm-up of the learning rate; loss, gradients, weights and state of every update."""
    result = verdict(3, **SMALL, pp=3, schedule=name, dropout=0.1, warmup=2, decay="cosine", optimizer=optimizer)
    assert result.equal, result.first_difference
    assert (result.tier, result.steps, result.ranks) == ("ordered", 6, 3)
    assert result.losses == result.reference_losses


@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (3, {"model": "mlp", "data": "glyphs", "replicas": "2,1"}),
        (4, {"model": "llama", "replicas": "1,2,1", "steps": 5}),
        (4, {"model": "mlp", "data": "glyphs", "replicas": "1,3", "partition": "1,3"}),
        (2, {"model": "mlp", "data": "glyphs", "partition": "3,1"}),
    ],
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


@pytest.mark.mpi(3)
def test_under_mpi_the_comparison_is_equal_too(comm):
    result = compare_rank(comm, TrainConfig.make(**SMALL, pp=3, schedule="pipedream"))
    assert result.equal, result.first_difference


def test_a_step_is_one_mini_batch_but_for_2bw():
    assert resolve_batches(TrainConfig.make(pp=4, schedule="pipedream"), 4).accumulation == 1
    assert resolve_batches(TrainConfig.make(pp=4, schedule="pipedream-2bw"), 4).accumulation == 8


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"microbatches": 2},
            "updates after every micro-batch, and a step has 2; use --microbatches 1, or pipedream-2bw",
        ),
        ({"clip": 1.0}, "--clip 1.0 needs the gradients of all stages at one time"),
        ({"dp": 2}, "without --dp 2; use --replicas"),
        ({"tp": 2}, "without --tp 2; use a synchronous schedule"),
        ({"recompute": "full"}, "--recompute full does not combine with --schedule pipedream"),
        ({"zero": 1}, "--zero 1 does not combine"),
        ({"replicas": "1,1"}, "a GPT's embedding is on two of them"),
        ({"model": "mlp", "data": "glyphs", "replicas": "2,1"}, "replicas=.2, 1. make 3 ranks and there are 2"),
        ({"model": "mlp", "data": "glyphs", "replicas": "a"}, "--replicas 'a'; write the ranks of each stage"),
        ({"schedule": "1f1b", "replicas": "1,1"}, "not of 1f1b; use --dp"),
        ({"pp": 1, "replicas": "1"}, "add --pp 2 or more and --schedule pipedream"),
        ({"schedule": "pipedream-2bw", "microbatches": 1}, "it needs at least 2 in a batch"),
    ],
)
def test_what_does_not_fit_is_one_sentence(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        number_of_ranks(TrainConfig.make(**{**SMALL, "pp": 2, "schedule": "pipedream", **values}), None)
