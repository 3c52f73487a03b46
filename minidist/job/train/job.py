"""Makes a config's model, data and optimizer: the same on every rank and for the reference on one device.

Nothing here depends on the number of ranks. Weights depend on the seed and on names, or come from a checkpoint, and a
step's global batch depends on the seed and the step. Therefore one device and many ranks can be compared.

Proved by: tests/equality/test_equality.py, tests/train/test_evaluate.py
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from minidist.base.half import DTYPES, named_dtype
from minidist.core.autograd import Tensor, cross_entropy, no_grad
from minidist.core.base import arrays as xp
from minidist.core.comm import Comm, init_device_mesh
from minidist.core.comm.mesh import Mesh
from minidist.core.optim import Optimizer
from minidist.core.parallel.dims import Axes
from minidist.core.parallel.model_parallel import use_positions
from minidist.core.train.data_axis import Group
from minidist.core.train.task import Task
from minidist.data import GlobalBatchSampler, data_digest, hold_out, load_dataset
from minidist.data.batch_plan import BatchPlan, StepBatch
from minidist.data.sampler import SIDES
from minidist.job import checkpoint
from minidist.job.config.models import activation_shape, make_model
from minidist.job.config.train_config import Batches, TrainConfig
from minidist.optim.named import optimizer_named, takes
from minidist.pipeline.runtime.layer_profile import LayerProfile
from minidist.techniques import Extension, of_job


@dataclass(kw_only=True)
class Job(Task):
    """The model and data of one rank, or of the reference. A strategy adds flat parameters and the optimizer."""

    config: TrainConfig
    batches: Batches
    sampler: Any  # makes micro-batches: a `GlobalBatchSampler`, or what a technique has in its place
    plan: BatchPlan  # makes the batches of later steps
    batch: StepBatch  # the batch of the current step
    held_out: GlobalBatchSampler | None = None  # samples that are never trained on, with --evaluate-every
    targets_per_sample: int = 1  # the tokens of a sample; 1 for labelled samples
    extensions: Sequence[Extension] = ()  # what the techniques of the job add to it
    profile: LayerProfile | None = None  # what measures the layers of a pipeline that drains
    clip: float | None = None  # the largest norm of the gradient; None does not clip
    observers: Sequence[Any] | None = None  # what looks at the job after every step; None: anything may

    def next_batch(self) -> None:
        """Make `batch` the batch of the next step."""
        self.batch = self.plan.next()
        for extension in self.extensions:
            extension.before_step(self.batch.shares.samples)

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate of a step, as the techniques change it."""
        return math.prod((extension.lr_factor(step) for extension in self.extensions), start=1.0)

    # --- what a task has ----------------------------------------------------------------------------------------------

    @property
    def microbatches(self) -> int:
        return self.batch.shares.accumulation

    @property
    def divisor(self) -> float:
        return float(self.batch.shares.samples * self.targets_per_sample)

    @property
    def is_language_model(self) -> bool:
        # A model of the user's returns logits, whatever its class.
        return self.config.is_language_model

    @property
    def criterion(self) -> Callable[..., Tensor]:
        return self.loss_function(cross_entropy)

    def first_row(self, number: int) -> int:
        return self.batch.shares.place(number)[0]

    def whole_batch(self, step: int, number: int, sides: Iterable[str] = SIDES) -> tuple[Any, Any]:
        first, rows = self.batch.shares.place(number)
        start = self.batch.start
        batch = self.sampler.batch(step, first, rows) if start is None else self.sampler.at(start + first, rows)
        for extension in self.extensions:
            extension.read(batch.indices, sides)
        inputs, targets = map(xp.to_device, batch)
        return inputs, targets

    def micro_batch(self, step: int, number: int, sides: Iterable[str] = SIDES) -> tuple[Any, Any]:
        """Return inputs and targets of micro-batch `number` of a step; if sequences are split, this rank's tokens.

        sides: which of the two this rank uses.
        """
        whole, targets = self.whole_batch(step, number, sides)
        inputs, targets = self.local(whole, targets)
        for extension in self.extensions:
            extension.read_inputs(number, whole)
            targets = extension.targets(step, whole, targets, self.positions)
        return inputs, targets

    @contextmanager
    def coordinates(self, step: int, number: int) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(super().coordinates(step, number))
            for extension in self.extensions:
                stack.enter_context(extension.micro_batch(number))
            yield

    @property
    def activation_shape(self) -> tuple[int, ...]:
        """The shape of one sample's activation between two blocks on this rank."""
        config = self.config
        if config.is_classifier:
            return activation_shape(config, self.sampler.dataset)
        rows = config.context if self.positions is None else len(self.positions)
        return rows // (config.tp if config.sequence_parallel else 1), config.width

    def layers_split(self, axes: Axes) -> None:
        # Everything that sends inside a layer is in place: recomputing a block repeats its messages. Tensor
        # parallelism has replaced the loss function.
        config = self.config
        if axes.tp.size > 1 and config.is_language_model:
            self.model.loss_fn = self.loss_function(self.model.loss_fn, axes.tp)

        # A stage that holds 1/tp of the sequence needs the angles of all of it.
        if axes.cp.size == 1 and config.model == "llama":
            use_positions(self.model, xp.device_arange(config.context))

        for extension in self.extensions:
            extension.layers_split(self, axes)

    def optimizer(self, group: Group | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the optimizer's class (or a function that makes it as a technique has it) and its settings.

        group: whose parameters it updates, where several ranks have parts of them.
        """
        config = self.config
        kind: Any = optimizer_named(config.optimizer)
        settings: dict[str, Any] = {"lr": config.lr}
        if takes(config.optimizer, "weight_decay"):
            settings["weight_decay"] = config.weight_decay
        for extension in self.extensions:
            settings |= extension.optimizer_arguments(self, group)
            kind = extension.optimizer(kind)
        return kind, settings

    # --- what a job adds ----------------------------------------------------------------------------------------------

    def loss_at(self, step: int, number: int) -> Tensor:
        """Return the loss of micro-batch `number` of a step, which is read, and runs."""
        batch = self.micro_batch(step, number)
        with self.coordinates(step, number):
            return self.loss(*batch)

    def loss_function(self, loss: Callable[..., Any], comm: Comm | None = None) -> Callable[..., Any]:
        """Return a loss function of the model as the techniques change it. comm: see `Extension.loss`."""
        for extension in self.extensions:
            loss = extension.loss(loss, comm)
        return loss

    @staticmethod
    def saved_model(flag: str, directory: str) -> "checkpoint.SavedModel":
        """Return the model of a checkpoint, which a technique uses next to the job's. flag: what names it."""
        return checkpoint.SavedModel(flag, directory)

    @contextmanager
    def evaluating(self) -> Iterator["Job"]:
        """Yield the job on held-out data, with the extensions that evaluations have, too.

        In the block dropout is off, and operations are not recorded for backward.
        """
        assert self.held_out is not None
        self.model.eval()
        try:
            # The model and the positions are the same; the batch has the size of the job's first one.
            with no_grad():
                batch = StepBatch(self.batches.shares)
                kept = [extension for extension in self.extensions if extension.in_evaluations]
                yield replace(self, sampler=self.held_out, batch=batch, extensions=kept)
        finally:
            self.model.train()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss from which backward starts, as the techniques change it."""
        for extension in self.extensions:
            loss = extension.scaled(loss)
        return loss

    @property
    def scale(self) -> float:
        """By what `scaled` has multiplied the loss of the current step, and so its gradients."""
        return math.prod((extension.scale for extension in self.extensions), start=1.0)

    @cached_property
    def data_digest(self) -> str:
        """The fingerprint of all data of the job, including the held-out part. The data are read at the first use."""
        return data_digest(load_dataset(self.config.data))


def build(config: TrainConfig, batches: Batches, comm: Comm | None = None, plan: BatchPlan | None = None) -> Job:
    """Build a rank's job from a config that `check_rules` has passed.

    comm: the rank's communicator, for techniques. plan: of the batches; None makes the plan that the config describes.
    """
    dataset, size = load_dataset(config.data), (batches.global_batch, config.context, config.seed)
    held_out = None
    if config.evaluate_every:
        # The last tenth is held out before anything is sampled.
        dataset, rest = hold_out(dataset)
        held_out = GlobalBatchSampler(rest, *size)
    sampler = GlobalBatchSampler(dataset, *size)
    dtype, model = named_dtype(DTYPES[config.precision]), make_model(config, dataset)
    job = Job(
        config=config,
        batches=batches,
        model=model,
        dtype=dtype,
        seed=config.seed,
        context=config.context,
        sampler=sampler,
        plan=plan or BatchPlan(config, batches),
        batch=StepBatch(batches.shares),
        held_out=held_out,
        targets_per_sample=config.context if dataset.is_tokens else 1,
        # The reference on one device leaves out what does not change its numbers.
        extensions=[extension for extension in of_job(config) if comm is not None or not extension.observes],
    )
    for extension in job.extensions:
        extension.build(job, comm)
    # A language model computes its loss itself.
    if config.is_language_model:
        job.model.loss_fn = job.loss_function(job.model.loss_fn)
    return job


def mesh_of(comm: Comm, copies: int) -> Comm | Mesh:
    """Return over what to shard: with several copies, over neighbours (hybrid)."""
    return comm if copies == 1 else init_device_mesh(comm, (copies, comm.size // copies), ("replicate", "shard"))


def shard_comm(mesh: Comm | Mesh) -> Comm:
    """Return the ranks whose shards together are one copy."""
    return mesh["shard"] if isinstance(mesh, Mesh) else mesh


def make_optimizer(job: Job, parameters: Any, group: Group | None = None) -> Optimizer:
    """Return the job's optimizer for a FlatParameters or for slices. group: see `Job.optimizer`."""
    kind, settings = job.optimizer(group)
    return kind(parameters, **settings)  # type: ignore[no-any-return]
