"""The loss scale: a factor that moves gradients into the range of float16, and is found while training.

    loss * S  ──backward──▶  gradients * S, in half precision  ──float32──▶  / S, clip, step on the masters
                                          │ infinite or NaN anywhere: no step, S / 2
                                          └ none for 2,000 steps: S * 2

A float16 below 6e-8 is zero, and many gradients are that small; multiplied by 65,536 they are not. The largest S that
does not overflow is unknown and changes, so it is searched: one that is too large costs one skipped step. S is a power
of two, so that dividing by it loses no bits. All ranks must see the same overflow (`parallel.agree_on_overflow`), or
one skips a step and the rest wait.

bfloat16 has float32's range and needs none of this. Source: Micikevicius et al., "Mixed precision training", ICLR 2018,
section 3.2; the meaning of the settings is Megatron-LM's `DynamicGradScaler`, which stays at its floor for ever. The
error at the floor is ours: DeepSpeed's ZeRO optimizers raise at the first overflow that would lower the scale there,
which is `floor_limit=1`; three in a row, the default here, are not one bad batch.

Proved by: tests/optim/test_loss_scale.py
"""

import math
from typing import Any

from minidist.base.limits import check_number, check_whole
from minidist.core.base import hooks
from minidist.core.base.errors import MinidistError, UsageError


class LossScaleError(MinidistError):
    """Gradients overflow however small the loss scale is."""

    exit_code = 2


class DynamicLossScaler:
    """A loss scale that grows while no gradient overflows and falls when one does.

    Call `update(overflow)` once per step, with the same value on all ranks.

    scale: multiplies the loss of the next step; a power of two, as its start and both factors must be. growth_factor:
    multiplies the scale after `growth_interval` steps in a row without overflow. backoff_factor: multiplies it at an
    overflow; after a growth the first `hysteresis` - 1 overflows do not count. floor: the smallest scale; the
    `floor_limit`-th overflow in a row that would lower it further raises LossScaleError. skipped: steps lost so far.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        floor: float = 1.0,
        floor_limit: int = 3,
    ) -> None:
        # Settings that cannot work are refused here, not at the first overflow.
        check_whole("growth_interval", growth_interval, 1)
        check_whole("hysteresis", hysteresis, 1)
        check_whole("floor_limit", floor_limit, 1)
        for name, value in (
            ("initial_scale", initial_scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
            ("floor", floor),
        ):
            # frexp returns a mantissa of 0.5 for powers of two only.
            if math.frexp(check_number(name, value, above=0))[0] != 0.5:
                raise UsageError(
                    f"{name} {value:g} is not a power of two, so unscaling would lose bits; use"
                    f" {2.0 ** round(math.log2(value)):.17g}"
                )
        if not (growth_factor > 1 and backoff_factor < 1):
            raise UsageError(
                f"growth_factor {growth_factor} must be above 1, and backoff_factor {backoff_factor} between 0 and 1"
            )
        if floor > initial_scale:
            raise UsageError(f"initial_scale {initial_scale:g} must not be below the floor {floor:g}")

        # What changes during training is the state of a checkpoint (_STATE, below); the rest are settings.
        self.scale = float(initial_scale)
        self.growth_factor, self.backoff_factor, self.growth_interval = (
            float(growth_factor),
            float(backoff_factor),
            growth_interval,
        )
        self.hysteresis, self.floor, self.floor_limit = hysteresis, float(floor), floor_limit
        self.good_steps = 0  # in a row
        self.patience = hysteresis  # overflows until the next decrease
        self.overflows_at_floor = 0  # in a row
        self.skipped = 0

    def scale_loss(self, loss: Any) -> Any:
        """Return loss * scale, a float32 tensor of one element, whose backward gives scaled gradients."""
        return hooks.named_mean(loss * self.scale, getattr(getattr(loss, "node", None), "over", ""))

    def update(self, overflow: bool) -> None:
        """Adapt the scale to the outcome of a step.

        Raises LossScaleError at the `floor_limit`-th overflow in a row that would lower the smallest scale.
        """
        # A good step: after `growth_interval` of them in a row the scale grows.
        if not overflow:
            self.overflows_at_floor = 0
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.good_steps, self.patience = 0, self.hysteresis
                self.scale *= self.growth_factor
            return

        # The step is lost. The first `hysteresis` - 1 overflows after a growth do not count, from then on each lowers
        # the scale.
        self.skipped += 1
        self.good_steps = 0
        self.patience -= 1
        if self.patience > 0:
            return

        # At the floor the scale cannot fall, and training has diverged if that goes on.
        if self.scale == self.floor:
            self.overflows_at_floor += 1
            if self.overflows_at_floor == self.floor_limit:
                raise LossScaleError(
                    f"gradients overflowed {self.floor_limit} steps in a row at the smallest loss scale,"
                    f" {self.floor:g}; the training has diverged: lower the learning rate, clip the gradient, or train"
                    " in bfloat16, which does not overflow"
                )
        self.scale = max(self.scale * self.backoff_factor, self.floor)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps; the settings are not among them."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Raises UsageError when something is missing."""
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise UsageError(f"the state of a loss scaler lacks {missing[0]!r}; it has {sorted(state)}")
        if not 0 < state["scale"] < float("inf"):
            raise UsageError(f"the loss scale is {state['scale']}; it must be above 0 and finite")
        for name in _STATE:
            setattr(self, name, type(getattr(self, name))(state[name]))


class StaticLossScaler(DynamicLossScaler):
    """A loss scale that stays as it is: a step in which a gradient overflows is skipped, and nothing else happens."""

    def update(self, overflow: bool) -> None:
        """Count a step that is lost."""
        self.skipped += overflow


_STATE = ("scale", "good_steps", "patience", "overflows_at_floor", "skipped")
