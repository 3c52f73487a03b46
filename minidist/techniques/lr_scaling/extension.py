"""`--lr-scaling linear:W --base-batch B_0`: the learning rate follows the global batch, with a gradual warm-up.

    factor 4  |          ________________     --lr-scaling linear:4   --base-batch 16
              |      ___/                     4 ranks of 16 samples each: B = 64
           1  |  ___/                         steps 0 to 3 have 1.75, 2.5, 3.25, 4
              +--------------------------  step

--lr is the rate that is right for a batch of B_0 samples. A batch of B samples, on more ranks or with more
micro-batches, takes B / B_0 times that rate (linear), or the square root of it (sqrt). A jump to a rate that is many
times larger can end the training in its first steps, so the factor climbs from 1 by equal amounts over W steps:

    factor of a step = mean of (B / B_0)^e over the last W steps; those before the first one count as 1

The same mean gives a ramp after each growth of a batch that changes while the job trains, where B_0 is the first batch
unless it is given. Nothing is sent: every rank knows the batch.

Sources: Goyal et al., Accurate, large minibatch SGD, 2017 (arXiv:1706.02677), sections 2.1 (linear scaling) and 2.2
(gradual warm-up); Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014 (arXiv:1404.5997),
section 3.2 (square root).

A rank sends per step: nothing.
Equal to: a job with that learning rate, bit for bit.
Lesson: 10_accumulate_and_recompute, 10b_batch_size_and_noise.

Proved by: tests/techniques/test_lr_scaling.py
"""

from collections import deque
from typing import Annotated, Any

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import MAX_BATCH, whole_number
from minidist.base.records import checked
from minidist.core.comm import Comm
from minidist.techniques import Extension, Field, Record, changes_batches, without_effect

EXPONENTS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # of the batch in the learning rate

RECENT = list[Annotated[int, Field(ge=1)]]


class LrScaling(Extension):
    """Multiplies the learning rate of each step by a power of its batch over the base batch."""

    class Settings(Record):
        """The flags; --lr, which the factor multiplies, is a setting of every job."""

        lr_scaling: str = Field(
            "none",
            description=(
                "learning rate of a batch that is larger than --base-batch: none, linear, sqrt, or linear:STEPS with a"
                " warm-up of STEPS steps, also after each growth of the batch"
            ),
        )
        base_batch: int | None = Field(
            None,
            ge=1,
            le=MAX_BATCH,
            description="the global batch, in samples, for which --lr is right (default: that of the first step)",
        )

    panel = "Optimization"
    rules = (
        without_effect(
            "lr_scaling",
            lambda j: j.base_batch is not None or j.optional("adaptive_batch") is not None,
            "--base-batch or --adaptive-batch",
        ),
        without_effect("base_batch", lambda j: j.lr_scaling != "none", "--lr-scaling linear or sqrt"),
    )
    fixed = ("lr_scaling", "base_batch")
    unplanned = tuple(Settings.model_fields)

    @classmethod
    def check(cls, job: Any) -> None:
        exponent_and_steps(job.lr_scaling)

    def build(self, job: Any, comm: Comm | None) -> None:
        self.exponent, steps = exponent_and_steps(self.settings.lr_scaling)
        self.first = job.batches.global_batch
        self.base = self.settings.base_batch or self.first
        self.steps, self.changes = steps, changes_batches(job.config)
        self.recent: deque[int] = deque(maxlen=steps)  # samples of the last steps, where batches change

    def before_step(self, samples: int) -> None:
        self.recent.append(samples)

    def lr_factor(self, step: int) -> float:
        # Fixed batches need no state, and updates without common steps have a number all the same.
        recent = list(self.recent) if self.changes else [self.first] * min(step + 1, self.steps)
        factors = [(samples / self.base) ** self.exponent for samples in recent]
        return float(sum(factors) + self.steps - len(recent)) / self.steps

    def state(self) -> list[int]:
        return list(self.recent) if self.changes else []

    def load(self, state: Any, samples: int) -> None:
        self.recent.extend(checked(RECENT, state or [], {}, strict=True))

    def result(self) -> dict[str, Any]:
        if self.settings.base_batch is None:
            return {}
        samples = self.recent[-1] if self.changes else self.first
        return {"lr_scaling": {"base_batch": self.base, "last_batch": samples, "factor": self.lr_factor(self.steps)}}

    def lines(self, result: dict[str, Any]) -> list[str]:
        if "lr_scaling" not in result:
            return []
        text = "learning rate times {factor:.4g} for batches of {last_batch:,} samples; --lr is for {base_batch:,}"
        return [text.format(**result["lr_scaling"])]


def exponent_and_steps(text: str) -> tuple[float, int]:
    """Return (exponent of the batch in the learning rate, steps of its warm-up) of `--lr-scaling linear:20`."""
    word, colon, number = text.partition(":")
    steps = (whole_number(number) or 0) if colon else 1
    if word not in EXPONENTS or steps < 1 or (word == "none" and colon):
        raise UsageError(
            f"--lr-scaling {quoted(text)}; it must be none, linear or sqrt, or with the steps of a warm-up,"
            " linear:STEPS or sqrt:STEPS"
        )
    return EXPONENTS[word], steps
