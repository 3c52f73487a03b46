"""`--compression` with a parameter server: a worker compresses its gradient of each server's keys by itself.

    gradient of the keys + residual ──▶ compressed ──▶ the server adds what it stands for
            ▲                   │
            └───── residual ◀───┘            of this worker, for this server

Here a bucket is what one server holds. No ranks sum on the way, because workers have no common step: with powersgd a
worker sends the factors of its gradient, and goes on from its Q. In a checkpoint residuals are where those of
data parallelism are, so a job goes on from them with servers or without.

Proved by: tests/train/test_servers.py
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from minidist.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm
from minidist.techniques.compression.by_name import check_compression, make_compressor
from minidist.techniques.compression.elementwise import QSGD, Cast
from minidist.techniques.compression.power_sgd import PowerSGD


class CompressedPush:
    """How the gradient of one server's dense keys travels from a worker; for its compressor it is a bucket.

    shard: a `ServerShard`. rows: the dtype in which rows of sparse keys travel. wire: the elements and the dtype of
    each message.
    """

    def __init__(self, index: int, shard: Any, compressor: Any) -> None:
        self.shard, self.compressor = shard, compressor
        # What a compressor asks of a bucket, and of the flat gradient that it is a part of.
        self.size = self.numel = sum(shard.weights[key].size for key in shard.dense)
        self.parameters = [SimpleNamespace(name=key, shape=shard.shapes[key]) for key in shard.dense]
        self.index, self.flat, self.slice, self.dtype = index, self, slice(0, self.size), shard.flat.dtype
        self.data, self.buffer = shard.flat, shard.flat[:0]
        self.rows = compressor.dtype if isinstance(compressor, Cast) else self.dtype
        self.wire: list[tuple[int, Any]] = compressor.wire(self)

    def slice_of(self, parameter: Any) -> slice:
        """Return the place of a key, where all keys are dense."""
        start = self.shard.start[parameter.name]
        return slice(start, start + self.shard.weights[parameter.name].size)

    def encode(self, gradient: Array) -> list[Array]:
        """Return the messages of a push."""
        self.buffer = gradient
        return self.compressor.encode(self)  # type: ignore[no-any-return]

    def decode(self, parts: Sequence[Array]) -> Array:
        """Return the gradient that these messages stand for."""
        return self.compressor.decode(self, parts)  # type: ignore[no-any-return]


class PushCompression:
    """Makes and keeps what compresses a worker's pushes to all servers; one object per rank.

    text: the --compression. done: steps before a resume. residual: what the worker has not pushed yet, by key; queries:
    its Q of PowerSGD, by key.
    """

    def __init__(self, text: str, seed: int, done: int = 0) -> None:
        self.text, self.seed, self.done = text, seed, done
        self.residual: Mapping[str, Array] = {}
        self.queries: Mapping[str, Array] = {}
        self.pushes: list[CompressedPush] = []

    def __str__(self) -> str:
        return self.text

    @property
    def error_feedback(self) -> bool:
        """Whether workers have residuals."""
        return check_compression(self.text)[0] in ("topk", "sign", "powersgd")

    def make(self, index: int, shard: Any, comm: Comm) -> CompressedPush:
        """Return what compresses the pushes to server `index`. comm: all ranks; its rank is part of random draws."""
        compressor = make_compressor(self.text, comm, "sum", self.seed)
        if isinstance(compressor, QSGD):
            compressor.before = self.done
        if isinstance(compressor, PowerSGD):
            compressor.queries = {key: self.queries[key] for key in shard.dense if key in self.queries}
        push = CompressedPush(index, shard, compressor)
        if self.residual:
            push.compressor.load_residual([push], xp.concatenate([self.residual[key] for key in shard.dense]))
        self.pushes.append(push)
        return push

    def state(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the residual and the queries as they are now."""
        residual: dict[str, Array] = {}
        queries: dict[str, Array] = {}
        for push in self.pushes:
            if push.compressor.error_feedback:
                residual |= push.shard.views(push.compressor.residual([push]))
            queries |= getattr(push.compressor, "queries", {})
        return residual, queries
