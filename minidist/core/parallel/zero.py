"""ZeRO 1 and 2: data parallelism in which every rank keeps and steps 1/n of the optimizer (2: and of the gradient).

Data parallel ranks all hold the same optimizer state and all do the same update: n times the memory for one result.
Here the flat parameters are cut into n shards. A rank needs the summed gradient of its shard only, so the all-reduce
becomes its first half; the second half then sends *parameters*:

    [1] gradients     | 0 | 1 | 2 |   ── reduce-scatter ──▶   rank r: the sum of shard r    (n-1)/n of the gradient
    [2] optimizer     rank r steps shard r as an ordinary parameter, with 1/n of the state
    [3] parameters    | 0 | 1 | 2 |   ◀── all-gather ──────   rank r: its new shard r       (n-1)/n of the parameters

A shard begins at a multiple of `alignment` elements, and the padding is at the end and holds zeros. With 1,024, the
block of the gradient norm, no block crosses from one rank to another, and the norm has the same bits as on one device.

So stage 1 sends what data parallelism sends, and the padding. It keeps the whole gradient on each rank and reduces it
once per step. Stage 2 keeps only the gradient of the shard and reduces in every micro-batch, see `ShardReducer`.

Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020, section 5.

Proved by: tests/parallel/test_zero.py, tests/parallel/test_fully_shard.py
"""

from collections.abc import Iterable, Sequence
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.trace import purpose, track
from minidist.core.collectives import all_gather, reduce_scatter
from minidist.core.comm import Comm
from minidist.core.nn import FlatParameters, Module
from minidist.core.optim import NORM_BLOCK, FlatSlice, flat_slices
from minidist.core.parallel.data_parallel import Bucket, GradientReducer, equal_replicas

REDUCE_BUCKET_SIZE = 500_000_000  # elements; DeepSpeed's default


class Shard:
    """Elements [start, stop) of the parameters' flat array, `flat`: the part that rank `comm.rank` updates.

    data: the values, 1-D: a view of the whole flat array, or a separate array while the whole is released (ZeRO-3).
    grad: the gradient summed over ranks, or None before the first one since `zero_grad`.
    """

    def __init__(self, parameters: Iterable[Parameter], comm: Comm, alignment: int = NORM_BLOCK) -> None:
        hooks.check_whole("alignment", alignment, 1)
        self.flat, self.alignment = FlatParameters(parameters, pad_to=comm.size * alignment), alignment
        self.comm, self.size = comm, self.flat.padded_numel // comm.size
        self.start, self.stop = comm.rank * self.size, (comm.rank + 1) * self.size
        self.own: xp.Array | None = None  # the values, when they are not a view of the whole
        self._grad: xp.Array | None = None
        self.filled = False  # does _grad hold sums of this step?
        self.used: set[Parameter] | None = None  # whose gradient some rank has computed; None: all
        self.flat.shard = self

    def detach(self) -> None:
        """Keep the values in a separate array, so that the whole can be released."""
        self.own = track(xp.array(self.flat.data[self.start : self.stop]), "parameter")

    @property
    def dtype(self) -> Any:
        """The dtype of values and summed gradient; the whole unit may have another one."""
        return self.flat.dtype if self.own is None else self.own.dtype

    @property
    def data(self) -> xp.Array:
        """The values of this rank's elements; an update changes them in place."""
        return self.flat.data[self.start : self.stop] if self.own is None else self.own

    @property
    def grad(self) -> xp.Array | None:
        """The summed gradient of this rank's elements; frozen parameters and padding read as zeros."""
        return self._grad if self.filled else None

    def zero_grad(self) -> None:
        """Forget the gradient; the next one overwrites it."""
        self.filled, self.used = False, None

    def have_grad(self, parameters: Sequence[Parameter]) -> list[bool]:
        """Return those of these parameters whose gradient some rank has computed since `zero_grad`."""
        return [self.filled and (self.used is None or parameter in self.used) for parameter in parameters]

    def forget(self, parameter: Parameter) -> None:
        """Forget one parameter's elements of the gradient."""
        if self.filled:
            self.grad_buffer()[self.place(self.flat.slice_of(parameter))] = 0

    def updated(self, by: Any = None) -> None:
        """An optimizer's step changed the values."""
        self.flat.updated(by)

    def place(self, piece: slice) -> slice:
        """Return where elements `piece` of the unit lie in this shard; the slice may be empty."""
        # Both ends are clamped to [self.start, self.stop], then counted from the shard's start.
        start = min(max(piece.start, self.start), self.stop)
        return slice(start - self.start, max(start, min(piece.stop, self.stop)) - self.start)

    def counts(self, piece: slice) -> list[int]:
        """Return how many of the elements `piece` each rank owns: a piece that crosses a boundary has two owners."""
        ranks = range(self.comm.size)
        return [max(0, min(piece.stop, (r + 1) * self.size) - max(piece.start, r * self.size)) for r in ranks]

    def grad_buffer(self) -> xp.Array:
        """Return the array of the shard's gradient; at first it holds zeros."""
        if self._grad is None:
            self._grad = track(xp.zeros(self.size, self.dtype, self.data), "gradient")
        return self._grad

    def destination(self, place: slice = slice(None)) -> xp.Array:
        """Return the array for a sum of these elements: the gradient itself, or a new one where it has earlier sums."""
        out = self.grad_buffer()[place]
        return track(xp.empty_like(out), "communication") if self.filled else out

    def slices(self) -> list[FlatSlice]:
        """Return this rank's trainable elements, one slice per parameter, for an optimizer."""
        # A rank that owns none gets an empty slice: its optimizer steps, and says `updated()`, as on every other rank.
        slices = flat_slices(self.flat, self.start, self.stop, source=self)
        return slices or [FlatSlice(self, 0, 0, p.name, p) for p in self.flat.parameters if p.requires_grad][:1]


class ShardReducer(GradientReducer):
    """[1] A GradientReducer whose buckets are reduce-scattered to the owners of their elements.

    keep_whole: one gradient array for all parameters (stage 1). Otherwise each bucket has a separate array, made by
    its first contribution and dropped when its sum is on the way; at most one bucket travels while the next one fills.
    """

    operation = "reduce_scatter"

    def __init__(self, shard: Shard, algorithm: str, bucket_size: int, *, keep_whole: bool, guard: Any) -> None:
        flat, cap = shard.flat, bucket_size * shard.flat.dtype.itemsize / 1e6
        super().__init__(flat, shard.comm, op=guard.op, algorithm=algorithm, bucket_cap_mb=cap, guard=guard)
        self.shard, self.keep_whole = shard, keep_whole
        self.arrays: dict[int, xp.Array] = {}
        if not keep_whole:
            flat.make_grad_of = self._make_bucket  # type: ignore[assignment, method-assign]

    def forget(self, bucket: Bucket) -> None:
        """Mark the bucket's local gradients as empty (stage 1), or drop the parameters' views of it (stage 2)."""
        for parameter in bucket.parameters:
            if self.keep_whole:
                parameter.gradient.clear()
            else:
                parameter.gradient.release()

    def _make_bucket(self, parameter: Parameter) -> None:
        """Allocate the gradients of the bucket that `parameter` belongs to."""
        bucket = self.bucket_of[parameter]
        array = self.arrays[bucket.index] = track(xp.empty(bucket.size, self.flat.dtype, self.flat.data), "gradient")

        # The parameters' gradients are views of this array; a bucket names them from the last to the first.
        used = 0
        for p in bucket.parameters[::-1]:
            p.gradient.buffer = array[used : used + p.size].reshape(p.shape)
            used += p.size

        # The rest is padding, which must not send garbage.
        array[used:] = 0

    def send(self, bucket: Bucket) -> Any:
        """Start to send each rank the sum of its part of the bucket, and forget the bucket's own gradients."""
        # Stage 2: wait for the bucket before, so that one travels while one fills, and no more.
        if not self.keep_whole:
            self.collect()
        array = bucket.buffer if self.keep_whole else self.arrays.pop(bucket.index)

        # A bucket that crosses a boundary has several owners: `counts`. `collect` adds a sum to earlier ones.
        out = self.shard.destination(self.shard.place(bucket.slice))
        work = self.scatter(bucket, array, self.shard.counts(bucket.slice), out)
        self.forget(bucket)
        return work

    def scatter(self, bucket: Bucket, array: xp.Array, counts: list[int], out: xp.Array) -> Any:
        """Start the reduce-scatter of a bucket's gradients; counts: how many elements each rank owns."""
        return reduce_scatter(
            self.comm,
            array,
            self.op,
            counts=counts,
            out=out,
            algorithm=self.algorithm,
            async_op=True,
            equal=self.guard.of_bucket(bucket),
        )

    def collect(self) -> None:
        """Wait for the buckets that were launched, and add their sums to those of earlier micro-batches."""
        for i, work in enumerate(self.works):
            self.works[i] = None  # so that its arrays are freed
            if work is not None:
                piece = work.wait()
                if self.shard.filled:
                    self.shard.grad_buffer()[self.shard.place(self.buckets[i].slice)] += piece

    def wait(self) -> None:
        """Wait for all buckets: the shard holds the sum over ranks, and over micro-batches since `zero_grad`."""
        self.collect()
        self.shard.filled = True


class ZeroOptimizer:
    """Wraps an optimizer class so that each rank of `comm` holds the state, and steps the elements, of one shard.

        zero = ZeroOptimizer(model.parameters(), AdamW, comm=comm, stage=2, lr=3e-3)
        model(batch).backward()      # gradients are reduced to their owners while this runs
        zero.step()                  # each rank steps its shard, then the parameters are gathered

    stage: 1 or 2. reduce_bucket_size: the largest number of elements of a gradient bucket. reduction, algorithm: as for
    `DistributedDataParallel`. module: what has the parameters, if it is known. defaults: arguments of
    `optimizer_class`, but for alignment=1024: shards begin at multiples of it. `minidist.parallel.zero` has a class
    with further options.

    A rank sends, with Psi padded elements and k micro-batches, (n-1)/n of: stage 1 Psi, stage 2 k Psi (purpose
    `gradient_reduce`), and Psi (purpose `parameter_gather`); at construction also rank 0 its parameters (`startup`).
    """

    reducer_type = ShardReducer

    def __init__(
        self,
        parameters: Iterable[Parameter],
        optimizer_class: Any,
        *,
        comm: Comm,
        stage: int = 1,
        reduce_bucket_size: int = REDUCE_BUCKET_SIZE,
        reduction: str = "mean",
        algorithm: str = "ring",
        module: Module | None = None,
        **defaults: Any,
    ) -> None:
        # Equal replicas, in a flat array with the padding that equal shards need.
        self.comm, self.stage, alignment = comm, stage, defaults.pop("alignment", NORM_BLOCK)
        self.shard = Shard(parameters, comm, alignment)
        self.flat, self.reduction, self.algorithm = self.shard.flat, reduction, algorithm
        self.reduce_bucket_size, self.alignment = reduce_bucket_size, alignment
        guard = equal_replicas(self, "ZeroOptimizer", module)

        # Each rank's optimizer sees its own shard only, so it allocates 1/n of the state.
        self.optimizer = optimizer_class(self.shard.slices(), **defaults)

        # Gradients are reduced to the owners of the shards during every backward pass.
        self.reducer = self.reducer_type(self.shard, algorithm, reduce_bucket_size, keep_whole=stage == 1, guard=guard)
        self.reducer.observe()
        guard.covers(module, self.flat.parameters)

    def zero_grad(self) -> None:
        """Forget local and reduced gradients."""
        self.flat.zero_grad()

    def step(self) -> None:
        """Step this rank's shard, then gather the parameters: (n-1)/n of them leave each rank."""
        # [2] Update this rank's elements.
        self.optimizer.step()

        # [3] Send them to all. Without a gradient since zero_grad nothing has changed, on any rank.
        if self.shard.filled:
            self.gather()

    def gather(self) -> None:
        """Gather every shard on every rank, in place."""
        with purpose("parameter_gather"):
            equal = self.reducer.guard.of_weights(self.flat)
            all_gather(self.comm, self.shard.data, out=self.flat.data, equal=equal)
