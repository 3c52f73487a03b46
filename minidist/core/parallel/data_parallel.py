"""Data parallelism: every rank holds the whole model, computes on its own rows, and the gradients are summed.

    rank 0   rows 0..3    forward, backward ──┐
    rank 1   rows 4..7    forward, backward ──┼─ all-reduce of the gradients ──▶ the same step on every rank
    rank 2   rows 8..11   forward, backward ──┘

It equals training on one device with the whole batch (up to rounding; job/equality/reference.py says when bit for bit)
when three things hold: the replicas start equal, every gradient of every layer is summed, and the divisor of the loss
is the *global* batch. With reduction="sum" each rank divides its loss by the global number of rows or tokens, which is
right for shards of unequal size, too. reduction="mean" divides the sum by the number of ranks: PyTorch's meaning, right
for shards of equal size; losses that are means over different numbers of rows are refused when the gradients meet.

A step sends 2 (n-1)/n of the model's bytes from each rank, independent of the batch, while backward still runs: it
produces gradients from the last parameter to the first. The flat gradient is therefore cut into buckets from the end,
and a bucket is sent while the gradients of the layers before it are computed:

    flat gradient   | bucket 2 | bucket 1 | bucket 0 |
    backward        ◀───────────────────────────────── time
    [1] ready(p)    the last contribution to p was added; when that completes p's bucket ...
    [2] launch(b)   ... the sum of the bucket over the ranks starts, in a separate stream
    [3] finish()    at the end of the pass, wait for all of them

A bucket that never completes is an error that names the parameter, because a gradient that is silently not reduced is a
wrong gradient. Every strategy that reduces whole gradients has a `GradientReducer`. Each wrapper has a *guard*, which
is told what happens, and returns texts that every rank must have equal (minidist/parallel/replica_guard.py).

Source: Li et al., PyTorch Distributed, VLDB 2020, section 3.2.

Proved by: tests/parallel/test_data_parallel.py, tests/parallel/test_gradients.py, tests/misuse/test_misuse.py
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minidist.core.autograd import BackwardObserver, BackwardPass, Parameter, backward_hooks, current_pass
from minidist.core.base import hooks
from minidist.core.base.arrays import Array
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce, broadcast
from minidist.core.comm import Comm
from minidist.core.nn import FlatParameters, Module

BUCKET_MEGABYTES = 25.0  # PyTorch's default


def operation_of(reduction: str) -> str:
    """Return the operation of a collective, "avg" or "sum", for a wrapper's `reduction`, "mean" or "sum"."""
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction={hooks.quoted(reduction)}; it must be 'mean' or 'sum'")
    return "avg" if reduction == "mean" else "sum"


@dataclass(frozen=True)
class Bucket:
    """A slice of the flat gradient that is reduced as one message."""

    index: int
    slice: slice
    parameters: tuple[Parameter, ...]
    flat: FlatParameters
    guard: Any = field(compare=False)

    @property
    def buffer(self) -> Array:
        """The gradients, 1-D, as a view."""
        return self.flat.grad_buffer[self.slice]

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.slice.stop - self.slice.start)


def make_buckets(flat: FlatParameters, cap_bytes: float, guard: Any = hooks.NOTHING) -> list[Bucket]:
    """Cut the trainable parameters, from the end, into buckets of at most `cap_bytes` (a larger parameter is alone)."""
    if not isinstance(flat, FlatParameters):
        hooks.wrong_arguments().refuse_parts("make_buckets", flat)
    groups: list[list[Parameter]] = []
    filled, previous = 0, -1
    for index in range(len(flat.parameters) - 1, -1, -1):
        parameter = flat.parameters[index]
        if not parameter.requires_grad:
            continue
        nbytes = parameter.size * flat.dtype.itemsize
        # Start a bucket when the last one is full, or a frozen parameter lies in between: it is one contiguous slice.
        if not groups or filled + nbytes > cap_bytes or previous != index + 1:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled, previous = filled + nbytes, index

    # Within a group the parameters run backward, so the last one has the slice's start and the first one its stop. The
    # padding of shards travels with the last parameter; behind a frozen one it has no bucket, and stays zero.
    buckets = []
    for i, group in enumerate(groups):
        start, stop = flat.slice_of(group[-1]).start, flat.slice_of(group[0]).stop
        whole = slice(start, flat.padded_numel if stop == flat.numel else stop)
        buckets.append(Bucket(i, whole, tuple(group), flat, guard))
    return buckets


class GradientReducer(BackwardObserver):
    """Sums ("sum") or averages ("avg") the gradients of one FlatParameters over `comm` while backward runs.

    `observe` makes plain `loss.backward()` do all of it. Without it, call `ready` for each parameter and then `finish`.
    algorithm: of the all-reduce; "ordered" gives bits that do not depend on the buckets, "ring" is faster.
    bucket_cap_mb: size limit of a bucket in megabytes (1e6 B). A rank sends 2 (n-1)/n of each bucket, in 2 (n-1)
    messages, under purpose `gradient_reduce`.
    """

    operation = "all_reduce"  # whose algorithm it is
    unused = "error"  # what a parameter without a gradient is; see `minidist.parallel.unused`

    def __init__(
        self,
        flat: FlatParameters,
        comm: Comm,
        *,
        op: str = "sum",
        algorithm: str = "ring",
        bucket_cap_mb: float = BUCKET_MEGABYTES,
        guard: Any = None,
    ) -> None:
        hooks.check_reducer(self.operation, comm, algorithm, bucket_cap_mb)
        self.flat, self.comm, self.op, self.algorithm = flat, comm, op, algorithm
        self.node_done = comm.world.progress  # type: ignore[method-assign]  # advances buckets in flight

        # The plan of the messages, which is the same on every rank.
        self.guard = hooks.guard(op, comm) if guard is None else guard
        self.buckets = make_buckets(flat, bucket_cap_mb * 1e6, self.guard)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}

        # The progress of the running pass.
        self.missing = [set[Parameter]() for _ in self.buckets]  # parameters that are not ready yet
        self._begin_anew()
        self.synchronizing = True  # False while gradients stay local: of micro-batches before a step's last one
        self.graph_synchronizes: bool | None = None  # of the running pass; where it is known, it takes precedence
        self.manually = False  # does the caller call `ready` and `finish`, after any number of passes?

    def _begin_anew(self) -> None:
        """Begin a pass: no parameter is ready, no bucket launched."""
        for missing, bucket in zip(self.missing, self.buckets, strict=True):
            missing.update(bucket.parameters)
        self.works: list[Any] = []  # of the buckets launched so far
        self._taking_part = False  # did a parameter get ready in the running pass?

    def observe(self) -> None:
        """Take part in every backward pass that reaches these parameters."""
        # Frozen parameters are observed, too: when one is unfrozen later, `ready` refuses it.
        for parameter in self.flat.parameters:
            parameter.observers.append(self)

    def started(self) -> None:
        """Forget the state of an earlier pass, which an error may have ended; check what this one goes through."""
        self.graph_synchronizes = None
        if self.manually:
            return
        if self._taking_part:
            for work in filter(None, self.works):
                work.wait()
            self._begin_anew()
        running = current_pass()
        if running is not None:
            self.guard.backward_begins(running, again=self.flat.unsynchronized)

    def graph_begins(self, synchronize: bool, running: BackwardPass) -> None:
        """Note whether this graph of the pass synchronizes; one that does wins over one that does not."""
        # Join the pass first: `started` forgets what the pass before said.
        running.attach(self)
        self.graph_synchronizes = synchronize or bool(self.graph_synchronizes)

    def parameter_ready(self, parameter: Parameter) -> None:
        """[1] Call `ready`, unless the gradients of this pass stay local."""
        if self.synchronizing if self.graph_synchronizes is None else self.graph_synchronizes:
            self._taking_part = True
            self.ready(parameter)
        elif not self.manually:
            self.flat.unsynchronized = True  # an optimizer refuses to step with it

    def ready(self, parameter: Parameter) -> None:
        """[1] Note that `parameter`'s gradient is complete on this rank; launch the buckets that this completes."""
        bucket = self.bucket_of.get(parameter)
        if bucket is None:
            self.guard.frozen(self.comm.rank, parameter)
            return
        self.missing[bucket.index].discard(parameter)

        # Buckets leave in index order on every rank, or one rank's bucket 0 would be added to another's bucket 1. A
        # complete one waits until those before it are complete.
        while len(self.works) < len(self.buckets) and not self.missing[len(self.works)]:
            self.launch(self.buckets[len(self.works)])

    def launch(self, bucket: Bucket) -> None:
        """[2] Start the sum of a bucket over all ranks, at the point of (virtual) time that backward has reached."""
        # Without this, the messages would depart before the gradients in them are computed.
        self.comm.advance_clock("backward")
        with purpose("gradient_reduce"):
            self.works.append(self.send(bucket))

    def send(self, bucket: Bucket) -> Any:
        """[2] Start the all-reduce of a bucket in the communicator's stream; return what has `wait`."""
        gradients, equal = bucket.flat.grad_buffer[bucket.slice], self.guard.of_bucket(bucket)
        return all_reduce(self.comm, gradients, self.op, algorithm=self.algorithm, async_op=True, equal=equal)

    def finish(self) -> None:
        """[3] Wait for every bucket, also where no parameter became ready."""
        self._taking_part = True
        self.finished()

    def finished(self) -> None:
        """[3] After a pass in which a parameter became ready, wait for every bucket.

        Each gradient then is the sum over all ranks, plus what earlier passes had summed. Raises UnusedParameterError
        when a parameter never became ready.
        """
        if not self._taking_part:
            return
        try:
            # The other ranks launch the buckets that never completed here, too, so each one must be sent.
            for bucket in self.buckets[len(self.works) :]:
                self.complete(bucket)
                self.launch(bucket)
            self.wait()
            self.flat.unsynchronized = False
        finally:
            self._begin_anew()
        if not self.manually:  # who calls `finish` does the rest, too
            self.guard.backward_ended()

    def complete(self, bucket: Bucket) -> None:
        """Refuse the parameters of a bucket that the loss did not use."""
        for parameter in bucket.parameters:
            if parameter in self.missing[bucket.index]:
                so = f"bucket {bucket.index} of {len(self.buckets)} was never sent"
                self.guard.unused(self.comm.rank, parameter, so)

    def wait(self) -> None:
        """Wait for every bucket that was launched, and record that the gradients are sums over ranks now."""
        for work in filter(None, self.works):
            work.wait()
        # The next pass adds to a separate local gradient, so that a sum over ranks is not summed over ranks again.
        for parameter in self.bucket_of:
            parameter.gradient.was_reduced()


class DistributedDataParallel(Module):
    """Wraps `module` so that a plain `loss.backward()` leaves the reduced gradient on every rank of `comm`.

    reduction: "mean" or "sum". bucket_cap_mb, algorithm: see `GradientReducer`. flat: the model's FlatParameters, when
    it has one already. At construction rank 0 sends its parameters to all ranks (purpose `startup`).
    `minidist.parallel.data_parallel` has a class with further options.
    """

    reducer_type = GradientReducer

    def __init__(
        self,
        module: Module,
        comm: Comm,
        *,
        reduction: str = "mean",
        bucket_cap_mb: float = BUCKET_MEGABYTES,
        algorithm: str = "ring",
        flat: FlatParameters | None = None,
    ) -> None:
        self.module, self.comm = module, comm

        # Equal replicas: the same model on every rank, with rank 0's values.
        self.flat = FlatParameters(module.parameters()) if flat is None else flat
        self.reduction, self.bucket_cap_mb, self.algorithm = reduction, bucket_cap_mb, algorithm
        guard = equal_replicas(self, "DistributedDataParallel", module)

        # Equal gradients: from here on, plain `loss.backward()` sums them over the ranks.
        self.reducer = self.reducer_type(
            self.flat, comm, op=guard.op, algorithm=algorithm, bucket_cap_mb=bucket_cap_mb, guard=guard
        )
        self.reducer.observe()
        guard.covers(module, self.flat.parameters)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the module's output for this rank's rows; its backward knows whether to sum over ranks."""
        self.reducer.guard.forward_begins(None)
        # Whether this graph synchronizes is decided by its forward, as in PyTorch: backward may run later.
        begins = partial(self.reducer.graph_begins, self.reducer.synchronizing)
        return backward_hooks(self.module(*arguments, **keywords), begins, "output of data parallelism")


def equal_replicas(wrapper: Any, name: str, module: Any) -> Any:
    """Give every rank the parameters of rank 0, and return the guard of a wrapper, called `name`, of `module`."""
    guard = hooks.guard(operation_of(wrapper.reduction), wrapper.comm)
    guard.wraps(name, module, wrapper.flat, wrapper, wrapper.comm)
    if wrapper.comm.size > 1:
        with purpose("startup"):
            broadcast(wrapper.comm, wrapper.flat.data)
    return guard
