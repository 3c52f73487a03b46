"""`--noise-scale`, `--adaptive-batch`, `--weights measured:K`: the batch of each step follows from measurements.

The gradient noise scale says up to which size a larger batch saves steps, and is measured while the model trains
(`noise_scale.py`); with --adaptive-batch the batch grows up to it. With --weights measured:K the number of rows of a
replica follows from the speed of its ranks (`plan.py`).

A rank sends per step: for the noise scale 2 (n-1)/n of 8 B per step, or of 16 B where gradients are sharded; for the
speeds of the ranks 8 (n-1) B every K steps.
Equal to: one device that is told the batches, bit for bit.
Lesson: 10b_batch_size_and_noise, 10c_uneven_ranks, 06d_fewer_bytes.

Proved by: tests/techniques/test_noise_scale.py, tests/techniques/test_batch_plan.py
"""

from dataclasses import replace
from typing import Any

from minidist.base.limits import MAX_BATCH
from minidist.core.comm import Comm
from minidist.core.pipeline.schedules import SCHEDULES
from minidist.data import measured_every
from minidist.techniques import Extension, Field, Record, Rule, Run, multiples
from minidist.techniques.adaptive_batch.noise_scale import NoiseMeter, NoiseScale, shards_gradients
from minidist.techniques.adaptive_batch.plan import VaryingPlan, unit_of


def measuring(job: Any) -> str:
    """Return the setting for which the noise of the gradient is measured; empty without one."""
    if job.adaptive_batch is not None:
        return f"--adaptive-batch {job.adaptive_batch}"
    return "--noise-scale" if job.noise_scale else ""


def changing(job: Any) -> str:
    """Return the setting with which batches change while the job trains; empty without one."""
    if measured_every(job.weights):
        return f"--weights {job.weights}"
    return "" if job.adaptive_batch is None else f"--adaptive-batch {job.adaptive_batch}"


NUMBER = 8  # bytes of a float64


class AdaptiveBatches(Extension):
    """Measures the noise of the gradient and the speeds of the ranks, and chooses the next batch."""

    class Settings(Record):
        """The flags; --weights, which also gives fixed shares, is a setting of every job."""

        adaptive_batch: int | None = Field(
            None,
            ge=1,
            le=MAX_BATCH,
            description="let the global batch grow with the gradient noise scale, by more micro-batches, to at most"
            " this",
        )
        noise_scale: bool = Field(
            False, description="measure the gradient noise scale: up to which batch size more samples pay"
        )

    switches = (("weights", None),)
    panel = "Batch"
    rules = (
        Rule(
            "changing-batches-with-prefetch",
            lambda j: changing(j) and (j.optional("prefetch_batches") or j.optional("loader_workers")),
            "--prefetch-batches and --loader-workers read the rows of later steps, which {flag} has not chosen yet",
            "leave it out",
            {"flag": changing},
        ),
        Rule(
            "measured-weights-in-a-pipeline",
            lambda j: measured_every(j.weights) and j.pp > 1,
            "not implemented: --pp {pp} learns the shapes of its micro-batches once, and --weights {weights} changes"
            " them",
            "use --dp, with or without --zero",
        ),
        Rule(
            "adaptive-batch-by-a-file",
            lambda j: j.adaptive_batch is not None and j.pp > 1 and j.schedule not in SCHEDULES,
            "--schedule {schedule} has one number of micro-batches, and --adaptive-batch {adaptive_batch} changes it",
            "use a schedule by name, such as 1f1b",
        ),
        Rule(
            "changing-batches-with-server",
            lambda j: changing(j) and j.server,
            "{flag} chooses batches with all ranks at the end of a step, and the workers of --strategy ps"
            " exchange nothing with each other",
            "use --strategy auto",
            {"flag": changing},
        ),
        Rule(
            "changing-batches-with-local-steps",
            lambda j: changing(j) and j.optional("local_steps"),
            "--local-steps {local_steps} lets replicas train alone, and {flag} chooses batches with all ranks at"
            " the end of a step",
            "leave one of them out",
            {"flag": changing},
        ),
        Rule(
            "changing-batches-with-teacher-ranks",
            lambda j: changing(j) and j.optional("teacher_ranks"),
            "--teacher-ranks {teacher_ranks} computes the logits of later steps, whose rows {flag} has not chosen yet",
            "leave it out",
            {"flag": changing},
        ),
        Rule(
            "adaptive-batch-in-micro-batches",
            lambda j: (
                j.adaptive_batch is not None
                and (
                    j.batches.global_batch % j.batches.accumulation
                    or j.adaptive_batch % unit_of(j.pp, j.batches)
                    or j.adaptive_batch < j.batches.global_batch
                )
            ),
            "--adaptive-batch {adaptive_batch} is reached from {first} samples by adding micro-batches, {unit} samples"
            " on all ranks together",
            "use --adaptive-batch {near}",
            {
                "first": lambda j: j.batches.global_batch,
                "unit": lambda j: unit_of(j.pp, j.batches),
                "near": lambda j: multiples(
                    max(j.adaptive_batch, 2 * j.batches.global_batch), unit_of(j.pp, j.batches)
                ),
            },
        ),
        Rule(
            "noise-scale-needs-replicas",
            lambda j: measuring(j) and (j.server or j.zero >= 2 or j.dp == 1 or j.cp > 1 or j.ep > 1),
            "{flag} compares each replica's own gradient with the sum of all, so it needs --dp 2 or more, and no"
            " --cp, --ep, --zero 2 or 3, or --strategy ps, with which no rank has both of them",
            "change the layout, or leave it out",
            {"flag": measuring},
        ),
        Rule(
            "noise-scale-needs-whole-gradients",
            lambda j: (
                measuring(j)
                and (
                    j.optional("synchronize_each")
                    or j.optional("compression") not in (None, "none")
                    or j.half
                    or j.optional("sparsity")
                    or j.optional("sparsity_pattern") is not None
                )
            ),
            "{flag} compares each rank's whole gradient with the sum of all, uncompressed and in full precision",
            "leave out --synchronize-each, --compression, --sparsity and --precision fp16 or bf16",
            {"flag": measuring},
        ),
        Rule(
            "local-steps-with-noise-scale",
            lambda j: j.optional("local_steps") and j.noise_scale,
            "--noise-scale does not combine with --local-steps {local_steps}: between two averages the replicas have"
            " different weights and gradients",
        ),
    )
    observes = True  # the reference on one device is told the batches
    fixed = by_values = ("adaptive_batch",)

    @classmethod
    def used_by(cls, config: Any) -> bool:
        return super().used_by(config) or measured_every(config.weights) > 0

    @classmethod
    def notices(cls, job: Any) -> list[str]:
        both = job.noise_scale and job.adaptive_batch is not None
        return [f"--noise-scale has no effect, because --adaptive-batch {job.adaptive_batch} measures it"] * both

    @classmethod
    def changes_batches(cls, config: Any) -> bool:
        return bool(changing(config))

    def build(self, job: Any, comm: Comm | None) -> None:
        assert comm is not None  # the reference leaves the technique out
        self.job, self.comm, self.noise = job, comm, NoiseScale()
        self.measures = job.config.noise_scale or job.config.adaptive_batch is not None
        if self.changes_batches(job.config):
            job.plan = VaryingPlan(job.config, job.batches, self.noise)

    def attached(self, strategy: Any) -> None:
        self.strategy, self.first = strategy, strategy.job.batches
        self.meter = NoiseMeter(strategy, self.noise) if self.measures else None

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
        # The plan may be that of another technique, and the noise scale only measured.
        plan = self.job.plan
        if isinstance(plan, VaryingPlan):
            axes, rows = moment.strategy.axes, moment.strategy.job.batch.shares.rows
            plan.grow()
            plan.measured(axes, self.seconds, sum(rows[axes.dp.rank]), moment.steps.stop)

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
            numbers = 2 * 2 * (dims.ranks - 1) if shards_gradients(run.config.zero, dims) else 2 * (dims.dp - 1)
            sent["metrics"] = run.steps * numbers * NUMBER
        if every:
            # After the multiples of K.
            times = (run.done + run.steps) // every - run.done // every
            sent["load_balance"] = times * dims.ranks * (dims.ranks - 1) * NUMBER
        return sent
