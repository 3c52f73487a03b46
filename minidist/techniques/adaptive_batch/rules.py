"""The settings of batches that follow from measurements, and with what they do not combine.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py
"""

from typing import Any

from minidist.base.limits import MAX_BATCH
from minidist.base.records import Field
from minidist.core.pipeline.plan.registry import SCHEDULES
from minidist.data import measured_every
from minidist.techniques import Rule, Settings, multiples


class AdaptiveBatchSettings(Settings):
    """The flags; --weights, which also gives fixed shares, is a setting of every job."""

    adaptive_batch: int | None = Field(
        None,
        ge=1,
        le=MAX_BATCH,
        description="let the global batch grow with the gradient noise scale, by more micro-batches, to at most this",
    )
    noise_scale: bool = Field(
        False, description="measure the gradient noise scale: up to which batch size more samples pay"
    )


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


def unit_of(pp: int, batches: Any) -> int:
    """Return the samples by which the batch grows: one micro-batch of every rank, or of a pipeline the first batch.

    A schedule that runs a number of micro-batches runs every multiple of it.
    """
    return int(max(1, batches.global_batch // (1 if pp > 1 else batches.accumulation)))


RULES = (
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
        "not implemented: --pp {pp} learns the shapes of its micro-batches once, and --weights {weights} changes them",
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
        "--adaptive-batch {adaptive_batch} is reached from {first} samples by adding micro-batches, {unit} samples on"
        " all ranks together",
        "use --adaptive-batch {near}",
        {
            "first": lambda j: j.batches.global_batch,
            "unit": lambda j: unit_of(j.pp, j.batches),
            "near": lambda j: multiples(max(j.adaptive_batch, 2 * j.batches.global_batch), unit_of(j.pp, j.batches)),
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
