"""`--repartition-every K`: every K steps the model is cut into stages again, by the measured times of its layers.

    step K-1 ends | exchange of seconds | 2,2 -> 3,1 | layer 2: weights, optimizer state, statistics | step K
                    every rank to all     same cut on    rank 1 ──one message──▶ rank 0
                                          every rank

[1] Every rank tells all others the seconds and FLOPs of its layers (`LayerProfile`). [2] All of them choose the same
cut (`cut.py`). [3] When it is faster than the cut in use, each rank builds its part of the model with the new cut as at
the start of a job, and the state of each layer moves to the ranks that hold it now (`moving.py`).

While it moves, a rank holds its part of the model twice. A schedule that drains computes the same sums whatever the cut
is, so the weights stay those of one device. The cut is in checkpoints.

A rank sends per step: every K steps 16 (n-1) (L+1) B for L layers; weights and optimizer state of the layers that move,
once per replica.
Equal to: one device, bit for bit.
Lesson: 10c_uneven_ranks.

Proved by: tests/techniques/test_repartition.py
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, NamedTuple

from minidist.base.limits import MAX_COUNT
from minidist.base.records import checked
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.pipeline.runtime.layer_profile import LayerProfile, LayerTimes
from minidist.techniques import Extension, Field, Record, Rule, Run

new_purpose("repartition")

SIZES = list[Annotated[int, Field(ge=0)]] | None

_profile: ContextVar[Callable[[], LayerProfile]] = ContextVar("profile", default=LayerProfile)


@contextmanager
def profiled_by(make: Callable[[], LayerProfile]) -> Iterator[None]:
    """In the block a job that begins measures its layers with what `make` returns, a rank's own."""
    token = _profile.set(make)
    try:
        yield
    finally:
        _profile.reset(token)


class Sent(NamedTuple):
    """What the technique sent while a layout was in use, and to reach it.

    layers: of the whole model. exchanges: how often seconds were exchanged. ranges: of the move, all that all ranks had
    and needed; 0 without a move. lacking: the bytes that this rank needed and did not have.
    """

    layers: int
    exchanges: int = 0
    ranges: int = 0
    lacking: int = 0


class Repartition(Extension):
    """Cuts the stages of one rank's job anew."""

    class Settings(Record):
        repartition_every: int | None = Field(
            None,
            ge=2,
            le=MAX_COUNT,
            description="pipeline: after how many steps the stages are cut anew, by the measured times of the layers",
        )

    panel = "Pipeline parallelism"
    rules = (
        Rule(
            "repartition-needs-pp",
            lambda j: j.pp == 1 and j.repartition_every,
            "--repartition-every {repartition_every} cuts a pipeline's stages",
            "add --pp 2 or more",
        ),
        Rule(
            "asynchronous-with-repartition",
            lambda j: j.asynchronous and j.repartition_every,
            "--schedule {schedule} delays the updates of a layer by the place of its stage, so with --repartition-every"
            " {repartition_every} the weights would depend on measured times",
            "use a synchronous schedule, such as 1f1b",
        ),
        Rule(
            "repartition-with-one-cut",
            lambda j: j.pp > 1 and j.repartition_every and j.blocks == j.plan.stages,
            "--repartition-every {repartition_every} has only one way to cut {blocks} layers into {stages} stages,"
            " which is one layer each",
            "use more --layers, or leave it out",
            {"stages": lambda j: j.plan.stages},
        ),
    )
    key = "partition"
    periods: ClassVar[Mapping[str, int]] = {"repartition_every": 1}  # nothing is cut after the last step

    def before_resume(self, config: Any, stages: int, then: Mapping[str, Any], state: Any) -> Any:
        """Return the settings with the cut of the checkpoint, where that has as many stages."""
        sizes = checked(SIZES, state, {}, strict=True)
        if sizes is None or len(sizes) != stages:
            return config
        # The cut of another model does not fit; what differs is said when the job is resumed.
        if any(then.get(name) != getattr(config, name) for name in ("model", "layers")):
            return config
        return config.model_copy(update={"partition": _text(sizes)})

    def build(self, job: Any, comm: Comm | None) -> None:
        # The reference on one device has no stages.
        if comm is not None:
            self.comm: Comm = comm
            job.profile = _profile.get()()
        self.partitions: list[tuple[str, int]] = []  # each cut, and the steps that were made with it
        self.move = (0, 0)  # ranges and lacking bytes of the last move

    def attached(self, strategy: Any) -> None:
        self.sizes_in_use = strategy.stage_sizes()
        self.partitions.append((_text(self.sizes_in_use), 0))
        # A layout counts the move to it, and the exchanges from now on.
        self.sent, self.move = Sent(sum(self.sizes_in_use), 0, *self.move), (0, 0)

    def next_layout(self, strategy: Any, done: int, rebuild: Callable[[Any], Any]) -> Any:
        """Return the strategy of the next step: the same, or one with another cut.

        After a multiple of K all ranks exchange what they measured (purpose repartition); nothing
        is done after the last step.
        """
        cut, steps = self.partitions.pop()
        self.partitions.append((cut, steps + 1))
        job = strategy.job
        job.profile.end_step()
        if done % self.settings.repartition_every or done == job.config.steps:
            return strategy

        # All ranks have measured, or none has.
        times = job.profile.take(done)
        if times is None:
            return strategy
        from minidist.techniques.repartition.cut import choose_sizes
        from minidist.techniques.repartition.moving import move_state

        self.sent = self.sent._replace(exchanges=self.sent.exchanges + 1)
        with purpose("repartition"):
            numbers = all_gather(self.comm, times.numbers()).reshape(self.comm.size, -1)
        per_stage = self.comm.size // job.config.pp
        every_rank = [LayerTimes.of(row) for row in numbers]
        sizes = choose_sizes(self.sizes_in_use, strategy.holders, every_rank, per_stage)
        if sizes == self.sizes_in_use:
            return strategy

        # A new model with its part on this rank, and then the state.
        after = rebuild(job.config.model_copy(update={"partition": _text(sizes)}))
        with purpose("repartition"):
            self.move = move_state(self.comm, strategy, after, done, per_stage)
        return after

    def record(self, job: Any, done: int) -> dict[str, Any]:
        return {"partition": job.config.partition}

    def sizes(self, axis: Any) -> dict[str, Any]:
        return {"repartition": self.sent}

    def state(self) -> Any:
        return list(self.sizes_in_use)

    def result(self) -> dict[str, Any]:
        return {"partitions": self.partitions}

    def lines(self, result: dict[str, Any]) -> list[str]:
        cuts = (f"{cut} for {steps:,} step{'s' * (steps != 1)}" for cut, steps in result["partitions"])
        return [f"layers of the stages: {', then '.join(cuts)}"]

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """All exchanges, and the move to the layout.

        A move sends the ranges of all ranks to every rank, and each rank the bytes that it needs and does not have: of
        each layer that gets a rank of another stage its weights and its optimizer state, once per replica. With ZeRO a
        rank has the shards that the new layout gives it, so elements move between replicas, too.
        """
        from minidist.parallel.redistribute import NUMBER, table_bytes

        # Each rank has one number, whatever its number of axes; a rank without any axis has nothing that could move.
        sent = [axes[0].more["repartition"] for axes in map(list, run.sizes) if axes]
        layers, exchanges, ranges, _ = sent[0]
        # Of each layer, and of what is in front of them and behind them, seconds and FLOPs to every other rank.
        exchanged = exchanges * run.ranks * (run.ranks - 1) * 2 * (layers + 1)
        total = exchanged * NUMBER + sum(one.lacking for one in sent)
        return {"repartition": total + (table_bytes(ranges, run.ranks) if ranges else 0)}


def _text(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))
