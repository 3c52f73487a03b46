"""Learning-rate schedules, as functions of the step number alone, so that there is no state to save or to get wrong.

A schedule returns the factor for `optimizer.lr_factor` before step number `step`, where the first step is number 0:

    schedule = WarmupCosine(warmup_steps=100, total_steps=1000)
    optimizer.lr_factor = schedule(step)

Warm-up: P. Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour" (2017), section 2.2. Cosine:
I. Loshchilov and F. Hutter, "SGDR: stochastic gradient descent with warm restarts" (ICLR 2017), equation 5, one cycle.
DeepSpeed's schedules: deepspeed/runtime/lr_schedules.py.

Proved by: tests/optim/test_schedule.py
"""

import math
from dataclasses import dataclass

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import check_flag, check_number, check_whole


@dataclass(frozen=True)
class Warmup:
    """The factors 1/w, 2/w, ... up to 1 in step w - 1 (never 0: a step with rate 0 is lost), then 1."""

    warmup_steps: int

    def __post_init__(self) -> None:
        check_whole("warmup_steps", self.warmup_steps)

    def __call__(self, step: int) -> float:
        """Return the factor of step number `step`."""
        return min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps > 0 else 1.0


@dataclass(frozen=True)
class WarmupLinear:
    """Warm-up, then a line from 1 in step number `warmup_steps` down to `final_factor` in `total_steps`."""

    warmup_steps: int
    total_steps: int
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        check_whole("warmup_steps", self.warmup_steps)
        check_whole("total_steps", self.total_steps)
        check_number("final_factor", self.final_factor)
        if not 0 <= self.warmup_steps < self.total_steps:
            raise UsageError(
                f"{self.warmup_steps} warm-up steps of {self.total_steps}; the warm-up must end before the last step"
            )

    def __call__(self, step: int) -> float:
        """Return the factor of step number `step`; beyond `total_steps` it stays at `final_factor`."""
        if step < self.warmup_steps:
            return Warmup(self.warmup_steps)(step)
        # The share of the steps after the warm-up that are done.
        return self.at(min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)))

    def at(self, progress: float) -> float:
        """Return the factor when `progress`, from 0 to 1, of the decay is done."""
        return self.final_factor + (1 - self.final_factor) * (1 - progress)


@dataclass(frozen=True)
class WarmupCosine(WarmupLinear):
    """Warm-up, then half a cosine from 1 in step number `warmup_steps` down to `final_factor` in `total_steps`."""

    def at(self, progress: float) -> float:
        """Return the factor when `progress`, from 0 to 1, of the decay is done."""
        # SGDR, equation 5: eta_min + (eta_max - eta_min) / 2 (1 + cos(pi T_cur / T_i)) with eta_max = 1
        return self.final_factor + (1 - self.final_factor) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class DeepSpeedWarmup:
    """DeepSpeed's WarmupLR; with `total_steps` its WarmupCosineLR, which falls to `final_factor` in that step.

    With `total_steps` and `linear` it is DeepSpeed's WarmupDecayLR, whose line reaches `final_factor` a step later.

    DeepSpeed sets the rate after each step, and before the first one to the minimum, so that every factor comes a step
    later than in `Warmup`, and the first two are 0: "linear" gives 0, 0, 1/w, 2/w, ...; "log" 0, 0, log 2 / log w, ....
    Fewer than 2 warm-up steps count as 2. A warm-up longer than the run is cut off, as there. start: the factor that
    the warm-up begins with, in the place of 0.
    """

    warmup_steps: int
    curve: str = "log"
    total_steps: int | None = None
    final_factor: float = 0.0001
    linear: bool = False
    start: float = 0.0

    def __post_init__(self) -> None:
        check_whole("warmup_steps", self.warmup_steps)
        if self.curve not in ("log", "linear"):
            raise UsageError(f"curve={quoted(self.curve)}; it must be 'log' or 'linear'")
        if self.total_steps is not None:
            check_whole("total_steps", self.total_steps)
        check_number("final_factor", self.final_factor)
        check_number("start", self.start)
        check_flag("linear", self.linear)

    def __call__(self, step: int) -> float:
        """Return the factor of step number `step`."""
        ended, warmup = step - 1, max(2, self.warmup_steps)  # the number of the step that has ended
        if ended < warmup:
            if ended < 1:
                return self.start
            done = ended / warmup if self.curve == "linear" else math.log(ended + 1) / math.log(warmup)
            return self.start + (1 - self.start) * done
        if self.total_steps is None:
            return 1.0
        if self.linear:
            left = max(0.0, (self.total_steps - ended) / max(1, self.total_steps - warmup))
            return self.final_factor + (1 - self.final_factor) * left
        progress = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        return self.final_factor + (1 - self.final_factor) * 0.5 * (1 + math.cos(math.pi * progress))
