"""The loss scale in a DeepSpeed file: the keys of its section `fp16`.

Proved by: tests/config/test_deepspeed.py
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import MIN_VALUE
from minidist.techniques.deepspeed import AUTO, Applied, DeepSpeedKeys, Noted, number, whole

# DeepSpeed's key of the dynamic loss scale -> the setting.
KEYS = {
    "loss_scale_window": "loss_scale_interval",
    "hysteresis": "loss_scale_hysteresis",
    "min_loss_scale": "loss_scale_floor",
}
SMALLEST_SCALE = 2.0 ** math.ceil(math.log2(MIN_VALUE))
NOT_SCALED = "bf16 has the exponents of float32, so its loss is not scaled"


class DeepSpeedLossScale(DeepSpeedKeys):
    """The keys of the section `fp16` about the loss scale; those of `bf16` have no meaning."""

    applied: ClassVar[Mapping[str, Applied]] = {
        "fp16.loss_scale": Applied(128.0, "--loss-scale with --static-loss-scale; 0 is a dynamic one"),
        "fp16.initial_scale_power": Applied(16, "--loss-scale"),
        "fp16.loss_scale_window": Applied(500, "--loss-scale-interval"),
        "fp16.hysteresis": Applied(2, "--loss-scale-hysteresis"),
        "fp16.min_loss_scale": Applied(1, "--loss-scale-floor; 0 is the smallest that there is"),
    }
    noted: ClassVar[Mapping[str, Noted]] = {
        "fp16.consecutive_hysteresis": Noted((False,), "patience is refilled when the scale grows"),
        **{f"bf16.{name}": Noted((), NOT_SCALED) for name in ("initial_scale_power", *KEYS, "consecutive_hysteresis")},
        "bf16.loss_scale": Noted((0,), NOT_SCALED),
    }

    def translate(self, name: str, section: dict[str, Any], result: Any) -> None:
        """Translate the loss scale of fp16: 0 means dynamic, any other value static."""
        if name != "fp16":
            return
        static = section.pop("loss_scale", 0)
        if static == "auto":
            result.ignore("fp16.loss_scale", AUTO)
        elif number("fp16.loss_scale", static, least=0) > 0:
            result.apply("fp16.loss_scale", static, loss_scale=float(static), static_loss_scale=True)
            for key in ("initial_scale_power", *KEYS):
                if key in section:
                    why = f"it belongs to a dynamic loss scale, and fp16.loss_scale is {static:g}"
                    result.ignore(f"fp16.{key}", why)
                    del section[key]
            return
        else:
            result.apply("fp16.loss_scale", static)
        _dynamic(section, result)

    def complete(self, result: Any) -> None:
        """Add that ZeRO's optimizers stop at the first overflow at the smallest scale; others never do."""
        dynamic = result.settings.get("precision") == "fp16" and not result.settings.get("static_loss_scale")
        if dynamic and result.settings.get("zero", 0) > 0:
            result.default("fp16: overflows at min_loss_scale", 1, loss_scale_floor_limit=1)


def _dynamic(section: dict[str, Any], result: Any) -> None:
    """Translate the keys of a loss scale that changes, and remove them from `section`."""
    power = section.pop("initial_scale_power", "auto")
    if power != "auto":
        if whole("fp16.initial_scale_power", power) not in range(1001):
            raise UsageError(f"DeepSpeed's fp16.initial_scale_power is {quoted(power)}; it must be from 0 to 1000")
        result.apply("fp16.initial_scale_power", power, loss_scale=2.0 ** int(power))
    for key, setting in KEYS.items():
        value = section.pop(key, None)
        if value == "auto":
            result.ignore(f"fp16.{key}", AUTO)
        elif key == "min_loss_scale" and value == 0:
            # The scale has no floor: the smallest power of two that is a size.
            result.apply(f"fp16.{key}", value, loss_scale_floor=SMALLEST_SCALE)
        elif value is not None:
            result.apply(f"fp16.{key}", value, **{setting: value})
    if "loss_scale_interval" not in result.settings:
        result.default("fp16.loss_scale_window", 1000, loss_scale_interval=1000)
