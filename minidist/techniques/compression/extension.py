"""`--compression`: gradients are sent with fewer bytes, and what a rank has not sent is added to its next gradient.

On each data axis a compressor (`by_name.py`) replaces the reduction of the buckets. What a rank has not sent yet is in
checkpoints, by rank; the rest of the state is equal on all ranks of the axis. One device replays what every replica
sends (`replay.py`). The workers of a parameter server compress what they push (`push.py`).

A rank sends per step: the closed form of each method, in its file.
Equal to: one device that compresses the same buckets, bit for bit; with a parameter server a replay.
Lesson: 06d_fewer_bytes.

Proved by: tests/techniques/test_compression.py
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from minidist.core.base.arrays import Array
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.techniques import AxisRun, Extension, Field, Record, Rule, Run, compression
from minidist.techniques.bucket import ReplicaBucket


def method(job: Any) -> str:
    """Return the name of the job's compressor, or "none"; UsageError for a text that is none."""
    return compression.check_compression(job.compression)[0]


def only_casts(job: Any) -> bool:
    """Return whether gradients are sent as they are, or cast: nothing of a bucket or of an earlier step matters."""
    return method(job) in ("none", "fp16", "bf16")


def keeps_residual(job: Any) -> bool:
    """Return whether the job's compressor adds to a gradient what it has not sent of earlier ones."""
    return not only_casts(job) and method(job) != "qsgd"


RESIDUAL = "residual"  # its name in a checkpoint


class Compression(Extension):
    """Compresses the gradients that data-parallel ranks send each other; see `GradientCompressor`."""

    class Settings(Record):
        compression: str = Field(
            "none",
            description=(
                "how gradients are compressed: none, fp16, bf16, topk:K (a share below 1), sign, qsgd:LEVELS,"
                " powersgd:RANK"
            ),
        )

    panel = "Data parallelism"
    key = "compression"
    rules = (
        Rule(
            "compression-with-zero",
            lambda j: keeps_residual(j) and j.zero == 3,
            "--compression {compression} gives every rank the whole sum and, for error feedback, a residual of the"
            " size of the model; with --zero 3 a rank has memory for its share of the model alone",
            "use --zero 0, 1 or 2",
        ),
        Rule(
            "cast-with-zero",
            lambda j: method(j) != "none" and j.zero == 3,
            "not implemented: --compression {compression} replaces the reduction of a bucket of gradients, and with"
            " --zero 3 each unit of the model reduces its gradient by itself",
            "use --zero 0, 1 or 2",
        ),
        Rule(
            "compression-with-reduction",
            lambda j: method(j) != "none" and j.is_changed("reduction"),
            "--compression {compression} replaces the all-reduce of a gradient, whose order --reduction {reduction}"
            " sets",
            "leave out one of the two",
        ),
        Rule(
            "compression-with-loss-scaling",
            # A cast passes an overflow on as it is.
            lambda j: not only_casts(j) and j.precision == "fp16",
            "--compression {compression} computes with norms and with what earlier steps left, and with --precision"
            " {precision} gradients overflow and change their scale between steps",
            "use --precision bf16, fp32 or fp64, or --compression bf16",
        ),
        Rule(
            "asynchronous-with-compression",
            lambda j: j.asynchronous and method(j) != "none",
            "--compression {compression} is of the gradients that data-parallel ranks reduce, and --schedule"
            " {schedule} has no such ranks",
            "use a synchronous schedule, such as 1f1b",
        ),
        Rule(
            "repartition-with-compression",
            lambda j: j.optional("repartition_every") and not only_casts(j),
            "--compression {compression} depends on which gradients share a bucket, and --repartition-every"
            " {repartition_every} puts them into others by measured times",
            "use fp16 or bf16, or leave one of them out",
        ),
    )
    # Without a pipeline a bucket is compressed, and used as it comes out, also where no other rank gets it.
    alone = (("compression", lambda j: bool(j.pp == 1)),)
    sums_buckets = True
    own_state: ClassVar[Mapping[str, tuple[str, str]]] = {
        RESIDUAL: (
            "gradients that were not sent yet",
            "resume with a --compression with error feedback, and with the --tp, --pp and --ep of the checkpoint",
        )
    }

    def build(self, job: Any, comm: Comm | None) -> None:
        self.seed: int = job.config.seed
        self.replay_of_ranks = compression.CompressionReplay(self.settings.compression, self.seed, job.dtype)

    def axis_made(self, axis: Any) -> None:
        """Let the compressor take the place of each bucket's all-reduce, or with ZeRO 1 and 2 of its reduce-scatter."""
        from minidist.parallel.comm_hooks import register_comm_hook
        from minidist.parallel.compressor import compress

        wrapper = getattr(axis, "parallel", None) or getattr(axis, "zero", None)
        # The reference on one device has nothing to reduce.
        if wrapper is not None:
            compressor = compression.make_compressor(self.settings.compression, wrapper.comm, "sum", self.seed)
            register_comm_hook(wrapper.reducer, compressor, compress)
            axis.techniques[self.key] = compressor

    def _of(self, axis: Any) -> "compression.GradientCompressor":
        compressor: compression.GradientCompressor = axis.techniques[self.key]
        return compressor

    # --- one device ---------------------------------------------------------------------------------------------------

    def check_comparison(self, config: Any, dims: Any, cut: str) -> None:
        if cut:
            raise UsageError(
                f"{cut}, and --compression {self.settings.compression} makes another choice where a gradient"
                " differs in its last bit, so no bound holds; compare it with --dp and --pp, or without compression"
            )
        if config.zero == 2 and dims.pp > 1:
            raise UsageError(
                f"--compression {self.settings.compression}, --zero 2 and --pp {dims.pp} compress every micro-batch of"
                " every stage, and the reference replays one reduction of a stage per step; compare with --zero 1, or"
                " without --pp"
            )

    def sum_of_replicas(self, bucket: ReplicaBucket) -> Array:
        return self.replay_of_ranks.sum(bucket)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def of_rank(self, axis: Any) -> dict[str, Array]:
        """Return what this rank has not sent yet. No two ranks hold the same residual."""
        compressor, (reducer,) = self._of(axis), axis.reducers
        return {RESIDUAL: compressor.residual(reducer.buckets)} if compressor.error_feedback else {}

    def load_of_rank(self, axis: Any, arrays: Mapping[str, Array]) -> None:
        (reducer,) = axis.reducers
        self._of(axis).load_residual(reducer.buckets, arrays[RESIDUAL])

    def of_axis(self, axis: Any) -> dict[str, Array]:
        return self._of(axis).shared_state()

    def load_of_axis(self, axis: Any, arrays: Mapping[str, Array]) -> None:
        self._of(axis).load_shared_state(dict(arrays))

    # --- bytes --------------------------------------------------------------------------------------------------------

    def sizes(self, axis: Any) -> dict[str, Any]:
        """Return the bytes of one reduction of the axis, of all its ranks: those of the compressor's messages."""
        # What a rank sends of a bucket may depend on its number.
        compressor, ranks = self._of(axis), range(self._of(axis).comm.size)
        buckets = [bucket for reducer in axis.reducers for bucket in reducer.buckets]
        return {"compressed": sum(compressor.sent_bytes(bucket, rank) for bucket in buckets for rank in ranks)}

    def bytes_of_axis(self, run: Run, axis: AxisRun) -> dict[str, int]:
        """Return what one reduction sends less than without compression, times all of them."""
        more = axis.sizes.more["compressed"] - axis.reduced
        return {"gradient_reduce": run.steps * axis.reductions * axis.groups * more}
