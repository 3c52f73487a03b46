"""Half precision with tensor and context parallelism: right jobs are within measured rounding, and bugs are not."""

import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.parallel import tensor_parallel
from minidist.course.museum import split
from minidist.job.config.train_config import TrainConfig
from minidist.job.equality.compare import compare_rank
from minidist.job.equality.expected import expected_snapshots
from minidist.job.train.trainer import train
from tests.cases import each
from tests.train.test_shares import check_bytes, config_of

JOB = {"model": "gpt", "layers": 2, "width": 32, "heads": 4, "context": 16, "data": "markov", "global_batch": 8}
JOB |= {"steps": 3, "lr": 0.01, "reduction": "ordered"}
LLAMA = {"model": "llama", "kv_heads": 2}


def verdict(ranks, **values):
    config = TrainConfig.make(**{**JOB, **values})
    expected = expected_snapshots(config, ranks)
    return SimWorld(ranks).run(compare_rank, config, expected)[0]


LAYOUTS = [
    (2, {"tp": 2}),
    (4, {"dp": 2, "tp": 2, "accumulation": 2}),
    (4, {"tp": 2, "zero": 1, "clip": 0.5, "sequence_parallel": True}),
    (4, {"tp": 2, "pp": 2, "microbatches": 4}),
    (2, {"cp": 2}),
    (4, {"cp": 2, "zero": 3, "attention": "ulysses"}),
    (4, {**LLAMA, "tp": 4}),
    (4, {**LLAMA, "tp": 2, "cp": 2, "optimizer": "lamb"}),
]


@each(
    ("ranks", "layout", "precision"),
    [(*case, precision) for case in LAYOUTS for precision in ("bf16", "fp16", "fp32")],
    sampled=12,
)
def test_a_job_in_lower_precision_is_within_rounding(ranks, layout, precision):
    result = verdict(ranks, precision=precision, seed=ranks, **layout)
    assert result.equal, result.first_difference
    assert result.tier == "rounding"
    # Room for other data, and hardly a tensor that is not judged.
    assert result.share < 0.7
    assert result.unjudged <= 0.02 * result.tensors
    # Below 1, the distance of a tensor that is missing.
    assert result.bound < 1
    assert result.tensors > 400
    said = result.sentence()
    assert "within rounding (rounding tier)" in said
    assert "8 times the distance of one device in this precision from one device in float64" in said
    assert {"share", "unjudged"} < set(result.as_dict())


def test_bf16_with_tensor_and_data_parallelism_sends_half_and_is_resumed_bit_for_bit(tmp_path):
    """The layout of most large jobs: what it sends is the closed form, and a saved job goes on with the same bits."""
    sent, runs = {}, {}
    for precision in ("fp32", "bf16"):
        config, batches, ranks = config_of(**{**JOB, "dp": 2, "tp": 2, "precision": precision})
        world = SimWorld(ranks)
        runs[precision] = world.run(train, config)
        check_bytes(config, batches, world, runs[precision])
        sent[precision] = world.traces[0].bytes_by_purpose()
    # The split loss sums three float32 numbers per token in either precision.
    loss = JOB["steps"] * 3 * 4 * JOB["global_batch"] // 2 * JOB["context"]
    full, half = sent["fp32"], sent["bf16"]
    assert 2 * half["gradient_reduce"] == full["gradient_reduce"]
    assert 2 * half["tensor_backward"] == full["tensor_backward"]
    assert 2 * (half["tensor_forward"] - loss) == full["tensor_forward"] - loss

    saved = {**JOB, "dp": 2, "tp": 2, "precision": "bf16", "save": str(tmp_path)}
    SimWorld(4).run(train, TrainConfig.make(**{**saved, "steps": 1}))
    resumed = SimWorld(4).run(train, TrainConfig.make(**saved, resume=True))
    assert [result.digest for result in resumed] == [result.digest for result in runs["bf16"]]
    assert resumed[0].losses == runs["bf16"][0].losses


def test_the_verdict_says_that_context_ranks_route_experts_by_themselves():
    """No plain job on one device has these losses; with tensor parallelism one has."""
    job = {"experts": 4, "precision": "fp64"}
    said = verdict(2, cp=2, **job).sentence()
    assert "one device that routes the tokens of each of the 2 context-parallel ranks by themselves agree" in said
    assert "2 ranks and one device agree within 1e-12" in verdict(2, tp=2, **job).sentence()
    plain = expected_snapshots(TrainConfig.make(**JOB, **job), 1)
    routed = expected_snapshots(TrainConfig.make(**JOB, **job, cp=2), 2)
    split = expected_snapshots(TrainConfig.make(**JOB, **job, tp=2), 2)
    assert plain[-1]["loss"]["loss"] == split[-1]["loss"]["loss"] != routed[-1]["loss"]["loss"]


def test_experts_in_lower_precision_are_refused_because_routing_jumps():
    with pytest.raises(UsageError, match=r"--cp 2 cuts the sums.*--experts makes another choice.*in bf16 no tolerance"):
        verdict(2, cp=2, experts=4, precision="bf16")


def test_a_skipped_step_of_float16_is_said():
    with pytest.raises(UsageError, match=r"one device skips step 0, because.*overflow.*smaller --loss-scale"):
        verdict(2, tp=2, precision="fp16", loss_scale=2.0**60)


def only(patch, summed_in):
    """Let f and g sum in one of the directions alone."""
    summed = tensor_parallel._summed
    patch.setattr(tensor_parallel, "_summed", lambda comm, x, why: summed(comm, x, why) if why == summed_in else x + 0)


def not_summed_in_backward(patch):
    """the gradient of the input of a column-parallel layer is that of this rank's columns"""
    only(patch, "tensor_forward")


def not_summed_in_forward(patch):
    only(patch, "tensor_backward")


TP, CP = {"tp": 2}, {"cp": 2}


@each("precision", ["bf16", "fp16"], sampled=9)
@each(
    ("bug", "layout"),
    [
        (not_summed_in_backward, TP),
        (not_summed_in_forward, TP),
        (split.contiguous_qkv, TP),
        (split.short_vocabulary, TP),
        (split.norms_not_reduced, {**TP, "sequence_parallel": True}),
        (split.biases_not_reduced, {**TP, "sequence_parallel": True}),
        (split.shared_heads_not_summed, {**LLAMA, "tp": 4}),
        (split.gradients_stay, CP),
        (split.bias_on_every_rank, TP),
    ],
)
def test_a_bug_is_found_in_lower_precision(bug, layout, precision, monkeypatch):
    config = TrainConfig.make(**{**JOB, **layout, "precision": precision})
    ranks = max(layout.get("tp", 1), layout.get("cp", 1))
    expected = expected_snapshots(config, ranks)
    bug(monkeypatch)
    result = SimWorld(ranks).run(compare_rank, config, expected)[0]
    assert not result.equal
    assert "its tolerance is" in result.first_difference
