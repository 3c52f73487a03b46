"""`--local-steps H`: every replica is one that trains alone on one device, averaged where the ranks average."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.commands.runner import run_training
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from tests.cases import each
from tests.jobs import has_the_bits_of, replicas_equal_one_device

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "steps": 4, "micro_batch": 2, "reduction": "ordered"}


def config(**values):
    return TrainConfig.make(**{**SMALL, **values})


@each(("ranks", "every"), [(1, 3), (2, 1), (3, 3), (4, 9), (5, 2), (8, 3)], sampled=2)
def test_every_replica_equals_one_device_bit_for_bit(ranks, every):
    made = config(local_steps=every, accumulation=2, optimizer="adam", dropout=0.1, warmup=2)
    replicas_equal_one_device(ranks, made)


UNEVEN = {"global_batch": 11, "micro_batch": None}


@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (3, UNEVEN),
        (3, {**UNEVEN, "weights": "3,1,2", "accumulation": 2, "global_batch": 13}),
        (2, {**UNEVEN, "weights": "3,1", "outer_optimizer": "nesterov"}),
        (2, {**UNEVEN, "model": "cnn", "data": "glyphs", "width": 4, "heads": 12, "context": 128}),
    ],
)
def test_replicas_with_different_rows_count_in_proportion(ranks, values):
    """Federated averaging, after each of two rounds; running statistics too."""
    made = config(local_steps=2, optimizer="adamw", **values)
    assert not resolve_batches(made, ranks).shares.is_even
    replicas_equal_one_device(ranks, made)


def test_uneven_replicas_with_one_step_and_sgd_are_data_parallelism():
    """sum n_r / n (w - lr g_r) is w - lr times the gradient of the mean over all rows."""
    uneven = {**UNEVEN, "weights": "4,1,1", "optimizer": "sgd", "lr": 0.1, "precision": "fp64"}
    local, parallel = states(3, local_steps=1, **uneven), states(3, **uneven)
    for key in local:
        for name, weight in local[key].items():
            np.testing.assert_allclose(weight, parallel[key][name], rtol=0, atol=1e-13)


DILOCO = {"outer_optimizer": "nesterov", "outer_lr": 0.5}


@pytest.mark.parametrize(("ranks", "every"), [(1, 2), (3, 2), (4, 3)])
def test_diloco_equals_its_replay_on_one_device_bit_for_bit(ranks, every):
    """Weights, gradients, the inner optimizers' state and the outer momentum, of every replica after every step."""
    made = config(local_steps=every, optimizer="adamw", weight_decay=0.1, dropout=0.1, **DILOCO)
    last = replicas_equal_one_device(ranks, made)[0][-1]["optimizer"]
    assert {key.rsplit(".", 1)[-1] for key in last} == {"exp_avg", "exp_avg_sq", "outer_momentum", "step_count"}


@pytest.mark.parametrize("outer", [{}, DILOCO], ids=["average", "diloco"])
def test_an_offloaded_optimizer_goes_on_from_the_average(outer):
    """Its copies on the host are refreshed; before, they brought back the weights from before the average."""
    replicas_equal_one_device(2, config(local_steps=2, offload="optimizer", **outer))


def test_two_rounds_of_the_paper_by_hand():
    """d = common - average; b = mu b + d; common -= lr (d + mu b); an outer rate of 1 without momentum is local SGD."""
    name, plain = "transformer.h.0.mlp.c_fc.weight", {"optimizer": "sgd", "lr": 0.1, "precision": "fp64"}
    start = states(2, local_steps=1, steps=1, **{**plain, "lr": 1e-12})[0, 0][name]
    ran = states(2, local_steps=2, outer_momentum=0.8, **DILOCO, **plain)
    free = states(2, local_steps=2, **plain)
    average = free[0, 1][name]  # after the first round, from the same start
    first = start - 0.5 * (start - average) * 1.8
    assert np.allclose(ran[0, 1][name], first, rtol=0, atol=1e-9)
    assert np.array_equal(ran[0, 1][name], ran[1, 1][name])
    same = states(2, local_steps=2, outer_optimizer="nesterov", outer_lr=1.0, outer_momentum=0.0, **plain)
    assert np.allclose(same[0, 3][name], free[0, 3][name], rtol=0, atol=1e-13)


def states(ranks, **values):
    """Weights of each rank after each step."""
    seen = {}
    SimWorld(ranks).run(
        train,
        config(**values),
        [lambda state: seen.update({(state.rank, state.step): state.strategy.tensors()["weights"]})],
    )
    return seen


@pytest.mark.parametrize(("steps", "every", "averages"), [(4, 1, 4), (5, 2, 3), (3, 9, 1)])
def test_the_bytes_are_the_closed_form(steps, every, averages, tmp_path):
    summary = run_training(config(dp=3, steps=steps, local_steps=every), None, 60.0, tmp_path / "t.jsonl")
    assert summary.volumes_hold()
    assert "gradient_reduce" not in summary.bytes_by_purpose
    weights = summary.bytes_by_purpose["startup"]["measured"] - 2 * 16  # (n-1) times the weights, and a digest
    assert summary.bytes_by_purpose["parameter_gather"]["measured"] == averages * 2 * weights


# Replicas of several ranks: each meets those that have the same part of the other replicas.
OF_SEVERAL = {
    "tp": {"tp": 2, "dp": 2},
    "pp": {"pp": 2, "dp": 2, "layers": 2, "accumulation": 2},
    "interleaved, tp": {
        "pp": 2,
        "tp": 2,
        "dp": 2,
        "layers": 4,
        "schedule": "interleaved",
        "chunks": 2,
        "accumulation": 2,
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("outer", [{}, DILOCO], ids=["average", "diloco"])
@pytest.mark.parametrize("layout", OF_SEVERAL.values(), ids=list(OF_SEVERAL))
def test_replicas_of_several_ranks_equal_one_device_and_the_bytes_the_closed_form(layout, outer, tmp_path):
    made = config(local_steps=2, **layout, **outer, **({"precision": "fp64"} if "tp" in layout else {}))
    ranks = layout["dp"] * layout.get("tp", 1) * layout.get("pp", 1)
    for verdict in SimWorld(ranks).run(compare_rank, made):
        assert verdict.equal, verdict.first_difference
        assert verdict.tier == ("float" if "tp" in layout else "ordered")
    summary = run_training(made, None, 60.0, tmp_path / "t.jsonl")
    assert summary.volumes_hold()
    assert summary.bytes_by_purpose["parameter_gather"]["measured"] > 0


@pytest.mark.parametrize("layout", [OF_SEVERAL["tp"], OF_SEVERAL["pp"]], ids=["tp", "pp"])
def test_replicas_of_several_ranks_resume(layout, tmp_path):
    made = {**layout, **DILOCO, "local_steps": 2, "optimizer": "adamw"}
    whole = SimWorld(4).run(train, config(**made, steps=4))
    SimWorld(4).run(train, config(**made, steps=2, save=str(tmp_path)))
    resumed = SimWorld(4).run(train, config(**made, steps=4, save=str(tmp_path), resume=True))
    has_the_bits_of(resumed, whole)


def test_the_running_statistics_of_a_pipeline_stay_with_its_replica(tmp_path):
    """They are averaged with the weights, and not in every step."""
    images = {"model": "cnn", "data": "glyphs", "width": 4, "heads": 4, "context": 64}
    made = config(dp=2, pp=2, layers=2, accumulation=2, local_steps=2, **images)
    assert run_training(made, None, 60.0, tmp_path / "t.jsonl").volumes_hold()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("optimizer", "outer"), [("adam", {}), ("sgd", {}), ("adamw", DILOCO), ("sgd", DILOCO)])
def test_a_resumed_job_has_the_bits_of_the_undisturbed_one(optimizer, outer, tmp_path):
    momentum = 0.9 if optimizer == "sgd" and not outer else 0.0
    made = {"local_steps": 2, "optimizer": optimizer, "momentum": momentum, "dropout": 0.1, **outer}
    whole = SimWorld(3).run(train, config(**made, steps=7))
    SimWorld(3).run(train, config(**made, steps=6, save=str(tmp_path), every=2))
    for step in (2, None):  # the last checkpoint has 6 steps
        resumed = SimWorld(3).run(train, config(**made, steps=7, save=str(tmp_path), resume=True, from_step=step))
        has_the_bits_of(resumed, whole)
        (tmp_path / "latest").write_text("step-00000006")


def test_a_resumed_job_counts_its_bytes_and_needs_its_replicas(tmp_path):
    made = {"local_steps": 2, "save": str(tmp_path)}
    SimWorld(3).run(train, config(**made, steps=2))
    summary = run_training(config(**made, dp=3, steps=5, resume=True), None, 60.0, tmp_path / "t.jsonl")
    assert summary.volumes_hold()
    with pytest.raises(UsageError, match="after 5 steps, where --local-steps 2 makes no average otherwise"):
        SimWorld(3).run(train, config(**made, steps=8, resume=True))
    with pytest.raises(UsageError, match=r"optimizer states of 3 replicas .* has 2 ranks; resume on 3"):
        SimWorld(2).run(train, config(**made, steps=8, resume=True, from_step=2, micro_batch=3))
    with pytest.raises(UsageError, match="made with --local-steps 2, this job has 0"):
        SimWorld(3).run(train, config(save=str(tmp_path), steps=8, resume=True, from_step=2))
