"""A training job in a checkpoint and back: weights, optimizer, position in the data, seed, losses.

Everything is stored by its global name and place, so a job that was saved by 4 ranks with ZeRO 3 can be resumed on 1
rank, or on 8 as tp 2 x pp 2 x ZeRO 1. On the same layout the next step has the same bits as without the interruption.

The position in the data is the number of steps: a step's global batch depends on the seed and the step alone. Dropout
masks depend on seed, step and sample. So there is no random state to save.

Training imports this file, and not the other way round: a job is a `train.job.Job`, a strategy a
`train.strategies.mesh.MeshStrategy`, and an axis a `train.strategies.data_axis.DataAxis`.

Proved by: tests/checkpoint/test_resume.py, tests/checkpoint/test_layouts.py
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

from minidist.base import arrays as xp
from minidist.base.errors import UsageError, quoted, quoted_path, reason
from minidist.base.meta import NoDevice
from minidist.base.read_file import check_path
from minidist.base.records import Field, Record, WrongValue
from minidist.comm.sim.folded import others_of, seen_from
from minidist.core.autograd import Parameter
from minidist.core.base.arrays import Array, creating
from minidist.core.comm import Comm
from minidist.core.parallel.dims import Axes
from minidist.job.checkpoint.axis_state import axis_state_shards, load_axis_state
from minidist.job.checkpoint.buffers import buffer_shards, load_buffers
from minidist.job.checkpoint.directory import (
    Checkpoint,
    CheckpointShard,
    complete_checkpoints,
    name_of_step,
    order_of,
    save,
    tensors_of,
)
from minidist.job.checkpoint.dry_storage import DryStorage, file_bytes
from minidist.job.checkpoint.held import LocalShard, ReplicaId
from minidist.job.checkpoint.parameter_shards import checkpoint_shards
from minidist.job.checkpoint.storage import Storage
from minidist.job.config.models import llama_inner
from minidist.job.config.pipeline_plan import make_plan
from minidist.job.config.train_config import Batches, TrainConfig, flag
from minidist.parallel.tensor.full_state import local_tensor
from minidist.techniques import Extension, history, installed, of_job
from minidist.techniques.meeting import replicas_of

# The settings on which the bits of the next step depend; a resumed job must not differ in them. Data are compared by
# their content, where the checkpoint has that.
FIXED = (
    "model",
    "layers",
    "width",
    "heads",
    "kv_heads",
    "ffn",
    "context",
    "experts",
    "data",
    "optimizer",
    "weight_decay",
    "precision",
    "seed",
    "evaluate_every",
)

Held = tuple[Parameter, int, int]  # elements [start, stop) of a parameter, or of its shard, which this rank holds


def fixed_settings() -> tuple[str, ...]:
    """Return the settings, also of techniques, that a resumed job shares with the job that saved its checkpoint."""
    return (*FIXED, *(name for kind in installed() for name in kind.fixed))


def fixed_by_users(job: Any, states: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the `fixed` settings of each extension of `--extension` that has some, or a state, by its key."""
    return {
        extension.key: {name: str(getattr(extension.settings, name)) for name in extension.fixed}
        for extension in job.extensions
        if type(extension) not in installed() and (extension.fixed or extension.key in states)
    }


def save_job(
    comm: Comm,
    directory: str | Path,
    job: Any,
    strategy: Any,
    step: int,
    losses: list[float],
    storage: Storage | None = None,
) -> Path:
    """Write the job after `step` steps; every rank calls it. Each replicated tensor is written by one rank."""
    # Rank 0 writes the state; the others need not read all data for its fingerprint.
    plan = job.plan.state()
    state = job_state(job, step, losses, strategy.step_count, strategy.scalars()) if comm.rank == 0 else {}
    if comm.rank == 0:
        state |= {"batch_plan": plan} if plan else {}
        state |= {"optimizer_counts": counts} if (counts := strategy.counts) else {}
    path = save(comm, directory, step, _job_shards(strategy), state, storage)
    keep_last(comm, directory, history(job.config).keep, losses, storage)
    return path


def saved_bytes(comm: Comm, strategy: Any, storage: Storage) -> dict[int, int]:
    """Return the bytes of a rank's file of tensors in the last checkpoint, by rank.

    The result has this rank and, in a folded run, every rank that it represents.
    """
    result = {comm.rank: storage.tensor_bytes}
    # Each of the others writes another part of the tensors, which the code of a save chooses by its place.
    for rank in others_of(comm):
        result[rank] = file_bytes(tensors_of(_job_shards(strategy.seen_from(seen_from(comm, rank)))))
    return result


def keep_last(
    comm: Comm, directory: str | Path, keep: int | None, losses: Sequence[float], storage: Storage | None = None
) -> None:
    """Delete all but the last `keep` checkpoints of this run, and none of another one; rank 0 does it.

    Those of this run have the losses that it has had: a resumed run knows them, and other runs have others.
    """
    if keep is None or comm.rank != 0:
        return
    mine = []
    for name in complete_checkpoints(directory):
        try:
            checkpoint = Checkpoint(directory, name)
            if checkpoint.state.get("losses") == list(losses[: checkpoint.step]):
                mine.append(name)
        except UsageError:
            continue  # a damaged checkpoint belongs to no run
    for name in sorted(mine, key=order_of)[:-keep]:
        (storage or Storage()).discard(Path(directory) / name)


@contextmanager
def saving_alone(comm: Comm, config: TrainConfig) -> Iterator[Storage]:
    """Hold the lock of the --save directory while a job runs; UsageError when another job saves there.

    Yields what `save_job` takes as its storage.
    """
    storage = DryStorage() if isinstance(creating.get(), NoDevice) else Storage()
    with ExitStack() as stack:
        if config.save is not None and comm.rank == 0:
            stack.enter_context(storage.locked(Path(config.save)))
        yield storage


def job_state(
    job: Any, step: int, losses: list[float], optimizer_steps: int, scalars: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of a checkpoint that is not tensors."""
    states = {extension.key: state for extension in job.extensions if (state := extension.state())}
    fixed = fixed_by_users(job, states)
    return {
        # The micro-batch is for people: it may change, and --micro-batch auto has become a number here.
        "config": {name: getattr(job.config, name) for name in (*fixed_settings(), "micro_batch")},
        "data_digest": job.data_digest,
        **states,
        **({"extensions": fixed} if fixed else {}),
        "global_batch": job.batches.global_batch,
        "samples": step * job.batches.global_batch,
        "optimizer_steps": optimizer_steps,
        "losses": losses,
        "scalars": scalars,
    }


class JobState(Record, strict=True):
    """What `job_state` wrote, read back: every value has the type and the range that the loaders rely on."""

    everything: dict[str, Any]  # extensions read their own keys
    config: dict[str, Any]
    global_batch: int = Field(ge=1)
    optimizer_steps: int = Field(ge=0)
    optimizer_counts: dict[str, Annotated[int, Field(ge=0)]] = Field({})  # of parameters that have had fewer steps
    losses: list[float]
    scalars: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field({})
    data_digest: str | None = None  # older checkpoints have none
    batch_plan: dict[str, Any] = Field({})  # where batches change while the job trains
    extensions: dict[str, dict[str, str]] = Field({})  # of --extension: key -> its `fixed` settings

    def of(self, extension: Extension) -> Any:
        """Return the state of an extension, as JSON has it; None when the job that saved the checkpoint had none."""
        return self.everything.get(extension.key)


def read_job_state(checkpoint: Checkpoint) -> JobState:
    """Return the state of a job's checkpoint; UsageError when it is none of a job, or not as `job_state` writes it."""
    if "config" not in checkpoint.state:
        raise UsageError(
            f"the checkpoint {quoted_path(checkpoint.path)} is not one of minidist train: it does not say which job it"
            " is; read its tensors with minidist.job.checkpoint.Checkpoint"
        )
    with _describing_a_job(checkpoint):
        state = JobState(**{**checkpoint.state, "everything": checkpoint.state})
        if len(state.losses) != checkpoint.step:
            raise ValueError(f"it has {len(state.losses)} losses of {checkpoint.step} steps")
    return state


@contextmanager
def _describing_a_job(checkpoint: Checkpoint, *place: str) -> Iterator[None]:
    """In the block a value that a checkpoint's state must not have is a UsageError. place: where the values are."""
    try:
        yield
    except ValueError as error:
        why = reason(error)
        if isinstance(error, WrongValue):
            why = str(WrongValue(error.message, (*place, *error.place)))
        raise UsageError(
            f"the checkpoint {quoted_path(checkpoint.path)} does not describe a job ({why}); {checkpoint.remedy}"
        ) from None


def _job_shards(strategy: Any) -> list[CheckpointShard]:
    """Return all that this rank holds of a checkpoint."""
    return [*_shards(strategy), *axis_state_shards(strategy), *buffer_shards(strategy.buffers())]


def _shards(strategy: Any) -> list[CheckpointShard]:
    """Return this rank's shards of weights, of what techniques keep with them, and of optimizer state."""
    result: list[CheckpointShard] = []
    for axis in strategy.data_axes:
        # (name, shard, replica on the data axis); on the other axes a parameter may have replicas, too.
        replicas = axis.replicas
        tensors = [(f"weights/{shard.parameter.name}", shard, replicas.weights) for shard in axis.weights()]
        kept: dict[str, int] = {}
        for extension in strategy.job.extensions:
            for kind, shards in extension.shards(axis).items():
                tensors += [(f"{kind}/{shard.parameter.name}", shard, replicas.weights) for shard in shards]
            # Tensors with many zeros are stored without them.
            kept |= extension.kept(axis)
        for p, start, stop in axis.state_ranges():
            for key, array in axis.optimizer.state.get(p.name, {}).items():
                name = f"{replicas.prefix}optimizer/{p.name}/{key}"
                tensors.append((name, LocalShard(p, array, start, stop), replicas.state))
        for name, shard, replica in tensors:
            # A parameter that a pipeline holds on two stages is written by its first.
            if shard.start < shard.stop and strategy.owns(axis, shard.parameter):
                other = strategy.replica_of(axis, shard.parameter)
                # Replicas on the data axis times those on the other axes.
                both = ReplicaId(replica.number * other.size + other.number, replica.size * other.size)
                parts = checkpoint_shards(name, shard, strategy.axes, both)
                if name in kept:
                    parts = [replace(part, sparse=True, kept=kept[name]) for part in parts]
                result += parts
    return result


def resume_job(directory: str | Path, job: Any, strategy: Any) -> tuple[int, list[float]]:
    """Load the latest checkpoint, or that of --from-step, into a newly built job; every rank calls it.

    Returns (steps done, their losses).

    All that this rank needs is read and checked before anything is changed. Errors: UsageError when the job is another
    one, and those of `Checkpoint`.
    """
    checkpoint = Checkpoint(directory, step=history(job.config).from_step)
    saved = same_job(checkpoint, job, strategy.axes.comm.rank)
    _same_replicas(checkpoint, job.config, strategy)

    # [1] Read and check all that this rank needs.
    axes = strategy.axes
    writes = [(shard.values, _read(checkpoint, axes, shard)) for axis in strategy.data_axes for shard in axis.weights()]
    states = [
        {held[0].name: _state(checkpoint, axes, held, axis.replicas.prefix) for held in axis.state_ranges()}
        for axis in strategy.data_axes
    ]
    kept = [[_kept(checkpoint, axes, axis, extension) for extension in job.extensions] for axis in strategy.data_axes]

    with _describing_a_job(checkpoint, "batch_plan"):
        job.plan.load(saved.batch_plan, checkpoint.step)
    load_extensions(job, saved, checkpoint)

    # [2] Change the job, when nothing can be missing any more.
    for array, values in writes:
        xp.store(array, values)
    strategy.load_scalars(saved.scalars)
    strategy.updates = saved.optimizer_steps
    for axis, state, found in zip(strategy.data_axes, states, kept, strict=True):
        for extension, shards in zip(job.extensions, found, strict=True):
            extension.load_shards(axis, shards)
        # A parameter without state (plain SGD) has no entry.
        known = {name: arrays for name, arrays in state.items() if arrays}
        counts = {name: saved.optimizer_counts[name] for name in state if name in saved.optimizer_counts}
        axis.optimizer.load_state_dict({"step": saved.optimizer_steps, "state": known, "counts": counts})
        axis.updated()
        axis.optimizer.refresh()
    load_axis_state(checkpoint, strategy)
    load_buffers(checkpoint, job.model)
    return checkpoint.step, saved.losses


def resumed_config(config: TrainConfig, batches: Batches) -> TrainConfig:
    """Return the config with which a job that is resumed is built: with what its techniques decided before."""
    extensions = list(of_job(config))
    if not extensions:
        return config
    checkpoint = Checkpoint(str(config.save), step=history(config).from_step)
    saved, stages = read_job_state(checkpoint), 1
    if config.pp > 1:
        stages = make_plan(config, batches.accumulation).stages
    for extension in extensions:
        with _describing_a_job(checkpoint, extension.key):
            config = extension.before_resume(config, stages, saved.config, saved.of(extension))
    return config


def load_extensions(job: Any, saved: JobState, checkpoint: Checkpoint) -> None:
    """Let the job's extensions continue where those of the checkpoint ended."""
    samples = job.plan.samples_of(checkpoint.step)
    for extension in job.extensions:
        with _describing_a_job(checkpoint, extension.key):
            extension.load(saved.of(extension), samples)


def _same_replicas(checkpoint: Checkpoint, config: TrainConfig, strategy: Any) -> None:
    """Raise UsageError when the checkpoint has an optimizer for each of another number of replicas that train alone."""
    stored = {name.split("/")[1] for name in checkpoint.tensors if name.startswith("replica/")}
    replicas = replicas_of(config, strategy.axes.data.size)
    if stored and len(stored) != replicas:
        here, remedy = ("replicas", "with --dp-replicate") if config.zero else ("ranks", "on")
        raise UsageError(
            f"the checkpoint {str(checkpoint.path)!r} holds the optimizer states of {len(stored)} replicas that trained"
            f" alone, this job has {replicas} {here}; resume {remedy} {len(stored)}, or begin a new job with"
            " --init-from"
        )


def _kept(checkpoint: Checkpoint, axes: Axes, axis: Any, extension: Extension) -> dict[str, list[LocalShard]]:
    """Return what a technique keeps with the weights of a data axis, by kind, from the checkpoint."""
    return {
        kind: [shard._replace(values=_read(checkpoint, axes, shard, kind, dtype)) for shard in shards]
        for kind, (dtype, shards) in extension.shards_after(axis, checkpoint.step).items()
    }


def _state(checkpoint: Checkpoint, axes: Axes, held: Held, before: str) -> dict[str, Array]:
    """Return the optimizer state of a rank's elements. Its dtypes, and what there must be, the optimizer checks."""
    prefix = f"{before}optimizer/{held[0].name}/"
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    return {name[len(prefix) :]: _elements(checkpoint, axes, held, name) for name in names}


def _read(checkpoint: Checkpoint, axes: Axes, shard: LocalShard, kind: str = "weights", dtype: Any = None) -> Array:
    """Return the values of a shard. dtype: what they must have; None: the parameter's."""
    p, _, start, stop = shard
    return _elements(checkpoint, axes, (p, start, stop), f"{kind}/{p.name}", str(dtype or p.dtype))


def _elements(checkpoint: Checkpoint, axes: Axes, held: Held, name: str, dtype: str | None = None) -> Array:
    """Return a rank's elements of a tensor, of its tensor-parallel shard where it has one."""
    parameter, start, stop = held
    layout = parameter.layout
    checkpoint.expect(name, parameter.shape if layout is None else layout.global_shape, dtype)
    if layout is None or not layout.axes:
        return checkpoint.read(name, start, stop)

    # The whole tensor, cut as tensor parallelism cuts it, and of that the range.
    return local_tensor(checkpoint.tensor(name), layout, axes).reshape(-1)[start:stop]


def same_job(checkpoint: Checkpoint, job: Any, rank: int = 0) -> JobState:
    """Return the checkpoint's state; UsageError when the job differs in a setting on which the next step depends.

    The content of the data is read and compared by rank 0 alone.
    """
    state, path = read_job_state(checkpoint), str(checkpoint.path)
    _check_settings(state, job, path)
    _check_extensions(state, job, path)
    if rank == 0:
        _check_content(state, job, checkpoint)

    # Step n's samples are numbers n * global_batch and following, so another size would skip or repeat some.
    if state.global_batch != job.batches.global_batch:
        raise UsageError(
            f"the checkpoint {quoted_path(path)} was made with a global batch of {state.global_batch}, this job has"
            f" {job.batches.global_batch}, so the data would not continue where they stopped; resume with"
            f" --global-batch {state.global_batch}"
        )
    for extension in job.extensions:
        extension.check_resume(checkpoint)
    if checkpoint.step >= job.config.steps:
        raise UsageError(
            f"the checkpoint {quoted_path(path)} has {checkpoint.step} steps already; raise --steps above"
            f" {checkpoint.step}"
        )
    return state


def _check_settings(state: JobState, job: Any, path: str) -> None:
    """Raise UsageError for a setting that differs from the checkpoint's, and may not."""
    config, kept = job.config, state.everything
    by_content = {name for extension in job.extensions if extension.key in kept for name in extension.by_content}
    for name in fixed_settings():
        # Data are the same when their content is, whatever their path.
        if name == "data" and state.data_digest is not None:
            continue
        # So is what a technique reads from a place.
        if name in by_content:
            continue
        # Older checkpoints have fewer settings.
        then, now = state.config.get(name, TrainConfig.model_fields[name].default), getattr(config, name)
        # The width of a Llama's MLP is given, or follows from settings that were compared before it.
        if name == "ffn" and config.model == "llama":
            then, now = llama_inner(config.model_copy(update={"ffn": then})), llama_inner(config)
        # How often a job is evaluated may differ: only asynchronous pipelines, which drain there, depend on it. Whether
        # it is evaluated decides which data it trains on.
        if name == "evaluate_every" and (then is None) == (config.evaluate_every is None):
            continue
        if then != now:
            raise UsageError(
                f"the checkpoint {quoted_path(path)} was made with {flag(name)} {_short(then)}, this job has"
                f" {_short(now)}; "
                + (f"leave out {flag(name)}" if then is None else f"resume with {flag(name)} {_short(then)}")
            )


def _check_extensions(state: JobState, job: Any, path: str) -> None:
    """Raise UsageError for a class of `--extension` that one of the jobs lacks, or that has other `fixed` settings."""
    fixed = fixed_by_users(job, state.everything)
    keys = {extension.key for extension in job.extensions}
    for key, settings in state.extensions.items():
        if key not in keys:
            again = ",".join([key, *(f"{name}={value}" for name, value in settings.items())])
            raise UsageError(
                f"the checkpoint {quoted_path(path)} was made with the extension {quoted(again)}, and this job has"
                " none of that name; resume with it as --extension FILE.py:CLASS, or begin a new job with --init-from"
            )
    by_content = {(e.key, name) for e in job.extensions if e.key in state.everything for name in e.by_content}
    for key, settings in fixed.items():
        # A checkpoint with its state and without its settings is an older one.
        if settings and key not in state.extensions and key not in state.everything:
            raise UsageError(
                f"the checkpoint {quoted_path(path)} was made without the extension {key}, which fixes"
                f" {', '.join(settings)} for a whole job; leave --extension out, or begin a new job with --init-from"
            )
        for name, now in settings.items():
            then = state.extensions.get(key, {}).get(name, now)
            if then != now and (key, name) not in by_content:
                raise UsageError(
                    f"the checkpoint {quoted_path(path)} was made with {name}={quoted_path(then, marks=False)} of the"
                    f" extension {key}, this job has {quoted_path(now, marks=False)}; resume with"
                    f" {name}={quoted_path(then, marks=False)}"
                )


def _check_content(state: JobState, job: Any, checkpoint: Checkpoint) -> None:
    """Raise UsageError when the data, or what a technique reads, are not what they were."""
    path, kept = str(checkpoint.path), state.everything
    if state.data_digest not in (None, job.data_digest):
        name = _short(state.config.get("data"))
        raise UsageError(
            f"the checkpoint {quoted_path(path)} was made with --data {name}, whose content was not that of --data"
            f" {_short(job.config.data)} now; resume with the data as they were, or train anew in another --save"
            " directory"
        )
    for extension in job.extensions:
        if extension.key in kept:
            with _describing_a_job(checkpoint, extension.key):
                difference = extension.differs(kept[extension.key])
            if difference:
                raise UsageError(f"the checkpoint {quoted_path(path)} was made with {difference}")


def _short(value: object) -> str:
    return quoted_path(value, marks=False)


def check_saving(config: TrainConfig) -> None:
    """Make the directory of --save; UsageError when nothing can be written there, or an earlier run would be hidden.

    The job has one.
    """
    assert config.save is not None
    check_path(config.save, "--save")
    if (step := history(config).from_step) is not None:
        name_of_step(config.save, step)
    if config.resume:
        return
    # A new run would let `latest` name its own checkpoints, and a later --resume would continue the wrong run.
    there = complete_checkpoints(config.save)
    if there and not history(config).overwrite:
        raise UsageError(
            f"--save {_short(config.save)} holds checkpoints of an earlier run (the last one is {there[-1]}); continue"
            " it with --resume, choose another directory, or add --overwrite to save this run in addition to it"
        )
    try:
        Path(config.save).mkdir(parents=True, exist_ok=True)
        # Only writing shows whether writing is allowed.
        with TemporaryFile(dir=config.save):
            pass
    except OSError as error:
        raise UsageError(
            f"checkpoints cannot be written to --save {_short(config.save)}: {error.strerror}; choose another directory"
        ) from None
