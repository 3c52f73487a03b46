"""The worker: computes the gradient of its clock, pushes it to every server, and pulls the weights of its next clock.

    [1] compute (w, c) ──▶ [2] post the receives of the pull ──▶ [3] push to all servers ──▶ [4] wait for their weights

The receives come first, so that no server's weights wait for a worker that is itself waiting for another server.

Proved by: tests/parallel/test_parameter_server.py
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import new_purpose, purpose, track
from minidist.core.comm import Comm
from minidist.techniques.parameter_server.server_shards import Rows, ServerShard, Weights

new_purpose("parameter_push")
new_purpose("parameter_pull")

Gradient = Callable[[int, int, Weights], Mapping[str, Any]]  # (worker, clock, weights) -> {key: array or Rows}


def work(
    comm: Comm,
    shards: Sequence[ServerShard],
    gradient: Gradient,
    steps: int | Callable[[Comm, int], bool],
    seconds: Callable[[int, int], float],
) -> int:
    """Work until the last push and return the number of pushes.

    shards: of all servers, in order; the pulled weights are put into them. steps: the number of pushes, or a function
    (comm, clock) -> "is this push the last one?". seconds(worker, clock): virtual time of a gradient.
    """
    worker, clock = comm.rank - len(shards), 0
    weights: Weights = {key: value for shard in shards for key, value in shard.weights.items()}
    while True:
        # [1] Compute with the weights of the last pull, whatever the servers have made of them since.
        contributions = gradient(worker, clock, weights)
        comm.compute(seconds=seconds(worker, clock), name="gradient")
        last = clock + 1 >= steps if isinstance(steps, int) else steps(comm, clock)

        # [2] The receives of the pull come first: see above. After the last push there is none.
        pulls = []
        if not last:
            with purpose("parameter_pull"):
                pulls = [comm.irecv(shard.flat, server) for server, shard in enumerate(shards)]

        # [3] The same clock to every server, each with the gradients of its keys.
        with purpose("parameter_push"):
            who = f"worker {worker}, clock {clock}"
            messages = [_messages(shard, contributions, [clock, int(last)], who) for shard in shards]
            comm.waitall([comm.isend(m, server) for server, parts in enumerate(messages) for m in parts])

        # [4] This is where a worker waits that has run too far ahead.
        comm.waitall(pulls)
        clock += 1
        if last:
            return clock


def _messages(shard: ServerShard, contributions: Mapping[str, Any], head: list[int], who: str) -> list[Array]:
    """Return the messages of a push to one server: a head that says what follows, dense keys, sparse rows.

    head: clock, and whether the push is the last one.
    """
    for key in (*shard.dense, *shard.sparse):
        if key not in contributions:
            raise UsageError(f"{who}: no gradient of {key!r}; the function must return one for each key")

    # The head is sent even when nothing follows: the server counts pushes.
    rows = [_rows(contributions[key], shard.shapes[key], key, who) for key in shard.sparse]
    parts = [xp.array([*head, *(r.ids.size for r in rows)], xp.int64)]

    # All dense keys together.
    if shard.dense:
        for key in shard.dense:
            shape = getattr(contributions[key], "shape", "none, being no array,")
            if shape != shard.shapes[key]:
                raise UsageError(f"{who}: the gradient of {key!r} has shape {shape}, its weight {shard.shapes[key]}")
        dense = xp.concatenate([contributions[key].reshape(-1) for key in shard.dense])
        dense = xp.as_array(dense, shard.flat.dtype)
        messages = [dense] if shard.push is None else shard.push.encode(dense)
        parts += [track(message, "communication") for message in messages]

    # Per sparse key, the row numbers and the rows, if there are any.
    for r in rows:
        if r.ids.size:
            parts += [xp.as_array(r.ids, xp.int64), xp.downcast(xp.array(r.values, shard.flat.dtype), shard.rows)]
    return parts


def _rows(value: Any, shape: tuple[int, ...], key: str, who: str) -> Rows:
    """Return `value`, the sparse gradient of `key`, after checking its types, shapes and row numbers."""
    if not isinstance(value, Rows):
        raise UsageError(f"{who}: the gradient of the sparse key {key!r} must be Rows(ids, values)")
    if (
        not (hasattr(value.ids, "dtype") and hasattr(value.values, "dtype"))
        or value.ids.dtype.kind not in "iu"
        or value.ids.ndim != 1
    ):
        raise UsageError(f"{who}: Rows of {key!r} need a 1-D array of integer ids and an array of values")
    if value.values.shape != (value.ids.size, shape[1]) or (
        value.ids.size and not 0 <= value.ids.min() <= value.ids.max() < shape[0]
    ):
        raise UsageError(
            f"{who}: rows {value.ids.tolist()} with values of shape {value.values.shape} for"
            f" {key!r} of shape {shape}; each id must be in 0..{shape[0] - 1} and have one row"
        )
    return value
