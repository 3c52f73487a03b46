"""`--precision fp16`: the loss is scaled, so that small gradients do not become zero; a step that overflows is skipped.

    backward        from loss x scale (`optim.loss_scale`)
    before update   any gradient infinite or NaN, on any rank?   yes: no update, on all ranks
                                                                 no: the optimizer divides by the scale
    after it        the scale falls or grows by the same factor on all ranks

Ranks agree on an overflow with one byte (`parallel.overflow`). The scale and its counters are in checkpoints.

A rank sends per step: log₂ n B for the overflow flag.
Equal to: one device, bit for bit.
Lesson: 09_mixed_precision.

Proved by: tests/techniques/test_loss_scaling.py
"""

from collections.abc import Mapping
from typing import Any

from minidist import optim, parallel
from minidist.base.half import all_finite
from minidist.base.limits import MAX_COUNT
from minidist.collectives.closed_forms import volume
from minidist.core.autograd import Tensor
from minidist.core.comm import Comm
from minidist.techniques import Extension, Field, Record, Rule, Run, without_effect
from minidist.techniques.loss_scaling.deepspeed import DeepSpeedLossScale

PREFIX = "loss_scale."  # of the numbers in a checkpoint


def scales_loss(job: Any) -> bool:
    """Return whether the loss of a job with these settings is scaled: bfloat16 has the exponents of float32."""
    return bool(job.precision == "fp16")


DYNAMIC = "--precision fp16 without --static-loss-scale"
OF_A_DYNAMIC_SCALE = ("loss_scale_interval", "loss_scale_hysteresis", "loss_scale_floor", "loss_scale_floor_limit")


class LossScaling(Extension):
    """Scales the loss of a job in float16; see `DynamicLossScaler`."""

    class Settings(Record):
        """The flags; --precision, which decides whether they have an effect, is a setting of every job."""

        loss_scale: float = Field(2.0**16, ge=1, description="fp16: the first loss scale; an overflow lowers it")
        static_loss_scale: bool = Field(
            False, description="fp16: the loss scale stays; a step that overflows is skipped"
        )
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

    switches = (("precision", "fp32"),)
    panel = "Precision and memory"
    rules = (
        Rule(
            "asynchronous-with-fp16",
            lambda j: j.asynchronous and scales_loss(j),
            "--precision fp16 skips an update on all stages when one of them overflows, and with --schedule {schedule}"
            " the others have made theirs",
            "use bf16 or fp32",
        ),
        without_effect("loss_scale", scales_loss, "--precision fp16"),
        without_effect("static_loss_scale", scales_loss, "--precision fp16", switch=True),
        *(
            without_effect(name, lambda j: scales_loss(j) and not j.static_loss_scale, DYNAMIC)
            for name in OF_A_DYNAMIC_SCALE
        ),
    )
    unplanned = tuple(Settings.model_fields)
    deepspeed = DeepSpeedLossScale()

    @classmethod
    def used_by(cls, config: Any) -> bool:
        return scales_loss(config)

    def build(self, job: Any, comm: Comm | None) -> None:
        self.scaler = scaler_of(self.settings)
        self.scale = self.scaler.scale
        self.skipped_before = 0

    def begin(self, comm: Comm, strategy: Any, done: int) -> None:
        # The job reports the steps that this run has skipped, and a checkpoint has those of earlier runs, too.
        self.skipped_before = self.scaler.skipped

    # --- a step -------------------------------------------------------------------------------------------------------

    def before_step(self, samples: int) -> None:
        # An overflow changes the scaler's scale, and the gradients of the step keep theirs.
        self.scale = self.scaler.scale

    def scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale_loss(loss)
        return scaled

    def updates(self, strategy: Any, comm: Comm | None) -> bool:
        """Return False on every rank when a gradient is infinite or NaN on one; else let the next step unscale.

        An all-reduce of one byte over all ranks (`agree_on_overflow`).
        """
        overflow = not all(map(all_finite, strategy.gradients()))
        # Every rank asks, also one whose own gradients are finite.
        if comm is not None:
            overflow = parallel.agree_on_overflow(comm, overflow)
        scale = self.scaler.scale
        self.scaler.update(overflow)
        if overflow:
            return False

        # The optimizer divides while it reads, before the norm is taken, so that 16-bit gradients are not rounded.
        for axis in strategy.data_axes:
            axis.optimizer.grad_scale = 1 / scale
        return True

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        return {PREFIX + name: value for name, value in self.scaler.state_dict().items()}

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        own = {name.removeprefix(PREFIX): value for name, value in scalars.items() if name.startswith(PREFIX)}
        self.scaler.load_state_dict(own)

    # --- results and bytes --------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        return {"loss_scale": {"scale": self.scaler.scale, "skipped": self.scaler.skipped - self.skipped_before}}

    def header(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the scale, with which the picture of the gradients' exponents shows what float16 holds."""
        return {"loss_scale": result["loss_scale"]["scale"]}

    def lines(self, result: dict[str, Any]) -> list[str]:
        template = "loss scale {scale:,g}; steps skipped because a gradient overflowed: {skipped:,}"
        return [template.format(**result["loss_scale"])]

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """The flag of each step: one byte by recursive doubling over all ranks of all axes."""
        n = run.ranks
        if n == 1:
            return {}
        flags = sum(volume("all_reduce", "recursive_doubling", 1, n, rank).elements for rank in range(n))
        return {"overflow": run.steps * flags}


def scaler_of(settings: Any) -> "optim.DynamicLossScaler":
    """Return the loss scaler with these settings."""
    if settings.static_loss_scale:
        return optim.StaticLossScaler(settings.loss_scale)
    return optim.DynamicLossScaler(
        settings.loss_scale,
        growth_interval=settings.loss_scale_interval,
        hysteresis=settings.loss_scale_hysteresis,
        floor=settings.loss_scale_floor,
        floor_limit=settings.loss_scale_floor_limit,
    )
