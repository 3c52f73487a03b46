"""`--warmup N`, `--decay cosine`: the learning rate rises to --lr in the first N steps, and decays after that.

    factor 1  |      ______                     --warmup 3   --decay cosine   --decay-steps 12   --final-lr 0.1
              |    /        \\__
         0.1  |  /             \\_____
              +----------------------  step

The functions are in `optim/schedule.py`. They depend only on the number of the step, so there is no state to save.

A rank sends per step: nothing.
Equal to: one device, bit for bit.

Proved by: tests/config/test_train_config.py, tests/config/test_deepspeed.py, tests/train/test_against_numpy.py
"""

from collections.abc import Callable
from typing import Any, Literal

from minidist import optim
from minidist.base.limits import MAX_COUNT
from minidist.core.comm import Comm
from minidist.techniques import Extension, Field, Record, without_effect


class LrSchedule(Extension):
    """Multiplies the learning rate of each step by a factor."""

    class Settings(Record):
        """The flags; --lr, which the factors multiply, is a setting of every job."""

        warmup: int = Field(0, ge=0, le=MAX_COUNT, description="steps of warm-up")
        warmup_curve: Literal["linear", "deepspeed-linear", "deepspeed-log"] = Field(
            "linear", description="linear: 1/w, 2/w, ...; or DeepSpeed's WarmupLR, whose first two steps have rate 0"
        )
        warmup_start: float = Field(
            0.0, ge=0, le=1, description="DeepSpeed's warm-ups: the first learning rate, as a share of --lr"
        )
        decay: Literal["constant", "cosine", "linear"] = Field(
            "constant", description="learning rate after the warm-up"
        )
        decay_steps: int | None = Field(
            None, ge=1, le=MAX_COUNT, description="cosine, linear: the step in which the decay ends (default: --steps)"
        )
        final_lr: float = Field(
            0.0, ge=0, le=1, description="cosine, linear: the last learning rate, as a share of --lr"
        )

    panel = "Optimization"
    rules = (
        without_effect(
            "warmup_start", lambda j: j.warmup_curve != "linear", "--warmup-curve deepspeed-linear or deepspeed-log"
        ),
        without_effect("decay_steps", lambda j: j.decay != "constant", "--decay cosine or linear"),
        without_effect("final_lr", lambda j: j.decay != "constant", "--decay cosine or linear"),
    )
    unplanned = tuple(Settings.model_fields)
    for_all_steps = True

    @classmethod
    def check(cls, job: Any) -> None:
        # A warm-up that is longer than the job.
        if job.decay != "constant" and job.warmup_curve == "linear":
            optim.WarmupCosine(job.warmup, job.decay_steps or job.steps)

    def build(self, job: Any, comm: Comm | None) -> None:
        self.schedule = schedule_of(self.settings, job.config.steps)

    def lr_factor(self, step: int) -> float:
        return self.schedule(step)


def schedule_of(settings: Any, steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate of a step, in a job of `steps` steps."""
    decays, length = settings.decay != "constant", settings.decay_steps or steps
    if settings.warmup_curve != "linear":
        curve = settings.warmup_curve.removeprefix("deepspeed-")
        return optim.DeepSpeedWarmup(
            settings.warmup,
            curve,
            length if decays else None,
            settings.final_lr,
            linear=settings.decay == "linear",
            start=settings.warmup_start,
        )
    if decays:
        kind = optim.WarmupLinear if settings.decay == "linear" else optim.WarmupCosine
        return kind(settings.warmup, length, settings.final_lr)
    return optim.Warmup(settings.warmup)
