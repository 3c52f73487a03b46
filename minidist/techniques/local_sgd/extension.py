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
from typing import Any, Literal

from minidist.base.limits import MAX_COUNT
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.parallel.replica_guard import startup_bytes
from minidist.techniques import Extension, Field, Record, Rule, Run, multiples, without_effect
from minidist.techniques.meeting import Mean, Meeting, Replay, Replica, replicas_of


def streaming(settings: Any) -> str:
    """Return the flag that makes outer steps those of Streaming DiLoCo, with its value; empty without one."""
    if settings.outer_fragments > 1:
        return f"--outer-fragments {settings.outer_fragments}"
    if settings.outer_delay:
        return f"--outer-delay {settings.outer_delay}"
    return f"--outer-mixing {settings.outer_mixing:g}" if settings.outer_mixing > 0 else ""


NUMBER = 8  # bytes of a running statistic


class LocalSGD(Extension):
    """Lets replicas train alone and average their weights every `--local-steps`; see `LocalSteps`, `StreamingSteps`."""

    class Settings(Record):
        local_steps: int = Field(
            0,
            ge=0,
            le=MAX_COUNT,
            description="local SGD: replicas train alone for this many steps, then weights are averaged; 0: off",
        )
        outer_optimizer: Literal["none", "nesterov"] = Field(
            "none",
            description="local steps: what follows an average; nesterov: DiLoCo's step from the last one to this one",
        )
        outer_lr: float = Field(0.7, gt=0, description="learning rate of the outer optimizer")
        outer_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the outer optimizer")
        outer_fragments: int = Field(
            1,
            ge=1,
            le=MAX_COUNT,
            description="Streaming DiLoCo: fragments of the weights, which take turns to be averaged",
        )
        outer_delay: int = Field(
            0, ge=0, le=MAX_COUNT, description="Streaming DiLoCo: inner steps that an outer gradient has to arrive"
        )
        outer_mixing: float = Field(
            0.0,
            ge=0,
            le=1,
            description="Streaming DiLoCo: share of a replica's own weights when they meet the common ones",
        )

    main = "local_steps"
    panel = "Data parallelism"
    fixed = tuple(Settings.model_fields)
    # One rank alone averages nothing, and its outer optimizer steps all the same.
    alone = (("local_steps", lambda j: j.outer_optimizer != "none"),)
    trains_alone = True
    weight_differences = ("outer_momentum",)
    rules = (
        Rule(
            "local-steps-need-replicas",
            lambda j: j.local_steps and not j.replicas_only,
            "not implemented: --local-steps {local_steps} with a replica whose ranks have other tokens or experts, so"
            " it combines with --dp, --zero, --tp and a --pp that drains, and not with --cp, --experts or --strategy"
            " ps",
            "change the layout, or leave it out",
        ),
        Rule(
            "local-steps-of-one-sharded-replica",
            lambda j: j.local_steps and j.zero and j.dims.dp > 1 and j.dp_replicate == 1,
            "--zero {zero} shards one replica over all {dp} data-parallel ranks, and --local-steps {local_steps}"
            " averages several",
            "add --dp-replicate with the number of replicas, or use --zero 0",
        ),
        Rule(
            "fragments-of-whole-replicas",
            lambda j: j.local_steps and streaming(j) and j.dims.dp != j.dims.ranks,
            "not implemented: {flag} sends fragments of a replica's weights, and a rank of the replica holds a stage or"
            " parts of layers",
            "leave out --tp and --pp, or use --outer-optimizer nesterov without it",
            {"flag": streaming},
        ),
        Rule(
            "reduction-with-local-steps",
            lambda j: j.local_steps and j.reduction not in ("ring", "ordered"),
            "not implemented: --local-steps {local_steps} averages weights, and of --reduction {reduction} the closed"
            " form of the bytes and the replay on one device are for gradients",
            "use --reduction ring or ordered",
        ),
        Rule(
            "local-steps-precision",
            lambda j: j.local_steps and j.half,
            "not implemented: with --precision {precision} the optimizer steps float32 copies of the weights, and"
            " --local-steps {local_steps} averages the weights and not these",
            "use --precision fp32",
        ),
        Rule(
            "local-steps-with-clip",
            lambda j: j.local_steps and j.optional("clip"),
            "not implemented: --clip {clip} of each replica's own gradient, which with --local-steps {local_steps} is"
            " never summed over the replicas",
        ),
        Rule(
            "local-steps-with-synchronize-each",
            lambda j: j.local_steps and j.optional("synchronize_each"),
            "--synchronize-each does not combine with --local-steps {local_steps}: between two averages the replicas"
            " have different weights and gradients",
        ),
        Rule(
            "local-steps-with-sync-batch-norm",
            lambda j: j.local_steps and j.optional("batch_norm") == "sync",
            "--batch-norm sync normalises by the statistics of all replicas, and with --local-steps {local_steps} these"
            " have different weights",
            "use --batch-norm local",
        ),
        Rule(
            "local-steps-saved-with-an-average",
            # Streaming DiLoCo saves the weights of each replica, too.
            lambda j: j.local_steps and not streaming(j) and j.every is not None and j.every % j.local_steps,
            "--every {every} would save between two averages of --local-steps {local_steps}, where replicas have"
            " different weights",
            "use --every {near}",
            {"near": lambda j: multiples(j.every, j.local_steps)},
        ),
        Rule(
            "outer-fragments-in-a-round",
            lambda j: j.local_steps and j.outer_fragments > j.local_steps,
            "--outer-fragments {outer_fragments} take turns within --local-steps {local_steps} steps, one per step at"
            " most",
            "use --outer-fragments {local_steps}, or more --local-steps",
        ),
        Rule(
            "outer-delay-in-a-round",
            lambda j: j.local_steps and j.outer_delay >= j.local_steps,
            "--outer-delay {outer_delay} would merge a fragment when it is sent again, after --local-steps"
            " {local_steps}",
            "use --outer-delay {near}",
            {"near": lambda j: str(j.local_steps - 1)},
        ),
        Rule(
            "streaming-outer-steps-with-batch-norm",
            lambda j: (
                j.local_steps and streaming(j) and j.model == "cnn" and j.optional("batch_norm") not in (None, "none")
            ),
            "{streaming_flag} averages layers at different steps, and the running statistics of --batch-norm"
            " {batch_norm} belong to weights of one step",
            "use --batch-norm none",
            {"streaming_flag": streaming},
        ),
        Rule(
            "local-steps-with-bucket-cap-mb",
            lambda j: j.local_steps and j.is_changed("bucket_cap_mb"),
            "--bucket-cap-mb {bucket_cap_mb} does not apply to --local-steps {local_steps}, which sends no gradients",
        ),
        Rule(
            "local-steps-with-compression",
            lambda j: j.local_steps and j.optional("compression") not in (None, "none"),
            "--compression {compression} does not combine with --local-steps {local_steps}, which sends no gradients",
        ),
        without_effect("outer_optimizer", lambda j: bool(j.local_steps), "--local-steps"),
        *(
            without_effect(name, lambda j: j.outer_optimizer != "none", "--outer-optimizer nesterov")
            for name in ("outer_lr", "outer_momentum", "outer_fragments", "outer_delay", "outer_mixing")
        ),
    )

    def build(self, job: Any, comm: Comm | None) -> None:
        self.fragments: tuple[int, ...] = ()  # elements of each, in Streaming DiLoCo

    def meeting(self, replica: Replica) -> Meeting:
        from minidist.techniques.local_sgd.meetings import LocalSteps, StreamingSteps

        if not streaming(self.settings):
            return LocalSteps(self.settings, replica)
        made = StreamingSteps(self.settings, replica)
        self.fragments = made.optimizer.sizes
        return made

    def replay(self, devices: Sequence[Any], mean: Mean) -> Replay:
        from minidist.techniques.local_sgd.meetings import AveragingReplay, StreamingReplay

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
        from minidist.techniques.local_sgd.streaming import streaming_volume

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
        weights, measured = (2 * (replicas - 1) * n // replicas for n in (held, numbers))
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
