"""`--local-steps H`: replicas train alone for H steps, then their weights are averaged; DiLoCo and Streaming DiLoCo.

A rank sends per step: 2 (n-1)/n of the weights, or of its shard of them, every H steps, with n replicas; Streaming
DiLoCo sends one of F fragments of them at a time.
Equal to: one device that replays all replicas, bit for bit.
Lesson: 06e_local_sgd_and_diloco.

Proved by: tests/techniques/test_local_steps.py, tests/techniques/test_streaming_diloco.py,
tests/techniques/test_sharded_replicas.py
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.parallel.replica_guard import startup_bytes
from minidist.techniques import Extension, Run
from minidist.techniques.local_sgd.averaging import local_sgd_volume
from minidist.techniques.local_sgd.meetings import LocalSteps, StreamingSteps
from minidist.techniques.local_sgd.replay import AveragingReplay, StreamingReplay
from minidist.techniques.local_sgd.rules import RULES, LocalSGDSettings, streaming
from minidist.techniques.local_sgd.streaming import streaming_volume
from minidist.techniques.meeting import Mean, Meeting, Replay, Replica, replicas_of

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
        self.fragments = made.optimizer.sizes
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
        """The weights of every average, and with them the running statistics; or the fragments whose turn it was.

        Each rank has its part of a replica, and the ranks with the same part of the others meet: of them one counts.
        """
        every, replicas = self.settings.local_steps, replicas_of(run.config, run.batches.dims.dp)
        axes = [axis for each in run.sizes for axis in each]
        shards = run.batches.dims.dp // replicas if run.config.zero else 1
        held = sum(sum(axis.units) // shards for axis in axes)
        sent = Counter(self._shards_at_start(run, axes, shards, held) if run.config.zero else {})
        if streaming(self.settings):
            first, last = run.done, run.done + run.steps
            elements = sum(streaming_volume(axis.more["fragments"], every, first, last, replicas) for axis in axes)
            sent["parameter_gather"] += elements // replicas * run.itemsize
            return sent

        # The last step ends with an average, too. Of a batch norm's channel there are a mean and a variance.
        averages, numbers = -(-run.steps // every), sum(2 * sum(axis.norms) for axis in axes)
        weights, measured = (local_sgd_volume(n, replicas)["parameter_gather"] // replicas for n in (held, numbers))
        sent["parameter_gather"] += averages * weights * run.itemsize
        sent["metrics"] += averages * measured * NUMBER
        return sent

    def _shards_at_start(self, run: Run, axes: Sequence[Any], shards: int, held: int) -> dict[str, int]:
        """Return what makes the shards of all replicas equal. held: the elements of the shards of all ranks.

        ZeRO 1 and 2 also have whole weights, which a replica gathers after only its shards were set: then, and when a
        job is resumed in which each replica has other weights.
        """
        replicas = run.config.dp_replicate
        units = [[size // shards for size in axis.units] for axis in axes]
        sent = {"startup": sum(startup_bytes(own, run.itemsize, replicas) for own in units) // replicas}
        if run.config.zero < 3:
            gathers = 1 + bool(run.done and streaming(self.settings))
            sent["parameter_gather"] = gathers * (shards - 1) * held * run.itemsize
        return sent
