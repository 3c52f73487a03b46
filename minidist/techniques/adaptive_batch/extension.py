"""`--noise-scale`, `--adaptive-batch`, `--weights measured:K`: the batch of each step follows from measurements.

The gradient noise scale says up to which size a larger batch saves steps (`noise_scale.py`), and is measured while the
model trains (`meter.py`); with --adaptive-batch the batch grows up to it. With --weights measured:K the number of rows
of a replica follows from the speed of its ranks (`plan.py`).

A rank sends per step: for the noise scale 2 (n-1)/n of 8 B per step, or of 16 B where gradients are sharded; for the
speeds of the ranks 8 (n-1) B every K steps.
Equal to: one device that is told the batches, bit for bit.
Lesson: 10b_batch_size_and_noise, 10c_uneven_ranks, 06d_fewer_bytes.

Proved by: tests/techniques/test_noise_scale.py, tests/techniques/test_batch_plan.py
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from minidist.core.comm import Comm
from minidist.data import measured_every
from minidist.techniques import Extension, Run
from minidist.techniques.adaptive_batch.meter import NoiseMeter, shards_gradients
from minidist.techniques.adaptive_batch.noise_scale import NoiseScale, sharded_estimate_volume
from minidist.techniques.adaptive_batch.plan import VaryingPlan, load_balance_volume
from minidist.techniques.adaptive_batch.rules import RULES, AdaptiveBatchSettings, changing

NUMBER = 8  # bytes of a float64


class AdaptiveBatches(Extension):
    """Measures the noise of the gradient and the speeds of the ranks, and chooses the next batch."""

    Settings = AdaptiveBatchSettings
    switches = (("weights", None),)
    panel = "Batch"
    rules = RULES
    observes = True  # the reference on one device is told the batches
    fixed = ("adaptive_batch",)

    @classmethod
    def used_by(cls, config: Any) -> bool:
        return super().used_by(config) or measured_every(config.weights) > 0

    @classmethod
    def changes_batches(cls, config: Any) -> bool:
        return bool(changing(config))

    @classmethod
    def needs_values(cls, config: Any) -> dict[str, Any]:
        return {"--adaptive-batch": config.adaptive_batch}

    def build(self, job: Any, comm: Comm | None) -> None:
        assert comm is not None  # the reference leaves the technique out
        self.job, self.comm, self.noise = job, comm, NoiseScale()
        self.measures = job.config.noise_scale or job.config.adaptive_batch is not None
        if self.changes_batches(job.config):
            job.plan = VaryingPlan(job.config, job.batches, self.noise)

    def attached(self, strategy: Any) -> AbstractContextManager[Any]:
        self.strategy, self.first = strategy, strategy.job.batches
        self.meter = NoiseMeter(strategy, self.noise) if self.measures else None
        return nullcontext()

    def before_step(self, samples: int) -> None:
        # A pipeline gets the plan for this step's number of micro-batches; of all else the first batch is the measure.
        if self.job.config.pp > 1 and samples != self.first.global_batch:
            number = samples * self.first.accumulation // self.first.global_batch
            self.strategy.cut_batches(replace(self.first, global_batch=samples, accumulation=number))
        self.comm.trace.take_computed()

    def after_forward_backward(self, strategy: Any, step: int) -> None:
        self.seconds = self.comm.trace.take_computed()

    def after_backward(self, strategy: Any, step: int) -> None:
        if self.meter is not None:
            self.meter.measure()

    def after_update(self, moment: Any) -> None:
        if self.strategy.job.batches is not self.first:
            self.strategy.cut_batches(self.first)
        if self.job.plan.changes:
            axes, rows = moment.strategy.axes, moment.strategy.job.batch.shares.rows
            self.job.plan.grow()
            self.job.plan.measured(axes, self.seconds, sum(rows[axes.dp.rank]), moment.steps.stop)

    def result(self) -> dict[str, Any]:
        return {} if self.meter is None else {"noise_scale": self.meter.result()}

    def lines(self, result: dict[str, Any]) -> list[str]:
        if "noise_scale" not in result:
            return []
        samples = result["noise_scale"]["samples"]
        worth = "not known: the gradient is lost in its noise" if samples is None else f"{samples:,.1f} samples"
        return [
            "gradient noise scale {}; tr(Sigma) {noise:.4g}, |G|^2 {gradient_square:.4g}".format(
                worth, **result["noise_scale"]
            )
        ]

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """All-reduces of one number in every step, or of two over all ranks; and every K steps the seconds of all."""
        sent, dims, every = {"metrics": 0}, run.batches.dims, measured_every(run.config.weights)
        if run.config.noise_scale or run.config.adaptive_batch is not None:
            sharded = shards_gradients(run.config.zero, dims)
            sent["metrics"] = (
                run.steps * NUMBER * (sharded_estimate_volume(dims.ranks) if sharded else 2 * (dims.dp - 1))
            )
        if every:
            # After the multiples of K.
            times = (run.done + run.steps) // every - run.done // every
            sent["load_balance"] = times * load_balance_volume(dims.ranks) * NUMBER
        return sent
