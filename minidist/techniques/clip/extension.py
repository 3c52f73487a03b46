"""`--clip`: a gradient whose norm is larger than this is scaled down to it.

    norm = |g| over all parameters of all ranks        g *= clip / norm where norm > clip

Every layout computes the norm from the sums of squares of blocks of `NORM_BLOCK` (1,024) elements. The ranks exchange
these sums and add them in one order, so the bits of the norm do not depend on how the gradient is sharded
(`optim/clip.py`).

A rank sends per step: replicas nothing; ZeRO (n-1)/n of 8 B per 1,024 elements of the parameters; with `--tp`, `--ep`
and `--pp` 2 (P-1)/P of such sums over the P ranks of that axis, to which `--pp` adds 8 B per stage.
Equal to: one device, bit for bit, 1e-12 with `--tp`.
Lesson: 11_zero_1_and_2.

Proved by: tests/optim/test_clip.py, tests/planning/test_volumes.py, tests/equality/test_equality.py
"""

from typing import Any

from minidist.core.comm import Comm
from minidist.core.optim import NORM_BLOCK
from minidist.techniques import AxisRun, Extension, Field, Record, Rule, Run

NUMBER = 8  # bytes of a sum of squares


class Clip(Extension):
    """Gives the job's steps the maximum norm."""

    class Settings(Record):
        clip: float | None = Field(None, gt=0, description="maximum norm of the gradient")

    panel = "Optimization"
    rules = (
        Rule(
            "asynchronous-with-clip",
            lambda j: j.asynchronous and j.clip is not None,
            "--clip {clip} needs the gradients of all stages at one time, which --schedule {schedule} never has",
        ),
    )
    unplanned = ("clip",)

    def build(self, job: Any, comm: Comm | None) -> None:
        job.clip = self.settings.clip

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """How many blocks each stage of a pipeline has: an all-reduce of a number for each stage on each rank."""
        dims, sizes = run.batches.dims, list(run.sizes)
        if dims.pp == 1:
            return {}
        places = sum(len({axis.stage for axis in axes}) for axes in sizes[:: len(sizes) // dims.pp])
        return {
            "clip_norm": (run.steps - run.skipped) * 2 * (dims.pp - 1) * dims.dp * dims.cp * dims.tp * places * NUMBER
        }

    def bytes_of_axis(self, run: Run, axis: AxisRun) -> dict[str, int]:
        """Block sums: gathered over shards, summed over tensor-parallel ranks, joined over stages."""
        dims, sizes = run.batches.dims, axis.sizes
        blocks = sum(-(-unit // NORM_BLOCK) for unit in sizes.units)
        # Block sums of the shards are gathered; those of tensor- and expert-parallel shards are all-reduced.
        numbers = (axis.ranks - run.config.dp_replicate) * axis.groups * blocks if run.config.zero else 0
        numbers += 2 * (dims.tp - 1) * dims.dp * dims.cp * blocks
        numbers += 2 * (dims.ep - 1) * dims.edp * dims.cp * dims.tp * blocks if sizes.experts else 0
        # The stages of a pipeline exchange the blocks.
        numbers += 2 * (dims.pp - 1) * dims.dp * dims.cp * dims.tp * blocks
        return {"clip_norm": (run.steps - run.skipped) * numbers * NUMBER}
