"""The settings of the loss scale of float16, and with what float16 does not combine because of it.

Proved by: tests/config/test_rules.py, tests/config/test_no_setting_is_ignored.py
"""

from typing import Any

from minidist.base.limits import MAX_COUNT
from minidist.base.records import Field
from minidist.techniques.extension import Settings
from minidist.techniques.rule import Rule, without_effect


class LossScalingSettings(Settings):
    """The flags; --precision, which decides whether they have an effect, is a setting of every job."""

    loss_scale: float = Field(2.0**16, ge=1, description="fp16: the first loss scale; an overflow lowers it")
    static_loss_scale: bool = Field(False, description="fp16: the loss scale stays; a step that overflows is skipped")
    loss_scale_interval: int = Field(
        2000, ge=1, le=MAX_COUNT, description="fp16: steps without overflow after which the loss scale doubles"
    )
    loss_scale_hysteresis: int = Field(
        2, ge=1, le=MAX_COUNT, description="fp16: overflows before the loss scale first falls after it has grown"
    )
    loss_scale_floor: float = Field(1.0, gt=0, description="fp16: lowest loss scale")
    loss_scale_floor_limit: int = Field(
        3, ge=1, description="fp16: overflows in a row at the lowest loss scale that are an error; DeepSpeed's is 1"
    )


def scales_loss(job: Any) -> bool:
    """Return whether the loss of a job with these settings is scaled: bfloat16 has the exponents of float32."""
    return bool(job.precision == "fp16")


def scale_changes(job: Any) -> bool:
    """Return whether the loss scale follows the overflows."""
    return scales_loss(job) and not job.static_loss_scale


DYNAMIC = "--precision fp16 without --static-loss-scale"
OF_A_DYNAMIC_SCALE = ("loss_scale_interval", "loss_scale_hysteresis", "loss_scale_floor", "loss_scale_floor_limit")
RULES = (
    Rule(
        "asynchronous-with-fp16",
        lambda j: j.asynchronous and scales_loss(j),
        "--precision fp16 skips an update on all stages when one of them overflows, and with --schedule {schedule} the"
        " others have made theirs",
        "use bf16 or fp32",
    ),
    without_effect(LossScalingSettings, "loss_scale", scales_loss, "--precision fp16"),
    without_effect(LossScalingSettings, "static_loss_scale", scales_loss, "--precision fp16"),
    *(without_effect(LossScalingSettings, name, scale_changes, DYNAMIC) for name in OF_A_DYNAMIC_SCALE),
)
