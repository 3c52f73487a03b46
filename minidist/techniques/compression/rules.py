"""The setting of gradient compression, and with what it does not combine.

A compressor is a communication hook: it replaces the all-reduce of a gradient bucket, or ZeRO's reduce-scatter.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py
"""

from typing import Any

from minidist.base.records import Field
from minidist.techniques import Rule, Settings
from minidist.techniques.compression.by_name import check_compression


class CompressionSettings(Settings):
    compression: str = Field(
        "none",
        description=(
            "how gradients are compressed: none, fp16, bf16, topk:K (a share below 1), sign, qsgd:LEVELS, powersgd:RANK"
        ),
    )


def method(job: Any) -> str:
    """Return the name of the job's compressor, or "none"; UsageError for a text that is none."""
    return check_compression(job.compression)[0]


def only_casts(job: Any) -> bool:
    """Return whether gradients are sent as they are, or cast: nothing of a bucket or of an earlier step matters."""
    return method(job) in ("none", "fp16", "bf16")


RULES = (
    Rule(
        "compression-with-zero",
        lambda j: method(j) != "none" and j.zero == 3,
        "--compression {compression} gives every rank the whole sum and, for error feedback, a residual of the size of"
        " the model; with --zero 3 a rank has memory for its share of the model alone",
        "use --zero 0, 1 or 2",
    ),
    Rule(
        "compression-with-reduction",
        lambda j: method(j) != "none" and j.is_changed("reduction"),
        "--compression {compression} replaces the all-reduce of a gradient, whose order --reduction {reduction} sets",
        "leave out one of the two",
    ),
    Rule(
        "compression-with-loss-scaling",
        # A cast passes an overflow on as it is.
        lambda j: not only_casts(j) and j.precision == "fp16",
        "--compression {compression} computes with norms and with what earlier steps left, and with --precision"
        " {precision} gradients overflow and change their scale between steps",
        "use --precision bf16, fp32 or fp64, or --compression bf16",
    ),
    Rule(
        "asynchronous-with-compression",
        lambda j: j.asynchronous and method(j) != "none",
        "--compression {compression} is of the gradients that data-parallel ranks reduce, and --schedule {schedule} has"
        " no such ranks",
        "use a synchronous schedule, such as 1f1b",
    ),
    Rule(
        "repartition-with-compression",
        lambda j: j.optional("repartition_every") and not only_casts(j),
        "--compression {compression} depends on which gradients share a bucket, and --repartition-every"
        " {repartition_every} puts them into others by measured times",
        "use fp16 or bf16, or leave one of them out",
    ),
)
