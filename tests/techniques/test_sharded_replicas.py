"""`--local-steps` over replicas that are several ranks: ZeRO 1 to 3 inside a replica, averages shard by shard."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.commands.runner import run_training
from minidist.core.base.errors import UsageError
from minidist.core.nn import GPT, GPTConfig
from minidist.core.parallel.fsdp import fully_shard, shards_of
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches, resolve_dims
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.optim import SGD
from minidist.techniques.local_sgd.averaging import PeriodicModelAverager
from tests.cases import each
from tests.jobs import has_the_bits_of, replicas_equal_one_device

SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 8, "steps": 4, "micro_batch": 1, "reduction": "ordered"}
DILOCO = {"outer_optimizer": "nesterov", "outer_lr": 0.5}
STREAM = {**DILOCO, "local_steps": 3, "outer_fragments": 3, "outer_delay": 2, "outer_mixing": 0.5, "steps": 6}
UNEVEN = {"global_batch": 9, "micro_batch": None}
CNN = {"model": "cnn", "data": "glyphs", "width": 4, "heads": 4, "context": 64}  # the last two are defaults


def config(**values):
    return TrainConfig.make(**{**SMALL, "dp": 4, "dp_replicate": 2, "local_steps": 2, **values})


@each(
    "values",
    [
        {"zero": 3, **STREAM, "accumulation": 2, "persistence_threshold": 40},
        {"zero": 1, "optimizer": "adamw", "dropout": 0.1, "accumulation": 2},
        {"zero": 2, "optimizer": "sgd", "momentum": 0.9, "accumulation": 2},
        {"zero": 3, "optimizer": "adamw", "accumulation": 2, "prefetch": 2},
        {"zero": 1, "dp": 6, "dp_replicate": 3, **DILOCO},
        {"zero": 2, "optimizer": "lamb", **DILOCO},
        {"zero": 3, "dp": 6, "dp_replicate": 2, "persistence_threshold": 40, **DILOCO},
        {"zero": 3, "optimizer": "muon", "momentum": 0.9, "lr": 0.01},
        {"zero": 1, **UNEVEN},
        {"zero": 3, **UNEVEN, "weights": "3,1,2,2", "global_batch": 16, "accumulation": 2, **DILOCO},
        {"zero": 1, **STREAM},
        {"zero": 2, **STREAM, "dp": 6, "optimizer": "sgd", "momentum": 0.9},
        {"zero": 3, **STREAM, **UNEVEN},
        {"zero": 1, "offload": "optimizer", **DILOCO},
        {"zero": 3, "offload": "parameters", **STREAM},
        {"zero": 3, "dp": 2, "recompute": "full"},
        {"zero": 2, "pp": 2, "accumulation": 2, **DILOCO},
        {"zero": 3, "pp": 2, "accumulation": 2, "schedule": "interleaved", "chunks": 2, "layers": 4},
        {"zero": 1, **CNN},
        {"zero": 3, **CNN, "pp": 2, "accumulation": 2},
    ],
    sampled=6,
)
def test_every_replica_equals_one_device_bit_for_bit(values):
    """Loss, gradients, weights, inner and outer state after every step: those of single devices that average."""
    made = config(**values)
    ranks = resolve_dims(made).ranks
    check_rules(made, resolve_batches(made, ranks))
    expected = replicas_equal_one_device(ranks, made, made.dp // made.dp_replicate)
    first, second = (steps[0]["weights"] for steps in expected[:2])
    # Before the first average the replicas have different weights.
    assert any(not np.array_equal(first[name], second[name]) for name in first)


@each("zero", [3, 1], sampled=2)
def test_with_tensor_parallelism_too(zero):
    for verdict in SimWorld(8).run(compare_rank, config(zero=zero, tp=2, precision="fp64", steps=2, **DILOCO)):
        assert verdict.equal, verdict.first_difference
        assert verdict.tier == "float"


@each(
    "values",
    [
        {"zero": 1, "steps": 5},
        {"zero": 2, "accumulation": 2, **DILOCO},
        {"zero": 3, "accumulation": 2, "steps": 5, "persistence_threshold": 40},
        {"zero": 1, **STREAM},
        {"zero": 2, "dp": 6, **STREAM},
        {"zero": 3, **STREAM, "reduction": "ring"},
        {"zero": 3, "dp": 2},
        {"zero": 3, "reshard_after_forward": "false", "optimizer": "lamb"},
        {"zero": 2, "optimizer": "muon", "momentum": 0.9},
        {"zero": 1, **CNN},
        {"zero": 3, **CNN, "pp": 2, "accumulation": 2},
        {"zero": 2, "pp": 2, "tp": 2, "accumulation": 2, **DILOCO},
        {"zero": 3, "pp": 2, "accumulation": 4, "schedule": "dualpipe"},
        {"zero": 1, "evaluate_every": 2},
        {"zero": 3, "evaluate_every": 2, "persistence_threshold": 40},
    ],
    sampled=6,
)
def test_the_bytes_are_the_closed_form(values, tmp_path):
    made = config(**values)
    summary = run_training(made, None, 60.0, tmp_path / "t.jsonl")
    assert summary.volumes_hold(), summary.bytes_by_purpose
    assert ("gradient_reduce" in summary.bytes_by_purpose) == (made.dp > made.dp_replicate)


@each(
    "values",
    [*({"zero": z, **STREAM} for z in (1, 2, 3)), {"zero": 1}, {"zero": 2, **DILOCO}, {"zero": 3, **DILOCO}],
    sampled=4,
)
def test_a_resumed_job_has_the_bits_of_the_undisturbed_one(values, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("saved"))
    made = {"optimizer": "adamw", "dropout": 0.1, **values}
    every = made.get("local_steps", 2)
    whole = SimWorld(4).run(train, config(**{**made, "steps": 8}))
    SimWorld(4).run(train, config(**{**made, "steps": 6}, save=directory, every=every))
    for step in (every, 6):
        again = config(**{**made, "steps": 8}, save=directory, resume=True, from_step=step)
        resumed = SimWorld(4).run(train, again)
        has_the_bits_of(resumed, whole)
        if "outer_fragments" not in made:
            break  # the last checkpoint follows an average, and the job would make none there


def test_a_resumed_job_counts_its_bytes_and_needs_its_replicas(tmp_path):
    made = {**STREAM, "zero": 2, "save": str(tmp_path)}
    SimWorld(4).run(train, config(**{**made, "steps": 4}))
    summary = run_training(config(**made, resume=True), None, 60.0, tmp_path / "t.jsonl")
    assert summary.volumes_hold(), summary.bytes_by_purpose
    with pytest.raises(UsageError, match=r"2 replicas .* this job has 4 replicas; resume with --dp-replicate 2"):
        SimWorld(4).run(train, config(**{**made, "steps": 8}, dp_replicate=4, resume=True))


def test_replicas_are_resumed_with_other_shards(tmp_path):
    """A checkpoint has the state of each replica whole: two replicas of ZeRO 3 on 2 ranks go on with ZeRO 1 on 3."""
    made = {"optimizer": "adamw", "precision": "fp64", "global_batch": 12, "micro_batch": None, **DILOCO}
    whole = SimWorld(4).run(train, config(**made, zero=3))
    SimWorld(4).run(train, config(**made, zero=3, steps=2, save=str(tmp_path)))
    resumed = SimWorld(6).run(train, config(**made, zero=1, dp=6, save=str(tmp_path), resume=True))
    np.testing.assert_allclose(resumed[0].losses, whole[0].losses, rtol=0, atol=1e-12)


def test_an_fsdp_model_of_one_s_own_is_averaged_by_shards():
    """Without a job: two replicas of two ranks, by `fully_shard` and `shards_of`, as users write it."""

    def program(comm):
        inner, outer = comm.split(comm.rank // 2, comm.rank), comm.split(comm.rank % 2, comm.rank)
        model = GPT(GPTConfig(vocab_size=11, n_positions=4, n_layer=1, n_embd=16, n_head=2), dtype=np.float64)
        for part in (*model.transformer.h, model):
            fully_shard(part, mesh=inner)
        shards = shards_of(model)
        for shard in shards:
            shard.data[...] += comm.rank
        average = PeriodicModelAverager(shards, outer, every=2)
        starts = [shard.data.copy() for shard in shards]
        optimizer = SGD([piece for shard in shards for piece in shard.slices()], lr=1.0)
        done = []
        for step in range(2):
            for shard in shards:
                shard.grad_buffer()[...] = 1 + comm.rank // 2 + step
                shard.filled = True
            optimizer.step()
            done.append(average.step())
        return done, starts, [shard.data.copy() for shard in shards]

    results = SimWorld(4).run(program)
    for rank, (done, starts, ends) in enumerate(results):
        assert done == [False, True]
        # The start is that of the first replica; both steps together are 1 + 2 and 2 + 3, and 4 on average. Padding
        # stays, and a shard may be nothing else.
        assert all(np.array_equal(a, b) for a, b in zip(starts, results[rank % 2][1], strict=True))
        moved = [np.unique(np.round(start - end, 12)) for start, end in zip(starts, ends, strict=True)]
        assert set(np.concatenate(moved)) == {0.0, 4.0}
