"""Communication hooks: what reduces a bucket of gradients in place of the wrapper's own collective.

    ddp.register_comm_hook(state, hook)      hook(state, bucket) starts a reduction and returns its Work

With ZeRO 1 and 2 the hook sums the whole bucket on every rank, which keeps the part of its shard. So gradients are sent
as in data parallelism, with stage 2 in every micro-batch. A compressor's residual has the size of all gradients, on
every rank and with stage 2, too.

Proved by: tests/parallel/test_data_parallel.py, tests/techniques/test_compression.py
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.parallel.data_parallel import Bucket, GradientReducer
from minidist.core.parallel.zero import ShardReducer


@dataclass(frozen=True)
class Then:
    """A reduction, and the function of its result that whoever waits for it gets."""

    work: Any
    function: Callable[[Any], Any]

    def wait(self) -> Any:
        """Wait for the reduction; return function(its result)."""
        return self.function(self.work.wait())


@dataclass(frozen=True)
class ArrayBucket(Bucket):
    """A bucket whose gradients are in `array`, where there is no flat one."""

    array: xp.Array

    @property
    def buffer(self) -> xp.Array:
        """The gradients, 1-D."""
        return self.array


def register_comm_hook(reducer: GradientReducer, state: Any, hook: Callable[[Any, Bucket], Any]) -> None:
    """Replace the reduction of each bucket by `hook(state, bucket)`; after its wait `bucket.buffer` has the sum.

    Each rank calls it once per bucket, in index order. state: such as a `Compressor`, whose `op` must be the wrapper's
    reduction; UsageError otherwise.
    """
    if isinstance(reducer, ShardReducer):
        _without_padding(reducer)
        reducer.send = partial(_sum_whole, reducer, partial(hook, state))  # type: ignore[method-assign]
        return
    op, own = getattr(state, "op", None), "mean" if reducer.op == "avg" else "sum"
    if op in ("mean", "sum") and op != own:
        raise UsageError(
            f"rank {reducer.comm.rank}: this DistributedDataParallel has reduction={own!r}, and the hook's state"
            f" op={op!r}, so the gradient would be scaled wrongly by {reducer.comm.size}; make it with op={own!r}"
        )
    reducer.send = partial(hook, state)  # type: ignore[method-assign]


def _without_padding(reducer: ShardReducer) -> None:
    """Cut the padding off, which is not a part of any gradient: a hook sees what it would see without shards."""
    for i, bucket in enumerate(reducer.buckets):
        end = min(bucket.slice.stop, reducer.flat.numel)
        reducer.buckets[i] = replace(bucket, slice=slice(bucket.slice.start, end))
        reducer.bucket_of.update(dict.fromkeys(bucket.parameters, reducer.buckets[i]))


def _sum_whole(reducer: ShardReducer, start: Callable[[Bucket], Any], bucket: Bucket) -> Then:
    """Start the sum of a bucket on every rank, and forget the bucket's own gradients."""
    # Stage 2: wait for the bucket before, and hand the hook the array of this one, which no other bucket shares.
    if not reducer.keep_whole:
        reducer.collect()
        bucket = ArrayBucket(**vars(bucket), array=reducer.arrays.pop(bucket.index))
    work = Then(start(bucket), lambda _: _part_of(reducer, bucket))
    reducer.forget(bucket)
    return work


def _part_of(reducer: ShardReducer, bucket: Bucket) -> xp.Array:
    """Return what belongs to this rank's shard of a bucket whose sum is there."""
    shard, piece = reducer.shard, bucket.slice
    mine = shard.grad_buffer()[shard.place(piece)]
    first = max(shard.start - piece.start, 0)
    part = bucket.buffer[first : first + mine.size]
    # The first reduction since zero_grad fills the shard; a later one is added by `collect`.
    if not shard.filled:
        mine[...] = part
    return part
