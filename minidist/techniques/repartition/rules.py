"""The setting of stages that are cut anew while the job trains, and with what it does not combine.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py
"""

from minidist.base.limits import MAX_COUNT
from minidist.base.records import Field
from minidist.techniques.extension import Settings
from minidist.techniques.rule import Rule


class RepartitionSettings(Settings):
    """The flag."""

    repartition_every: int | None = Field(
        None,
        ge=2,
        le=MAX_COUNT,
        description="pipeline: every so many steps cut the stages anew, by the measured times of the layers",
    )


RULES = (
    Rule(
        "repartition-needs-pp",
        lambda j: j.pp == 1 and j.repartition_every,
        "--repartition-every {repartition_every} cuts a pipeline's stages",
        "add --pp 2 or more",
    ),
    Rule(
        "asynchronous-with-repartition",
        lambda j: j.asynchronous and j.repartition_every,
        "--schedule {schedule} delays the updates of a layer by the place of its stage, so with --repartition-every"
        " {repartition_every} the weights would depend on measured times",
        "use a synchronous schedule, such as 1f1b",
    ),
    Rule(
        "repartition-with-one-cut",
        lambda j: j.pp > 1 and j.repartition_every and j.blocks == j.plan.stages,
        "--repartition-every {repartition_every} has only one way to cut {blocks} layers into {stages} stages, which is"
        " one layer each",
        "use more --layers, or leave it out",
        {"stages": lambda j: j.plan.stages},
    ),
)
