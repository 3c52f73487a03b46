"""`--compression`: bytes in closed form on every layout, nothing lost across a checkpoint, and sentences for what is
not meant.
"""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import Checkpoint
from minidist.job.checkpoint.axis_state import load_axis_state, read_rank_state
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.equality.compare import compare_rank, tier_of
from minidist.job.equality.expected import expected_snapshots
from minidist.job.train.job import build
from minidist.job.train.recipe import parallelize
from minidist.job.train.trainer import train
from minidist.planning.volumes import closed_form_bytes
from minidist.techniques.compression.elementwise import QSGD, Sign
from tests.cases import each
from tests.jobs import has_the_bits_of, train_in_closed_form

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "global_batch": 12, "bucket_cap_mb": 0.004, "lr": 1e-2}
ZERO_1 = {"zero": 1, "reduce_bucket_size": 1000, "bucket_cap_mb": 25.0}
ZERO_2 = {**ZERO_1, "zero": 2}
METHODS = ["fp16", "bf16", "topk:0.05", "topk:7", "sign", "qsgd:15", "powersgd:1"]


def config(**values):
    return TrainConfig.make(**{**SMALL, "steps": 2, **values})


def run(ranks, **values):
    made, world = config(**values), SimWorld(ranks)
    check_rules(made, resolve_batches(made, ranks))
    results = world.run(train, made)
    return made, world, results


@each("method", METHODS)
@each("ranks", [1, 2, 3])
def test_the_bytes_are_the_closed_form(method, ranks):
    results, sent = train_in_closed_form(ranks, config(compression=method))
    assert (sent["gradient_reduce"] > 0) == (ranks > 1)
    assert len(results[0].sizes[0].buckets) > 2
    assert len({r.digest for r in results}) == 1  # replicas stay replicas


@each(
    ("ranks", "layout"),
    [
        (4, {"pp": 2, "microbatches": 2}),
        (4, {"tp": 2}),
        (2, {"synchronize_each": True, "accumulation": 3}),
        (3, {"precision": "bf16"}),
        (3, ZERO_1),
        (4, {"tp": 2, "precision": "bf16", **ZERO_1}),
        (4, {"pp": 2, "microbatches": 2, **ZERO_2}),
    ],
    sampled=6,
)
@each("method", ["topk:0.05", "powersgd:1"])
def test_on_the_data_axis_of_other_layouts(method, ranks, layout):
    _, sent = train_in_closed_form(ranks, config(**{**layout, "layers": 2, "compression": method}))
    assert sent["gradient_reduce"] > 0


@each("method", METHODS, sampled=4)
@each("layout", [{"tp": 2}, {"tp": 2, **ZERO_2}, {"model": "llama", "heads": 4, "tp": 4, "kv_heads": 2, "ffn": 24}])
def test_what_tensor_parallel_ranks_hold_whole_stays_equal_on_them(method, layout):
    # Each rank compresses norms next to another shard, which must not decide what is sent of the norms.
    run(2 * layout["tp"], compression=method, check_replicas=True, **layout)


def test_top_k_of_everything_has_the_bits_of_data_parallelism():
    for ranks in (1, 3):
        one_bucket = {"bucket_cap_mb": 25.0, "optimizer": "adam"}
        size = sum(run(1, **one_bucket)[2][0].sizes[0].parameters.values())
        plain, compressed = {"reduction": "ordered"}, {"compression": f"topk:{size}"}
        digests = {run(ranks, **one_bucket, **values)[2][0].digest for values in (plain, compressed)}
        assert len(digests) == 1


@each(
    ("ranks", "values"),
    [(3, {"compression": method}) for method in ("topk:0.05", "sign", "qsgd:15", "powersgd:1")]
    + [(4, {"compression": "sign", "pp": 2, "layers": 2, "microbatches": 2})]
    + [(3, {"compression": "topk:0.05", "precision": "bf16", **ZERO_1})]
    + [(3, {"compression": method, **ZERO_2}) for method in ("sign", "qsgd:15")],
    sampled=6,
)
def test_a_resumed_job_continues_bit_for_bit(ranks, values, tmp_path):
    whole = run(ranks, steps=4, **values)[2]
    run(ranks, steps=2, **values, save=str(tmp_path))
    parts = run(ranks, steps=4, **values, save=str(tmp_path), resume=True)[2]
    has_the_bits_of(parts, whole)
    assert parts[0].first_step == 2


def test_residuals_are_in_the_memory_account():
    for method, there in (("topk:0.05", True), ("sign", True), ("qsgd:15", False)):
        result = run(2, compression=method, steps=3)[2][0]
        held = sum(result.sizes[0].buckets) * 4
        assert (result.peak_by_purpose.get("communication", 0) >= held) == there


def test_zero_2_keeps_no_whole_gradient_but_the_bucket_that_is_compressed():
    """Two micro-batches: what two ranks hold of gradients are shards, and the bucket that fills."""
    held = {}
    for zero in (1, 2):
        result = run(2, compression="qsgd:15", accumulation=2, **{**ZERO_2, "zero": zero})[2][0]
        held[zero] = result.peak_by_purpose["gradient"]
    assert held[2] < 0.85 * held[1]


def test_a_residual_moves_between_zero_1_and_data_parallelism(tmp_path):
    one_bucket = {"bucket_cap_mb": 25.0, "compression": "sign"}
    whole = run(2, steps=4, **one_bucket)[2]
    run(2, **one_bucket, zero=1, save=str(tmp_path))
    assert run(2, steps=4, **one_bucket, save=str(tmp_path), resume=True)[2][0].losses == whole[0].losses


def residuals_after_loading(comm, path, made):
    batches = resolve_batches(made, comm.size)
    strategy = parallelize(build(made, batches, comm), comm)
    load_axis_state(Checkpoint(path), strategy)
    axis = strategy.data_axes[0]
    return axis.techniques["compression"].residual(axis.parallel.reducer.buckets)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_on_another_number_of_ranks_the_sum_of_the_residuals_is_kept(ranks, tmp_path):
    made, _, _ = run(4, steps=2, compression="topk:0.05", save=str(tmp_path), precision="fp64")
    saved = Checkpoint(tmp_path)
    before = [saved.tensor(f"local/residual/stage 0 tile 0/{rank:05d}") for rank in range(4)]
    after = SimWorld(ranks).run(residuals_after_loading, tmp_path, made)
    assert np.abs(sum(before)).max() > 0
    np.testing.assert_allclose(sum(after), sum(before), rtol=0, atol=1e-16)
    if ranks == 4:
        assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))
    run(ranks, steps=4, compression="topk:0.05", save=str(tmp_path), precision="fp64", resume=True)


def test_a_residual_is_not_lost_in_silence(tmp_path):
    run(2, compression="sign", save=str(tmp_path))
    for method in ("none", "qsgd:3"):
        with pytest.raises(UsageError, match=r"holds gradients that were not sent yet .* resume with a --compression"):
            run(2, steps=3, compression=method, save=str(tmp_path), resume=True)
    run(2, steps=3, compression="topk:0.1", save=str(tmp_path), resume=True)


def test_powersgd_resumes_with_another_rank_than_it_was_saved_with(tmp_path):
    """The queries of the old rank would go on with the old rank, and without a word."""
    run(2, compression="powersgd:1", save=str(tmp_path))
    made, world, results = run(2, steps=3, compression="powersgd:2", save=str(tmp_path), resume=True)
    sent = sum(m.nbytes for trace in world.traces for m in trace.sent("gradient_reduce"))
    once = made.model_copy(update={"steps": 1})
    closed = closed_form_bytes(once, resolve_batches(made, 2), [r.sizes for r in results])
    assert sent == closed["gradient_reduce"]


@pytest.mark.parametrize("state", [{}, {"w": np.ones((2, 2))}, {"calls": np.ones(3)}])
def test_qsgd_refuses_the_state_of_another_compressor(state):
    with pytest.raises(UsageError, match="not that of qsgd; resume with the --compression"):
        SimWorld(1).run(lambda comm: QSGD(comm).load_shared_state(state))


def verdict(ranks, **values):
    made = config(**{"data": "markov", "clip": 0.5, **values})
    check_rules(made, resolve_batches(made, ranks))
    return SimWorld(ranks).run(compare_rank, made, expected_snapshots(made, ranks))[0]


PIPELINE = {"pp": 2, "layers": 2, "microbatches": 2, "check_replicas": True}  # its tied weight has two copies


@each(
    ("method", "ranks", "layout"),
    [(method, 3, {"accumulation": 2}) for method in METHODS]
    + [(method, 4, PIPELINE) for method in ("sign", "powersgd:1")]
    + [("topk:0.05", 2, {"synchronize_each": True, "accumulation": 2}), ("qsgd:15", 1, {})]
    # Residuals in float32 next to gradients of 16 bits, and a rank that keeps its shard of the sum.
    + [(method, 2, {"precision": "bf16", "accumulation": 2}) for method in METHODS if method != "topk:7"]
    + [(method, 3, ZERO_1) for method in METHODS if method != "topk:7"]
    + [(method, 3, {"accumulation": 2, **ZERO_2}) for method in METHODS if method != "topk:7"]
    + [("topk:0.05", 2, {"precision": "bf16", **ZERO_2})]
    + [("bf16", 2, {"precision": "fp16", "loss_scale": 2.0**24}), ("sign", 4, {**PIPELINE, **ZERO_1})]
    + [("topk:0.05", 2, {"synchronize_each": True, "accumulation": 2, "precision": "bf16", **ZERO_1})],
    sampled=4,
)
def test_it_equals_one_device_that_keeps_every_replicas_residual(method, ranks, layout):
    result = verdict(ranks, compression=method, **layout)
    assert result.equal, result.first_difference
    assert (result.tier, result.bound, result.steps) == ("ordered", 0.0, 2)


def test_a_residual_that_is_lost_is_found(monkeypatch):
    monkeypatch.setattr(Sign, "keep", lambda self, bucket, residual: None)
    assert "gradients" in verdict(2, compression="sign").first_difference


def test_what_no_bound_holds_for_is_not_compared():
    made = config(compression="sign", tp=2)
    with pytest.raises(UsageError, match=r"--tp 2 cuts the sums .* --compression sign makes another choice"):
        tier_of(made, resolve_batches(made, 2).dims)
    made = config(compression="sign", pp=2, zero=2, layers=2, microbatches=2)
    with pytest.raises(
        UsageError, match=r"--compression sign, --zero 2 and --pp 2 .* compare with --zero 1, or without"
    ):
        tier_of(made, resolve_batches(made, 4).dims)


def test_ranks_of_a_smaller_job_take_over_the_residuals_of_every_nth_rank(tmp_path):
    """Rank r of n gets those of r, r + n, r + 2n, ..., as the head of job/checkpoint/axis_state.py says."""
    run(5, steps=2, compression="topk:0.05", save=str(tmp_path), precision="fp64", global_batch=10)
    saved = Checkpoint(tmp_path)
    before = [saved.tensor(f"local/residual/stage 0 tile 0/{rank:05d}") for rank in range(5)]
    for rank, held in enumerate(SimWorld(2).run(lambda comm: read_rank_state(saved, NAME, comm.rank, 2))):
        np.testing.assert_array_equal(held, sum(before[rank::2]))


NAME = "residual/stage 0 tile 0"
