"""`--precision fp16`: what a job says of its loss scale, and the hooks with which any technique scales or leaves out.

That every layout equals one device is in tests/train/test_precision.py, the rules of the scale are in
tests/optim/test_loss_scale.py.
"""

import json

import pytest

from minidist.base.exponents import by_exponent
from minidist.base.trace_file import read_traces
from minidist.comm import SimWorld
from minidist.job.checkpoint.directory import Checkpoint
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from minidist.optim import LossScaleError
from tests.jobs import equals_one_device, train_in_closed_form

JOB = {"layers": 2, "width": 16, "heads": 2, "context": 6, "data": "markov", "steps": 4, "micro_batch": 1}
FP16 = {"precision": "fp16", "accumulation": 2}


def test_the_command_says_scale_and_skipped_steps(minidist, tmp_path):
    job, trace = "train --model mlp --dp 2 --steps 3 --precision fp16 --loss-scale 1048576", tmp_path / "t.jsonl"
    found = json.loads(minidist(*job.split(), "--json", "--trace", trace).out)
    assert found["loss_scale"]["skipped"] > 0
    assert found["loss_scale"]["scale"] < 2.0**20
    assert found["bytes_by_purpose"]["overflow"] == {"measured": 6, "closed_form": 6}
    # The picture of the exponents needs the scale.
    assert read_traces(trace)[1]["loss_scale"] == found["loss_scale"]["scale"]
    shown = minidist(*job.split(), "--trace", "none").out
    scale, skipped = found["loss_scale"]["scale"], found["loss_scale"]["skipped"]
    assert f"loss scale {scale:,g}; steps skipped because a gradient overflowed: {skipped}" in shown


def test_a_static_scale_stays_and_its_counters_are_in_the_checkpoint(tmp_path):
    settings = {**JOB, **FP16, "loss_scale": 2.0**24, "static_loss_scale": True, "save": str(tmp_path)}
    result = SimWorld(2).run(train, TrainConfig.make(**settings))[0]
    assert result.measured["loss_scale"] == {"scale": 2.0**24, "skipped": 4}
    assert result.skipped == 4
    scalars = Checkpoint(str(tmp_path)).state["scalars"]
    assert {name: scalars[f"loss_scale.{name}"] for name in ("scale", "skipped")} == {"scale": 2.0**24, "skipped": 4}


def test_a_job_ends_when_gradients_overflow_at_the_smallest_scale():
    limits = {"loss_scale": 2.0**24, "loss_scale_floor": 2.0**24, "loss_scale_hysteresis": 1}
    config = TrainConfig.make(**JOB, **FP16, **limits, loss_scale_floor_limit=2)
    with pytest.raises(LossScaleError, match="overflowed 2 steps in a row"):
        SimWorld(2).run(train, config)


LAYOUTS = [(1, {}), (2, {"dp": 2}), (2, {"zero": 1}), (2, {"zero": 3}), (4, {"pp": 2, "microbatches": 2})]

LEAVES_OUT = """
from minidist.techniques import Extension

class LeavesOut(Extension):
    seen = ()
    def updates(self, strategy, comm):
        self.steps = getattr(self, "steps", 0) + 1
        return self.steps != 2
    def after_update(self, moment):
        self.seen = (*self.seen, moment.skipped)
    def result(self):
        return {"left_out": self.seen}
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_any_technique_may_leave_an_update_out(ranks, layout, tmp_path):
    source = tmp_path / "user.py"
    source.write_text(LEAVES_OUT)
    config = TrainConfig.make(**JOB, **layout, clip=0.5, reduction="ordered", extension=f"{source}:LeavesOut")
    equals_one_device(ranks, config)
    # It made the others, and nothing was clipped or gathered for it.
    results, _ = train_in_closed_form(ranks, config)
    assert [result.measured["left_out"] for result in results] == [(False, True, False, False)] * ranks
    assert [result.skipped for result in results] == [1] * ranks


SCALES = """
from minidist.techniques import Extension

class Scales(Extension):
    scale = 4.0
    def scaled(self, loss):
        return loss * self.scale
    def after_backward(self, strategy, step):
        for gradient in strategy.gradients():
            gradient /= self.scale
"""


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_any_technique_may_scale_the_loss_and_a_power_of_two_changes_no_bit(ranks, layout, tmp_path):
    source = tmp_path / "user.py"
    source.write_text(SCALES)
    job = {**JOB, **layout, "clip": 0.5, "reduction": "ordered"}
    plain = SimWorld(ranks).run(train, TrainConfig.make(**job))
    scaled = SimWorld(ranks).run(train, TrainConfig.make(**job, extension=f"{source}:Scales"))
    assert [result.digest for result in scaled] == [result.digest for result in plain]
    # Losses are reported as they are. The sizes of gradients are divided by the scale, and here they were before.
    assert scaled[0].losses == plain[0].losses
    for ours, theirs in zip(scaled, plain, strict=True):
        assert by_exponent(ours.gradient_exponents) == {
            exponent - 2: count for exponent, count in by_exponent(theirs.gradient_exponents).items()
        }
