"""The settings of knowledge distillation, and with what they do not combine.

A student's loss compares whole rows of logits with the teacher's, which other ranks may compute or share.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py
"""

from typing import Literal

from minidist.base.limits import MAX_RANKS
from minidist.base.records import Field
from minidist.techniques.extension import Settings
from minidist.techniques.rule import Rule, Value, without_effect


class DistillationSettings(Settings):
    """The flags."""

    distill_from: str | None = Field(
        None, description="knowledge distillation: the checkpoint of the teacher, a --save directory or a folder in it"
    )
    temperature: float = Field(
        2.0,
        gt=0,
        description="distillation: divisor of teacher's and student's logits; higher shows more of the wrong classes",
    )
    distill_weight: float = Field(
        0.5, gt=0, le=1, description="distillation: weight of the teacher's part of the loss; the labels have the rest"
    )
    teacher_precision: Literal["fp32", "fp64", "fp16", "bf16"] | None = Field(
        None, description="distillation: dtype in which the teacher computes (default: --precision)"
    )
    shard_teacher: bool = Field(
        False, description="distillation: a share of each layer of the teacher on each rank, gathered when it computes"
    )
    teacher_ranks: int = Field(
        0, ge=0, le=MAX_RANKS, description="distillation: last ranks, beside those of the axes, that compute the logits"
    )
    teacher_cache: str | None = Field(
        None,
        description=(
            "distillation: directory that keeps the logits of each sample for later epochs and runs; default: that of"
            " all cached data"
        ),
    )


PLACES = {"shard_teacher": "--shard-teacher", "teacher_ranks": "--teacher-ranks"}  # where other ranks have a part


def _given(name: str, where: Value) -> Value:
    """Return whether a setting is given in a job for which `where` holds."""
    return lambda job: getattr(job, name) and where(job)


RULES = (
    Rule(
        "teacher-without-student",
        lambda j: j.teacher_ranks > j.data_ranks // j.cp,
        "--teacher-ranks {teacher_ranks} are more than the {replicas_of_data} data-parallel replicas, each of which has"
        " one teacher",
        "use --teacher-ranks {replicas_of_data} at most",
        {"replicas_of_data": lambda j: j.dims.dp},
    ),
    *(
        Rule(
            f"{name.replace('_', '-')}-in-a-pipeline",
            _given(name, lambda j: j.pp > 1),
            f"{flag} needs ranks that use logits at the same time, and with --pp {{pp}} the schedule decides"
            " which rank computes a loss, and when",
            "leave it out",
        )
        for name, flag in PLACES.items()
    ),
    *(
        Rule(
            f"{name.replace('_', '-')}-with-server",
            _given(name, lambda j: j.server),
            f"{flag} needs ranks that use logits at the same time, and the workers of --strategy ps exchange"
            " nothing with each other",
            "leave it out, or use --strategy auto",
        )
        for name, flag in PLACES.items()
    ),
    Rule(
        "sharded-teacher-with-a-cache",
        lambda j: j.shard_teacher and j.teacher_cache is not None,
        "--shard-teacher gathers layers on all ranks at the same time, and with --teacher-cache {teacher_cache} a rank"
        " that finds its logits in the cache gathers none",
        "leave one of them out",
    ),
    Rule(
        "sharded-teacher-on-its-own-ranks",
        lambda j: j.shard_teacher and j.teacher_ranks,
        "--shard-teacher divides the teacher among the students' ranks, and with --teacher-ranks {teacher_ranks} these"
        " hold no teacher",
        "leave one of them out",
    ),
    *(
        without_effect(DistillationSettings, name, lambda j: j.distill_from is not None, "--distill-from")
        for name in DistillationSettings.model_fields
        if name != "distill_from"
    ),
)
