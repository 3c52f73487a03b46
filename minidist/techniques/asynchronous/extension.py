"""`--schedule pipedream`, `pipedream-vertical-sync`, `pipedream-2bw`: a pipeline that does not drain between steps.

Each stage updates its weights as soon as it has its gradients, so a micro-batch meets a different version of the
weights on each stage (`pipeline.py`). One device computes each micro-batch with the versions that the rule of the
schedule names (`replay.py`). The plans are in `pipeline/schedules`, and `planning/pipeline_volumes.py` counts their
messages as those of all pipelines.

A rank sends per step: an activation and its gradient per stage boundary and micro-batch; each of r replicas of a stage
also 2 (r-1)/r of the stage's gradients per update, which 2BW makes after every batch and the others after r
micro-batches.
Equal to: one device that uses the same versions of the weights, bit for bit.
Lesson: 17b_pipedream_and_weight_stashing, 17c_two_versions.

Proved by: tests/train/test_asynchronous.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.techniques import Extension, Rule, Value


def _divides(axis: str) -> Value:
    """Return whether such a pipeline is one of several on an axis, or is split over it."""
    return lambda j: j.asynchronous and getattr(j, axis) != 1


class Asynchronous(Extension):
    """Runs the pipeline of a schedule that updates the weights on the way."""

    switches = (("schedule", "1f1b"),)
    panel = "Pipeline parallelism"
    rules = (
        # No moment has the gradients, or the weights, of one step on all stages.
        Rule(
            "stashing-updates-every-micro-batch",
            lambda j: j.updates in ("stash", "vertical-sync") and j.microbatches > 1,
            "--schedule {schedule} updates after every micro-batch, and a step has {microbatches} of them",
            "use --microbatches 1, or pipedream-2bw",
        ),
        *(
            Rule(
                f"asynchronous-with-{name}",
                _divides(name),
                f"not implemented: --schedule {{schedule}} runs on one pipeline of whole layers, without --{name}"
                f" {{{name}}}",
                f"use {instead}",
            )
            for name, instead in (
                ("dp", "--replicas 2,1,.."),
                ("tp", "a synchronous schedule"),
                ("cp", "a synchronous schedule"),
            )
        ),
        Rule(
            "asynchronous-with-zero",
            lambda j: j.asynchronous and j.zero,
            "--zero {zero} is of the gradients that data-parallel ranks reduce, and --schedule {schedule} has no such"
            " ranks",
            "use a synchronous schedule, such as 1f1b",
        ),
    )
    drains = False

    @classmethod
    def used_by(cls, config: Any) -> bool:
        from minidist.job.config.train_config import updates_of

        return config.pp > 1 and updates_of(config.schedule) != "flush"

    def pipeline(self) -> Any:
        from minidist.techniques.asynchronous.pipeline import AsynchronousPipeline

        return AsynchronousPipeline

    def reference(self, config: Any, batches: Any, observers: Sequence[Any]) -> list[float]:
        from minidist.techniques.asynchronous.replay import replay

        return replay(config, batches, observers)
