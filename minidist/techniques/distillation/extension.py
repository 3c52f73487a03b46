"""`--distill-from`: a student learns from labels and from its teacher, wherever the teacher is (`teacher.py`).

A rank sends per step: nothing; with `--tp` 5 numbers per token; with a sharded teacher (n-1)/n of it per micro-batch;
from separate ranks the logits of every sample.
Equal to: one device, bit for bit.
Lesson: 09d_distillation.

Proved by: tests/techniques/test_distillation.py
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from minidist.base.errors import UsageError, quoted_path
from minidist.base.half import DTYPES, named_dtype
from minidist.base.limits import MAX_RANKS
from minidist.core.comm import Comm
from minidist.data import load_dataset
from minidist.parallel.replica_guard import startup_bytes
from minidist.techniques import Extension, Field, Record, Rule, Run, Value, distillation, without_effect

PLACES = {"shard_teacher": "--shard-teacher", "teacher_ranks": "--teacher-ranks"}  # where other ranks have a part


def _given(name: str, where: Value) -> Value:
    """Return whether a setting is given in a job for which `where` holds."""
    return lambda job: getattr(job, name) and where(job)


class Distillation(Extension):
    """Gives each micro-batch the logits of a teacher in addition to its labels; see `DistillationLoss`."""

    class Settings(Record):
        distill_from: str | None = Field(
            None,
            description="knowledge distillation: the checkpoint of the teacher, a --save directory or a folder in it",
        )
        temperature: float = Field(
            2.0,
            gt=0,
            description="distillation: divisor of teacher's and student's logits; higher shows more of the wrong"
            " classes",
        )
        distill_weight: float = Field(
            0.5,
            gt=0,
            le=1,
            description="distillation: weight of the teacher's part of the loss; the labels have the rest",
        )
        teacher_precision: Literal["fp32", "fp64", "fp16", "bf16"] | None = Field(
            None, description="distillation: dtype in which the teacher computes (default: --precision)"
        )
        shard_teacher: bool = Field(
            False,
            description="distillation: a share of each layer of the teacher on each rank, gathered when it computes",
        )
        teacher_ranks: int = Field(
            0, ge=0, le=MAX_RANKS, description="distillation: ranks after those of the axes, which compute the logits"
        )
        teacher_cache: str | None = Field(
            None,
            description=(
                "distillation: directory that keeps the logits of each sample for later epochs and runs; default: that"
                " of all cached data"
            ),
        )

    main = "distill_from"
    panel = "Optimization"
    rules = (
        Rule(
            "teacher-without-student",
            lambda j: j.teacher_ranks > j.data_ranks // j.cp,
            "--teacher-ranks {teacher_ranks} are more than the {replicas_of_data} data-parallel replicas, and each"
            " replica has one teacher",
            "use --teacher-ranks {replicas_of_data} at most",
            {"replicas_of_data": lambda j: j.dims.dp},
        ),
        *(
            Rule(
                f"{name.replace('_', '-')}-in-a-pipeline",
                _given(name, lambda j: j.pp > 1),
                f"{flag} needs ranks that use logits at the same time, and with --pp {{pp}} the schedule decides"
                " which rank computes a loss, and when",
            )
            for name, flag in PLACES.items()
        ),
        *(
            Rule(
                f"{name.replace('_', '-')}-with-server",
                _given(name, lambda j: j.server),
                f"{flag} needs ranks that use logits at the same time, and the workers of --strategy ps exchange"
                " nothing with each other",
                "leave it out, or use --strategy auto",
            )
            for name, flag in PLACES.items()
        ),
        Rule(
            "sharded-teacher-with-a-cache",
            lambda j: j.shard_teacher and j.teacher_cache is not None,
            "--shard-teacher gathers layers on all ranks at the same time, and with --teacher-cache {teacher_cache} a"
            " rank that finds its logits in the cache gathers none",
            "leave one of them out",
        ),
        Rule(
            "sharded-teacher-on-its-own-ranks",
            lambda j: j.shard_teacher and j.teacher_ranks,
            "--shard-teacher divides the teacher among the students' ranks, and with --teacher-ranks {teacher_ranks}"
            " these hold no teacher",
            "leave one of them out",
        ),
        *(
            without_effect(name, lambda j: j.distill_from is not None, "--distill-from", switch=name == "shard_teacher")
            for name in Settings.model_fields
            if name != "distill_from"
        ),
    )
    alone = (("shard_teacher", lambda job: False),)
    key = "teacher_digest"
    fixed = ("distill_from", "temperature", "distill_weight", "teacher_precision")
    by_content = ("distill_from",)
    by_values = ("teacher_cache",)
    trainers = "students"

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        if settings.teacher_ranks:
            self.unlike = f"the ranks of --teacher-ranks {settings.teacher_ranks}"

    @classmethod
    def beside(cls, config: Any, ranks: int | None = None) -> int:
        """The teachers' ranks."""
        teachers: int = config.teacher_ranks
        if teachers and ranks is not None and teachers >= ranks:
            raise UsageError(
                f"--teacher-ranks {teachers} of {ranks} ranks leave no student; start at least {teachers + 1} ranks, or"
                " use fewer teachers"
            )
        return teachers

    def check_models(self, config: Any, saved_model: Callable[[str, str], Any]) -> None:
        distillation.find_teacher(config, load_dataset(config.data), saved_model)

    def serve(self, comm: Comm, config: Any, batches: Any, saved_model: Callable[[str, str], Any]) -> int:
        from minidist.data.workers import open_sampler

        held_out = config.evaluate_every is not None
        sampler = open_sampler(config.data, held_out, batches.global_batch, config.context, config.seed)
        self.teacher = distillation.Teacher(config, sampler.dataset, saved_model)
        return distillation.serve_logits(self.teacher, sampler, comm, config, batches)

    def build(self, job: Any, comm: Comm | None) -> None:
        self.config, self.teacher = job.config, distillation.Teacher(job.config, job.sampler.dataset, job.saved_model)

    def begin(self, comm: Comm, strategy: Any, done: int) -> None:
        distillation.place_teacher(self.teacher, comm, strategy.axes, self.config, done)

    def targets(self, step: int, inputs: Any, targets: Any, positions: Any) -> "distillation.SoftTargets":
        """The labels, and a promise of the logits: of a pipeline, ranks without a loss ask for none."""
        return distillation.SoftTargets(targets, partial(self.teacher.logits, step, inputs, positions))

    def loss(self, loss: Callable[..., Any], comm: Comm | None = None) -> "distillation.DistillationLoss":
        return distillation.DistillationLoss(self.settings, loss, comm, self.teacher.shape[-1])

    def loss_volume(self, volume: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        return distillation.distillation_volume

    def state(self) -> str:
        """The fingerprint of the teacher's weights: a resumed job has the same teacher, whatever its path."""
        digest: str = self.teacher.saved.digest
        return digest

    def differs(self, state: Any) -> str:
        if not isinstance(state, str):
            raise ValueError("input should be a valid string")
        if state == self.state():
            return ""
        return (
            "another teacher than the one in --distill-from"
            f" {quoted_path(self.settings.distill_from, marks=False)} now; name the folder of the checkpoint that it"
            " learned from, such as DIR/step-00000040"
        )

    def sizes(self, axis: Any) -> dict[str, Any]:
        return {"teacher_units": self.teacher.units, "teacher_logits": self.teacher.received}

    def result(self) -> dict[str, Any]:
        """The samples whose logits were asked for, and were computed, with --teacher-cache."""
        counts = self.teacher.counts()
        return {} if counts is None else {"teacher": counts}

    def of_all_ranks(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        counts = [result["teacher"] for result in results if "teacher" in result]
        if not counts:
            return {}
        return {"teacher": {name: sum(count[name] for count in counts) for name in ("asked", "computed")}}

    def lines(self, result: dict[str, Any]) -> list[str]:
        if "teacher" not in result:
            return []
        return ["logits of {asked:,} samples; the teacher computed {computed:,} of them".format(**result["teacher"])]

    def bytes_sent(self, run: Run) -> dict[str, int]:
        """A sharded teacher: its weights at the start, and its layers; or the logits that the teachers' ranks send."""
        config, dims = run.config, run.batches.dims
        itemsize = named_dtype(DTYPES[config.teacher_precision or config.precision]).itemsize
        # The same on every rank of the layout. The workers of a server have no such sizes.
        of_rank: Mapping[str, Any] = next(iter(next(iter(run.sizes)))).more
        units, logits = of_rank.get("teacher_units", ()), of_rank.get("teacher_logits", 0)
        sent = 8 * config.teacher_ranks
        for shares, steps in run.runs:
            sent += distillation.teacher_bytes(run.batches.with_shares(shares), steps, itemsize, units, logits)
        return {"startup": dims.tp * startup_bytes(units, itemsize, dims.dp * dims.cp), "teacher": sent}
