"""`--reduction`: every algorithm sums the gradients of every layout, and sends what its closed form says."""

import pytest

from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.auto import choose
from minidist.comm import SimWorld
from minidist.commands.dry_run import dry_run
from minidist.commands.runner import run_training
from minidist.job.config.train_config import TrainConfig, resolve_dims
from minidist.job.train.trainer import train
from tests.jobs import equals_one_device

GPT = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 8, "data": "markov", "precision": "fp64"}
JOB = {**GPT, "steps": 2, "global_batch": 12}
REDUCE, SCATTER = (sorted(ALGORITHMS[name]) for name in ("all_reduce", "reduce_scatter"))
BOTH = sorted({*REDUCE} & {*SCATTER})

# A layout, and the algorithms that it may have. Buckets are small, so that there are several of unequal sizes.
CASES = [
    ({"dp": 3, "zero": 1, "reduce_bucket_size": 700}, SCATTER),
    ({"dp": 3, "bucket_cap_mb": 0.005}, REDUCE),
    ({"dp": 4, "bucket_cap_mb": 0.005}, REDUCE),
    ({"dp": 4, "zero": 2, "reduce_bucket_size": 700}, SCATTER),
    ({"dp": 3, "zero": 3}, SCATTER),
    ({"dp": 4, "zero": 3, "dp_replicate": 2}, BOTH),
    ({"dp": 3, "pp": 2, "microbatches": 2}, ["recursive_doubling"]),
    ({"dp": 4, "experts": 2, "ep": 2}, ["recursive_doubling"]),
    ({"dp": 3, "tp": 2}, ["rabenseifner"]),
]
RUNS = [(layout, name) for layout, names in CASES for name in (*names, "auto") if name not in ("ring", "ordered")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_equal_to_one_device_with_the_bytes_of_the_algorithm(layout, name):
    config = TrainConfig.make(**JOB, **layout, reduction=name)
    ranks = resolve_dims(config).ranks
    equals_one_device(ranks, config)
    summary = run_training(config, None, 60.0, None)
    sent = summary.bytes_by_purpose["gradient_reduce"]
    assert sent["measured"] == sent["closed_form"] > 0
    assert summary.volumes_hold()


def test_the_replicas_of_pipedream():
    job = {"model": "mlp", "layers": 3, "width": 16, "steps": 4, "global_batch": 8, "microbatches": 1}
    sent = {}
    for name in ("ring", "naive", "recursive_doubling", "auto"):
        config = TrainConfig.make(**job, pp=5, schedule="pipedream", replicas="4,1", reduction=name)
        summary = run_training(config, 5, 60.0, None)
        assert summary.volumes_hold(), name
        sent[name] = summary.bytes_by_purpose["gradient_reduce"]["measured"]
    # Recursive doubling sends the array log2(4) times from each of 4 ranks, a ring 2 (4-1)/4 times.
    assert 6 * sent["recursive_doubling"] == 8 * sent["ring"] == 8 * sent["naive"]


def test_auto_takes_for_each_bucket_what_choose_returns():
    """Small and large buckets have different choices, and the trace names the algorithm of each."""
    job = {**JOB, "width": 128, "steps": 1, "global_batch": 4}
    config, world = TrainConfig.make(**job, dp=4, bucket_cap_mb=0.01, reduction="auto"), SimWorld(4)

    def program(comm):
        sizes = train(comm, config).sizes[0].buckets
        return [(size, choose(comm, "all_reduce", size * 8)) for size in sizes]

    chosen = world.run(program)[0]
    used = {m.operation for trace in world.traces for m in trace.sent("gradient_reduce")}
    assert used == {f"all_reduce/{name}" for _, name in chosen}
    assert len(used) > 1
    assert run_training(config, None, 60.0, None).volumes_hold()


def test_auto_under_a_dry_run_and_folded():
    job = {**JOB, "dp": 4, "bucket_cap_mb": 0.005, "reduction": "auto"}
    real = run_training(TrainConfig.make(**job), None, 60.0, None).bytes_by_purpose
    for fold in (False, True):
        result = dry_run(TrainConfig.make(**job), None, 60.0, None, 0, "", None, fold)
        assert result.value["bytes_by_purpose"]["gradient_reduce"] == real["gradient_reduce"], fold
