"""Knowledge distillation: a student learns from labels and from the logits of a trained model, its teacher.

Which rank computes a micro-batch's logits changes no bit of them: each micro-batch goes through the whole teacher by
itself, so a student's weights are those of one device. A teacher computes the next micro-batch of a student while the
last one is on its way. Four forms, with what they send per step:

    (a) on every rank       each rank has the whole teacher                       nothing
    (b) --shard-teacher     each rank has 1/n of every layer, gathers it for      (n-1)/n of the teacher per micro-batch
                            its use and releases it, as ZeRO 3 does
    (c) --teacher-ranks K   the last K ranks have the teacher, and send logits    the logits of every sample
    (d) --teacher-cache     a sample's logits are computed once and stored, also  nothing more
                            for later runs; with (a), or on the ranks of (c)

    student 0   student 1   student 2 | teacher 0   teacher 1       (c): the teacher of student r is number r % K, and
        ▲           ▲───────────┼───────────┼───────────┘           computes one micro-batch ahead of it
        └───────────────────────▲───────────┘

A teacher of (c) knows which samples its students train on, because a step's global batch depends on the seed and the
step alone. So no request travels: rank 0 says once from which step the job begins, then logits do, in the order in
which the students use them. Teacher t has the replicas t, t + K, t + 2 K, ... and sends

    for each step, for each micro-batch i of a replica, for each of its replicas: logits of micro-batch i

With context parallelism a replica is several ranks; each gets the logits of its tokens. With tensor parallelism each
gets the logits of all words, because the probability of a word depends on all logits.

A teacher has no gradients and no optimizer state, and computes without dropout. For the cache each sample goes through
it alone, because the last bits of a product may depend on how many rows are multiplied together: so a stored sample is
right in every batch.

Source: Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network", 2015 (arXiv:1503.02531).
Proved by: tests/techniques/test_distillation.py
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.cache import folder
from minidist.base.errors import UsageError, quoted_path
from minidist.base.half import DTYPES, named_dtype
from minidist.core.autograd import Tensor, no_grad
from minidist.core.base.arrays import Array
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.comm import Comm, Request
from minidist.core.parallel.dims import Axes
from minidist.core.parallel.fsdp import fully_shard, units_of
from minidist.data import Dataset, TokenDataset, cached
from minidist.parallel.context import document_ids, documents
from minidist.parallel.context.all_gather_attention import mask_documents
from minidist.parallel.context.orders import part_order, sequence_positions
from minidist.techniques import wrapper_options

new_purpose("teacher")


def find_teacher(config: Any, dataset: Dataset, saved_model: Callable[[str, str], Any]) -> Any:
    """Return the model that --distill-from names, a `SavedModel`.

    UsageError when there is none, and when it takes other data or has other classes than the student.
    """
    found = saved_model("--distill-from", config.distill_from)
    teacher, where = found.config, f"--distill-from {quoted_path(config.distill_from)}"
    if not teacher.is_own_model and teacher.is_language_model is not isinstance(dataset, TokenDataset):
        raise UsageError(
            f"{where} holds a model (--model {teacher.model}) that cannot read --data"
            f" {quoted_path(config.data, marks=False)}; teacher and student need the same kind of data"
        )
    if teacher.is_language_model and isinstance(dataset, TokenDataset):
        rows = found.vocabulary
        if rows != dataset.vocab_size:
            raise UsageError(
                f"{where} holds a model of {rows:,} tokens and --data {quoted_path(config.data, marks=False)} has"
                f" {dataset.vocab_size:,}; teacher and student need the same vocabulary"
            )
    if teacher.model == "gpt" and teacher.context < config.context:
        raise UsageError(
            f"{where} holds a model that knows {teacher.context} positions; use --context {teacher.context} at most"
        )
    return found


class Teacher:
    """A trained model that returns logits: form (a), form (b) after `shard`, and (c) after `receive_from`.

    units: elements of each unit of a sharded teacher, with padding. received: elements of a sample's logits, where
    another rank sends them to this one.
    """

    def __init__(self, config: Any, dataset: Dataset, saved_model: Callable[[str, str], Any]) -> None:
        self.saved = find_teacher(config, dataset, saved_model)
        # In the precision that this job asks for, whatever it was trained in.
        self.precision = config.teacher_precision or config.precision
        # The teacher's attention stays inside documents as the student's.
        self.separator = getattr(config, "document_separator", None)
        self.dataset, self.dtype = dataset, named_dtype(DTYPES[self.precision])
        # Of a sample's logits: (tokens, vocabulary), or (classes,).
        self.shape: tuple[int, ...] = (
            (config.context, dataset.vocab_size) if isinstance(dataset, TokenDataset) else (dataset.classes,)
        )
        directory = config.teacher_cache
        self.cache = None if directory is None else folder() if directory == "default" else Path(directory)
        self.computed = self.asked = 0  # samples whose logits were computed, and were asked for
        self.units: tuple[int, ...] = ()
        self.received = 0
        self._source: tuple[Comm, int] | None = None

    @cached_property
    def model(self) -> Any:
        """The whole model. It is read at its first use: of a pipeline, the ranks without a loss need none."""
        model = self.saved.make(self.precision, self.dataset)
        if self.separator is not None and self.saved.config.is_language_model:
            mask_documents(model, self.shape[0])
        for parameter in model.parameters():
            parameter.requires_grad = False
        model.eval()
        return model

    def shard(self, comm: Comm, prefetch: int) -> None:
        """Keep 1/n of every layer on each rank of `comm`. All these ranks ask for logits at the same time.

        Rank 0 sends its weights (purpose startup), and then every micro-batch gathers all layers: see `teacher_bytes`.
        """
        for part in (*getattr(self.model, "blocks", ()), self.model):
            fully_shard(part, mesh=comm, prefetch=prefetch)
        self.units = tuple(unit.flat.padded_numel for unit in units_of(self.model))

    def counts(self) -> dict[str, int] | None:
        """Return how many samples' logits were asked for and how many were computed; None without a cache."""
        return {"asked": self.asked, "computed": self.computed} if self.cache is not None else None

    def receive_from(self, comm: Comm, rank: int) -> None:
        """Receive the logits from a rank of `comm` that runs `serve_logits`, instead of computing them."""
        self._source, self.received = (comm, rank), prod(self.shape)

    def logits(self, step: int, inputs: Array, positions: Array | None = None) -> Array:
        """Return the logits of a micro-batch's whole samples, (rows, [tokens,] classes) in the teacher's precision.

        positions: of a rank's tokens in their sequence (context parallelism), which are then returned alone.
        """
        if self._source is not None:
            comm, rank = self._source
            of_sample = self.shape if positions is None else (len(positions), *self.shape[1:])
            received = xp.empty((len(inputs), *of_sample), self.dtype)
            with purpose("teacher"):
                comm.recv(received, rank)
            return received

        self.asked += len(inputs)
        if self.cache is not None:
            result = xp.concatenate([self._stored(step, inputs[row : row + 1]) for row in range(len(inputs))])
        else:
            result = self._computed(step, inputs)
        return result if positions is None else result[:, positions]

    def _stored(self, step: int, sample: Array) -> Array:
        """Return the logits of one sample, (1, [tokens,] classes), from the cache or into it."""

        def make() -> Array:
            # As bytes: a file of NumPy's does not know bfloat16.
            return xp.to_host(self._computed(step, sample)).view(np.uint8)  # type: ignore[no-any-return]

        precision = self.precision
        made_of: dict[str, Any] = {"teacher": self.saved.digest, "precision": precision, "separator": self.separator}
        stored = cached(xp.to_host(sample), "logits", make, self.cache, **made_of)
        return xp.to_device(np.array(stored).view(self.dtype))

    def _computed(self, step: int, inputs: Array) -> Array:
        """Return what the teacher computes; UsageError for other classes and numbers that are not finite."""
        self.computed += len(inputs)
        features = inputs.dtype.kind == "f"
        ids = None if self.separator is None else document_ids(inputs, self.separator)
        with no_grad(), purpose("teacher", whole=True), documents(ids):
            result: Array = self.model(
                Tensor(xp.as_array(xp.to_device(inputs), self.dtype)) if features else inputs
            ).data
        if result.shape[1:] != self.shape:
            raise UsageError(
                f"--distill-from {quoted_path(self.saved.checkpoint.path)}: its model returns logits of shape"
                f" {result.shape} where the data have {(len(inputs), *self.shape)}; teacher and student need the same"
                " classes"
            )
        # NaN compares as false, and -inf is a class that the teacher excludes.
        if not (result < inf).all():
            raise UsageError(
                f"step {step}: the teacher's logits in {self.precision} are not finite; use --teacher-precision fp32"
            )
        return result


def teacher_bytes(batches: Any, steps: int, itemsize: int, units: Sequence[int], received: int) -> int:
    """Return the bytes that all ranks together send for the teacher (purpose teacher) in `steps` steps.

    units: elements of a sharded teacher, which every micro-batch gathers over the ranks that share it. received:
    elements of a sample's logits, which a teacher's rank sends to each tensor-parallel rank.
    """
    gathers: int = steps * batches.accumulation * batches.dims.tp * (batches.dims.dp * batches.dims.cp - 1) * sum(units)
    sends: int = steps * batches.global_batch * batches.dims.tp * received
    return (gathers + sends) * itemsize


def place_teacher(teacher: Teacher, comm: Comm, axes: Axes, config: Any, done: int) -> None:
    """Make form (b) or (c) of a student's teacher, as the settings say; every student's rank calls it.

    comm: students and teachers. done: steps that are done, which rank 0 tells every teacher (8 B, purpose teacher).
    """
    if config.shard_teacher:
        teacher.shard(axes.data.dup(), wrapper_options(config).get("prefetch", 1))
    if config.teacher_ranks:
        first = comm.size - config.teacher_ranks
        teacher.receive_from(comm, first + axes.dp.rank % config.teacher_ranks)
        for rank in range(first, comm.size) if comm.rank == 0 else ():
            with purpose("teacher"):
                comm.send(np.array([done], np.int64), rank)


def serve_logits(teacher: Teacher, sampler: Any, comm: Comm, config: Any, batches: Any) -> int:
    """Send the logits of all steps to this teacher's students; every teacher's rank calls it in place of training.

    sampler: makes the students' batches. Returns how many steps were done before the job began.
    """
    dims, k = batches.dims, batches.accumulation
    mine = range(comm.rank - dims.ranks, dims.dp, config.teacher_ranks)
    order, shares = part_order(config.attention, config.ulysses), batches.shares
    done = np.zeros(1, np.int64)
    with purpose("teacher"):
        comm.recv(done, 0)

    sending: dict[int, Request] = {}
    for step in range(int(done[0]), config.steps):
        comm.world.place = f"step {step}, on a teacher's rank"
        for number, replica in ((r * k + i, r) for i in range(k) for r in mine):
            logits = teacher.logits(step, sampler.batch(step, *shares.place(number))[0])
            comm.advance_clock("teacher")

            # The ranks of a replica are neighbours. Each has one message on its way at most.
            for peer in range(dims.cp * dims.tp):
                student, part = replica * dims.cp * dims.tp + peer, peer // dims.tp
                if student in sending:
                    comm.wait(sending[student])
                positions = sequence_positions(config.context, part, dims.cp, order) if dims.cp > 1 else slice(None)
                with purpose("teacher"):
                    rows = logits[:, positions].astype(logits.dtype, order="C", copy=False)
                    sending[student] = comm.isend(rows, student)
    for request in sending.values():
        comm.wait(request)
    return int(done[0])
