"""`--local-steps H`: replicas train alone for H steps, then their weights are averaged; DiLoCo and Streaming DiLoCo.

A rank sends per step: 2 (n-1)/n of the weights every H steps; Streaming DiLoCo sends one of F fragments of them at a
time.
Equal to: one device that replays all replicas, bit for bit.
Lesson: 06e_local_sgd_and_diloco.

Proved by: tests/techniques/test_local_steps.py, tests/techniques/test_streaming_diloco.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.techniques.extension import Extension, Run
from minidist.techniques.local_sgd.averaging import local_sgd_volume
from minidist.techniques.local_sgd.meetings import LocalSteps, StreamingSteps
from minidist.techniques.local_sgd.replay import AveragingReplay, StreamingReplay
from minidist.techniques.local_sgd.rules import RULES, LocalSGDSettings, streaming
from minidist.techniques.local_sgd.streaming import streaming_volume
from minidist.techniques.meeting import Mean, Meeting, Replay, Replica

NUMBER = 8  # bytes of a running statistic


class LocalSGD(Extension):
    """Lets replicas train alone and meet every so many steps; see `LocalSteps` and `StreamingSteps`."""

    Settings = LocalSGDSettings
    panel = "Data parallelism"
    fixed = tuple(LocalSGDSettings.model_fields)
    # One rank alone averages nothing, and its outer optimizer steps all the same.
    alone = (("local_steps", lambda j: j.outer_optimizer != "none"),)
    trains_alone = True
    weight_differences = ("outer_momentum",)
    rules = RULES

    @classmethod
    def used_by(cls, config: Any) -> bool:
        # The other settings have no effect without it, and are refused.
        return bool(config.local_steps > 0)

    def build(self, job: Any, comm: Comm | None) -> None:
        self.fragments: tuple[int, ...] = ()  # elements of each, in Streaming DiLoCo

    def meeting(self, replica: Replica) -> Meeting:
        if not streaming(self.settings):
            return LocalSteps(self.settings, replica)
        made = StreamingSteps(self.settings, replica)
        self.fragments = tuple(part.stop - part.start for part in made.optimizer.fragments)
        return made

    def replay(self, devices: Sequence[Any], mean: Mean) -> Replay:
        kind = StreamingReplay if streaming(self.settings) else AveragingReplay
        return kind(self.settings, devices, mean)

    def check_resume(self, checkpoint: Any) -> None:
        # The last step of local SGD ends with an average, which a longer job would not make there.
        every = self.settings.local_steps
        if not streaming(self.settings) and checkpoint.step % every:
            raise UsageError(
                f"the checkpoint {str(checkpoint.path)!r} was saved at the end of a job, after {checkpoint.step} steps,"
                f" where --local-steps {every} makes no average otherwise; resume --from-step with a multiple of"
                f" {every}, or begin a new job with --init-from"
            )

    def sizes(self, axis: Any) -> dict[str, Any]:
        return {"fragments": self.fragments}

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """The weights of every average, and with them the running statistics; or the fragments whose turn it was."""
        ranks, every = run.batches.dims.dp, self.settings.local_steps
        # Each rank has its part of a replica, and the ranks with the same part of the others meet: of them one counts.
        axes = [axis for each in run.sizes for axis in each]
        if streaming(self.settings):
            first, last = run.done, run.done + run.steps
            sent = sum(streaming_volume(axis.more["fragments"], every, first, last, ranks) for axis in axes)
            return {"parameter_gather": sent // ranks * run.itemsize}

        # The last step ends with an average, too. Of a batch norm's channel there are a mean and a variance.
        averages = -(-run.steps // every)
        sizes = ((sum(axis.units), 2 * sum(axis.norms)) for axis in axes)
        volumes = ([local_sgd_volume(n, ranks)["parameter_gather"] for n in size] for size in sizes)
        sent, measured = (sum(each) // ranks for each in zip(*volumes, strict=True))
        return {"parameter_gather": averages * sent * run.itemsize, "metrics": averages * measured * NUMBER}
