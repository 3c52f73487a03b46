"""Collectives: each is one call of ours, made of messages, whether the program waits for it or not.

    Gather(send, recv, root)   ──▶  plan: the buffers, what every rank must pass equal, and what to run
                                    Gather        runs it now
                                    Igather       runs it on the communicator's stream
                                    Gather_init   runs it at every Start

The plan reads the program's arguments when the program calls; its `run(call)` sends all messages with the number of the
call, so that unlike calls are named.

Proved by: tests/mpi_ranks/test_collectives.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from threading import Lock
from typing import Any

import numpy as np

from minidist import collectives
from minidist.base.arrays import dtype_name
from minidist.comm.communicator import recv_object, send_object
from minidist.core.base.errors import MismatchError
from minidist.core.comm.communicator import PointToPoint
from minidist.debug.mpi_ranks.buffers import UNSAID, Buffer, as_many, each, one, vector
from minidist.debug.mpi_ranks.communicator import Comm
from minidist.debug.mpi_ranks.constants import failed
from minidist.debug.mpi_ranks.objects import pickle
from minidist.debug.mpi_ranks.op import OPS, Op, as_op
from minidist.debug.mpi_ranks.request import Pending, Prequest, Request

SUM = OPS["SUM"]


@dataclass(frozen=True)
class Plan:
    """A collective call of a rank. run: sends its messages and writes its result, which it returns.

    root, op: what every rank must pass equal, in addition to the operation. buffers: what it reads and writes, one of
    them twice in place, None where the rank has no such buffer.
    """

    run: Callable[[PointToPoint], Any]
    root: int | None = None
    op: str = ""
    buffers: Sequence[Buffer | None] = ()

    def views(self) -> list[np.ndarray]:
        """Return the program's memory that the call uses."""
        return [buffer.get() for buffer in dict.fromkeys(self.buffers) if buffer and buffer.is_view and buffer.count]


def collective(cls: type[Comm], name: str) -> Callable[[Callable[..., Plan]], Callable[..., Plan]]:
    """Give a class an operation in its three forms, such as Gather, Igather and Gather_init."""

    def install(plan: Callable[..., Plan]) -> Callable[..., Plan]:
        def call_of(comm: Comm, planned: Plan) -> PointToPoint:
            if name[0].islower():
                comm.context.locks.setdefault(name, Lock())
            operation = f"{name} {planned.op}" if planned.op else name
            return comm.context.comm.collective(operation, root=planned.root)

        def start(comm: Comm, arguments: Any, keywords: Any) -> Pending:
            planned = plan(comm, *arguments, **keywords)
            call = call_of(comm, planned)
            return Pending(comm.context.world, [call.run_async(partial(planned.run, call), planned.views())])

        @wraps(plan)
        def blocking(self: Comm, *arguments: Any, **keywords: Any) -> Any:
            planned = plan(self, *arguments, **keywords)
            return planned.run(call_of(self, planned))

        @wraps(plan)
        def immediate(self: Comm, *arguments: Any, **keywords: Any) -> Request:
            return Request.of(start(self, arguments, keywords))

        @wraps(plan)
        def init(self: Comm, *arguments: Any, info: Any = None, **keywords: Any) -> Prequest:
            plan(self, *arguments, **keywords)  # what is wrong is said now
            return self.persistent(lambda: start(self, arguments, keywords))

        forms: dict[str, Any] = {name: blocking}
        if name[0].isupper():
            forms |= {f"I{name[0].lower()}{name[1:]}": immediate, f"{name}_init": init}
        for form, function in forms.items():
            function.__name__ = function.__qualname__ = form
            setattr(cls, form, function)
        return plan

    return install


on_comm = partial(collective, Comm)


# buffers --------------------------------------------------------------------------------------------------------------


def in_place(message: Any) -> bool:
    """Return whether a rank's data lies in its other buffer: MPI.IN_PLACE, or None."""
    return any(message is value for value in UNSAID)


def root_of(comm: Comm, root: int) -> tuple[bool, int]:
    """Return whether this rank is the root, and the number of ranks; MPI.Exception for a root that is not a rank."""
    if not 0 <= root < comm.Get_size():
        raise failed("ERR_ROOT", f"rank {comm.Get_rank()}: root {root}; ranks are 0..{comm.Get_size() - 1}")
    return comm.Get_rank() == root, comm.Get_size()


def checked(comm: Comm, sent: Buffer, received: Buffer, size: int, room: int) -> None:
    """Raise MismatchError when a rank sends itself other elements than it receives. size, room: how many of each."""
    a, b = sent.layout.element, received.layout.element
    if a != b and np.uint8 not in (a, b):
        raise MismatchError(
            f"dtype mismatch: rank {comm.Get_rank()} sends {dtype_name(a)} and receives {dtype_name(b)} in one"
            " collective; give both buffers the same dtype"
        )
    if size * a.itemsize != room * b.itemsize:
        raise MismatchError(
            f"rank {comm.Get_rank()} sends {size} elements as its own part, and its receive buffer has room for {room}"
            f" of them; a buffer for the parts of all ranks has {comm.Get_size()} parts, equal ones unless counts are"
            " given"
        )


def fitting(array: np.ndarray, buffer: Buffer) -> np.ndarray:
    """Return an array in the dtype of a buffer, where one of both is of bytes."""
    return array.view(buffer.layout.element) if array.dtype != buffer.layout.element else array


@on_comm("barrier")
@on_comm("Barrier")
def barrier(self: Comm) -> Plan:
    """Return when every rank has entered."""
    return Plan(lambda call: call.barrier())


@on_comm("Bcast")
def bcast(self: Comm, buf: Any, root: int = 0) -> Plan:
    """Give every rank the root's buffer."""
    is_root, _ = root_of(self, root)
    buffer = one(buf, not is_root, root)

    def run(call: PointToPoint) -> None:
        array = buffer.get()
        collectives.broadcast(call, array, root)
        if not is_root and not buffer.is_view:
            buffer.put(array)

    return Plan(run, root, buffers=(buffer,))


# Of operations whose parts are equal, and of those whose parts have different sizes.
PARSERS: dict[str, Callable[..., Buffer]] = {
    "": lambda message, writable, n: one(message, writable, blocks=n),
    "v": vector,
}


def gather(self: Comm, sendbuf: Any, recvbuf: Any, root: int = 0, *, parse: Callable[..., Buffer]) -> Plan:
    """Give the root the buffers of all ranks."""
    is_root, n = root_of(self, root)
    target = parse(recvbuf, True, n) if is_root else None
    source = None if is_root and in_place(sendbuf) else one(sendbuf, False)

    def run(call: PointToPoint) -> None:
        if target is None:
            assert source is not None
            collectives.gather(call, source.get(), root)
            return
        mine = target.blocks()[root].get().copy() if source is None else fitting(source.get(), target)
        target.put(collectives.gather(call, mine, root, counts=target.sizes))

    if source is not None and target is not None:
        checked(self, source, target, sum(source.sizes), target.sizes[root])
    return Plan(run, root, buffers=(source, target))


def scatter(self: Comm, sendbuf: Any, recvbuf: Any, root: int = 0, *, parse: Callable[..., Buffer]) -> Plan:
    """Give every rank its part of the root's buffer."""
    is_root, n = root_of(self, root)
    source = parse(sendbuf, False, n) if is_root else None
    target = None if is_root and in_place(recvbuf) else one(recvbuf, True)

    def run(call: PointToPoint) -> None:
        if target is None:
            assert source is not None
            nowhere = np.empty(source.sizes[root], source.layout.element)
            collectives.scatter(call, source.get(), nowhere, root, counts=source.sizes)
            return
        array = None if source is None else fitting(source.get(), target)
        out = np.empty(sum(target.sizes), target.layout.element)
        target.put(collectives.scatter(call, array, out, root, counts=source.sizes if source else None))

    if source is not None and target is not None:
        checked(self, source, target, source.sizes[root], sum(target.sizes))
    return Plan(run, root, buffers=(source, target))


def allgather(self: Comm, sendbuf: Any, recvbuf: Any, *, parse: Callable[..., Buffer]) -> Plan:
    """Give every rank the buffers of all ranks."""
    target = parse(recvbuf, True, self.Get_size())
    source = None if in_place(sendbuf) else one(sendbuf, False)
    rank = self.Get_rank()

    def run(call: PointToPoint) -> None:
        shard = target.blocks()[rank].get().copy() if source is None else fitting(source.get(), target)
        target.put(collectives.all_gather(call, shard, counts=target.sizes))

    if source is not None:
        checked(self, source, target, sum(source.sizes), target.sizes[rank])
    return Plan(run, buffers=(source, target))


def alltoall(self: Comm, sendbuf: Any, recvbuf: Any, *, parse: Callable[..., Buffer]) -> Plan:
    """Give rank r part r of every rank's buffer."""
    n = self.Get_size()
    target = parse(recvbuf, True, n)
    source = target if in_place(sendbuf) else parse(sendbuf, False, n)
    checked(self, source, target, source.sizes[self.Get_rank()], target.sizes[self.Get_rank()])

    def run(call: PointToPoint) -> None:
        array = fitting(source.get(), target)
        array = array.copy() if source is target else array
        target.put(collectives.all_to_all(call, array, send_counts=source.sizes, receive_counts=target.sizes))

    return Plan(run, buffers=(source, target))


for _letter, _parse in PARSERS.items():
    for _plan in (gather, scatter, allgather, alltoall):
        on_comm(f"{_plan.__name__.capitalize()}{_letter}")(partial(_plan, parse=_parse))


def bytes_of(buffers: Sequence[Buffer]) -> tuple[np.ndarray, list[int]]:
    """Return the data of several buffers as bytes, and the bytes of each."""
    arrays = [buffer.get().view(np.uint8) for buffer in buffers]
    return np.concatenate([np.empty(0, np.uint8), *arrays]), [array.size for array in arrays]


def put_bytes(data: np.ndarray, sizes: Sequence[int], buffers: Sequence[Buffer]) -> None:
    """Write the bytes of several buffers, one after the other."""
    for part, buffer in zip(np.split(data, np.cumsum(sizes)[:-1]), buffers, strict=True):
        buffer.put(part)


@on_comm("Alltoallw")
def alltoallw(self: Comm, sendbuf: Any, recvbuf: Any) -> Plan:
    """Give rank r part r of every rank's buffer; the parts have different datatypes."""
    n = self.Get_size()
    targets = each(recvbuf, True, n)
    sources = targets if in_place(sendbuf) else each(sendbuf, False, n)
    receives = [buffer.count * buffer.layout.size for buffer in targets]

    def run(call: PointToPoint) -> None:
        array, sizes = bytes_of(sources)
        put_bytes(collectives.all_to_all(call, array, send_counts=sizes, receive_counts=receives), receives, targets)

    return Plan(run)


# reductions -----------------------------------------------------------------------------------------------------------


def reduced(self: Comm, sent: Any, received: Any, needs_target: bool = True) -> tuple[Buffer, Buffer | None]:
    """Return the buffers of a reduction, which hold as many elements of one datatype."""
    target = one(received, True) if needs_target else None
    if in_place(sent) and target is not None:
        return target, target
    source = one(sent, False)
    if target is not None:
        if source.layout.element != target.layout.element:
            raise ValueError(
                f"mismatch in send and receive MPI datatypes: {source.datatype.Get_name()} and"
                f" {target.datatype.Get_name()}"
            )
        if source.count != target.count:
            raise ValueError(f"mismatch in send count {source.count} and receive count {target.count}")
    return source, target


def ours(op: Op, source: Buffer) -> str:
    """Return the name of our reduction for an operation on these elements; "" when there is none."""
    kind = source.layout.element.kind
    numbers = "iuf" if op.operation.name in ("MAX", "MIN") else "iufc"
    return op.operation.ours if kind in numbers and not source.layout.element.names else ""


@on_comm("Reduce")
def reduce(self: Comm, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Plan:
    """Give the root the reduction of all ranks' buffers."""
    is_root, n = root_of(self, root)
    op = as_op(op)
    source, target = reduced(self, sendbuf, recvbuf, is_root)

    def run(call: PointToPoint) -> None:
        array = source.get()
        if name := ours(op, source):
            result = collectives.reduce(call, array, root, name)
        else:
            result = collectives.gather(call, array, root, counts=[array.size] * n)
            result = op.fold(np.split(result, n), source) if is_root else None
        if target is not None:
            target.put(result)

    return Plan(run, root, op.operation.name, (source, target))


@on_comm("Allreduce")
def allreduce(self: Comm, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
    """Give every rank the reduction of all ranks' buffers."""
    op = as_op(op)
    source, target = reduced(self, sendbuf, recvbuf)
    assert target is not None
    n = self.Get_size()

    def run(call: PointToPoint) -> None:
        array = source.get().copy()
        if name := ours(op, source):
            target.put(collectives.all_reduce(call, array, name))
        else:
            target.put(op.fold(np.split(collectives.all_gather(call, array), n), source))

    return Plan(run, op=op.operation.name, buffers=(source, target))


def _reduce_scatter(self: Comm, source: Buffer, target: Buffer, counts: list[int], op: Op) -> Plan:
    """Return the plan of a reduction whose parts go to the ranks. counts: elements of each part."""
    n, rank, per = self.Get_size(), self.Get_rank(), len(source.layout.offsets)
    sizes = [count * per for count in counts]
    if sum(sizes) != sum(source.sizes):
        raise ValueError(f"mismatch in send count {source.count} and sum(counts) {sum(counts)}")

    def run(call: PointToPoint) -> None:
        array = source.get().copy()
        if name := ours(op, source):
            target.put(collectives.reduce_scatter(call, array, name, counts=sizes))
            return
        mine = collectives.all_to_all(call, array, send_counts=sizes, receive_counts=[sizes[rank]] * n)
        target.put(op.fold(np.split(mine, n), source))

    return Plan(run, op=op.operation.name, buffers=(source, target))


@on_comm("Reduce_scatter_block")
def reduce_scatter_block(self: Comm, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
    """Give every rank its part of the reduction; the parts are equal."""
    n, op = self.Get_size(), as_op(op)
    here = in_place(sendbuf)
    target = one(recvbuf, True, blocks=n if here else 1)
    source = target if here else one(sendbuf, False, blocks=n)
    if source.count != target.count * (1 if here else n):
        raise ValueError(f"mismatch in send count {source.count // n} and receive count {target.count}")
    return _reduce_scatter(self, source, target, [source.count // n] * n, op)


@on_comm("Reduce_scatter")
def reduce_scatter(self: Comm, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Op = SUM) -> Plan:
    """Give every rank its part of the reduction; the parts have different sizes."""
    target = one(recvbuf, True)
    source = target if in_place(sendbuf) else one(sendbuf, False)
    here = source is target or source.raw.ctypes.data == target.raw.ctypes.data
    if recvcounts is None:
        call = self.context.comm.collective("Reduce_scatter counts")
        recvcounts = collectives.all_gather(call, np.array([target.count], np.int64)).tolist()
    if len(recvcounts) != self.Get_size():
        raise ValueError(f"expecting {self.Get_size()} items, got {len(recvcounts)}")
    if not here and target.count != recvcounts[self.Get_rank()]:
        raise ValueError(f"mismatch in receive count {target.count} and counts {recvcounts[self.Get_rank()]}")
    return _reduce_scatter(self, source, target, [int(count) for count in recvcounts], as_op(op))


def scan(self: Comm, sendbuf: Any, recvbuf: Any, op: Op = SUM, *, inclusive: bool) -> Plan:
    """Give rank r the reduction of the ranks before it, with `inclusive` and its own: each passes its total on."""
    op = as_op(op)
    source, target = reduced(self, sendbuf, recvbuf)
    assert target is not None
    rank, n = self.Get_rank(), self.Get_size()

    def run(call: PointToPoint) -> None:
        mine = source.get().copy()
        total, before = mine, np.empty_like(mine)
        if rank:
            call.recv(before, rank - 1)
            total = op.combine(before, mine.copy(), source)
        if rank + 1 < n:
            call.send(np.ascontiguousarray(total), rank + 1)
        if inclusive:
            target.put(total)
        elif rank:
            target.put(before)

    return Plan(run, op=op.operation.name, buffers=(source, target))


# objects --------------------------------------------------------------------------------------------------------------


def to_bytes(value: Any) -> np.ndarray:
    """Return the bytes of an object."""
    return np.frombuffer(pickle.dumps(value), np.uint8)


def size_of(data: np.ndarray) -> np.ndarray:
    """Return the size of some bytes, as a message."""
    return np.array([data.size], np.int64)


def objects(data: np.ndarray, sizes: Sequence[int]) -> list[Any]:
    """Return the objects of bytes that lie one after the other."""
    return [pickle.loads(part) for part in np.split(data, np.cumsum(sizes)[:-1])]


@on_comm("bcast")
def bcast_object(self: Comm, obj: Any, root: int = 0) -> Plan:
    """Give every rank the root's object."""
    is_root, _ = root_of(self, root)

    def run(call: PointToPoint) -> Any:
        data = to_bytes(obj) if is_root else np.empty(0, np.uint8)
        size = collectives.broadcast(call, size_of(data), root)
        data = data if is_root else np.empty(int(size[0]), np.uint8)
        collectives.broadcast(call, data, root)
        return obj if is_root else pickle.loads(data)

    return Plan(run, root)


def gathered(call: PointToPoint, value: Any, root: int) -> list[Any] | None:
    """Return the objects of all ranks on the root, None elsewhere."""
    data = to_bytes(value)
    sizes = collectives.gather(call, size_of(data), root)
    whole = collectives.gather(call, data, root, counts=None if sizes is None else sizes.tolist())
    return None if whole is None else objects(whole, sizes.tolist())


def all_gathered(call: PointToPoint, value: Any) -> list[Any]:
    """Return the objects of all ranks."""
    data = to_bytes(value)
    sizes = collectives.all_gather(call, size_of(data)).tolist()
    return objects(collectives.all_gather(call, data, counts=sizes), sizes)


@on_comm("gather")
def gather_objects(self: Comm, sendobj: Any, root: int = 0) -> Plan:
    """Give the root a list of all ranks' objects."""
    root_of(self, root)
    return Plan(lambda call: gathered(call, sendobj, root), root)


@on_comm("scatter")
def scatter_objects(self: Comm, sendobj: Any, root: int = 0) -> Plan:
    """Give every rank its object of the root's list."""
    is_root, _ = root_of(self, root)
    values = as_many(sendobj, self.Get_size()) if is_root else []

    def run(call: PointToPoint) -> Any:
        parts = [to_bytes(value) for value in values]
        counts = [part.size for part in parts]
        size = collectives.scatter(call, np.array(counts, np.int64) if is_root else None, np.empty(1, np.int64), root)
        out = np.empty(int(size[0]), np.uint8)
        whole = np.concatenate(parts) if is_root else None
        return pickle.loads(collectives.scatter(call, whole, out, root, counts=counts if is_root else None))

    return Plan(run, root)


@on_comm("allgather")
def allgather_objects(self: Comm, sendobj: Any) -> Plan:
    """Give every rank a list of all ranks' objects."""
    return Plan(lambda call: all_gathered(call, sendobj))


@on_comm("alltoall")
def alltoall_objects(self: Comm, sendobj: Any) -> Plan:
    """Give rank r object r of every rank's list."""
    values = as_many(sendobj, self.Get_size())

    def run(call: PointToPoint) -> list[Any]:
        parts = [to_bytes(value) for value in values]
        sends = [part.size for part in parts]
        receives = collectives.all_to_all(call, np.array(sends, np.int64)).tolist()
        whole = collectives.all_to_all(call, np.concatenate(parts), send_counts=sends, receive_counts=receives)
        return objects(whole, receives)

    return Plan(run)


@on_comm("reduce")
def reduce_objects(self: Comm, sendobj: Any, op: Any = SUM, root: int = 0) -> Plan:
    """Give the root the reduction of all ranks' objects, in the order of the ranks."""
    op = as_op(op)
    root_of(self, root)

    def run(call: PointToPoint) -> Any:
        values = gathered(call, sendobj, root)
        return None if values is None else op.fold_objects(values)

    return Plan(run, root, op.operation.name)


@on_comm("allreduce")
def allreduce_objects(self: Comm, sendobj: Any, op: Any = SUM) -> Plan:
    """Give every rank the reduction of all ranks' objects, in the order of the ranks."""
    op = as_op(op)
    return Plan(lambda call: op.fold_objects(all_gathered(call, sendobj)), op=op.operation.name)


def scan_objects(self: Comm, sendobj: Any, op: Any = SUM, *, inclusive: bool) -> Plan:
    """Give rank r the reduction of the objects of the ranks before it, with `inclusive` and its own."""
    op = as_op(op)
    rank, n = self.Get_rank(), self.Get_size()

    def run(call: PointToPoint) -> Any:
        before = recv_object(call, rank - 1) if rank else None
        total = op(before, sendobj) if rank else sendobj
        if rank + 1 < n:
            send_object(call, total, rank + 1)
        return total if inclusive else before

    return Plan(run, op=op.operation.name)


for _inclusive, _name in ((True, "scan"), (False, "exscan")):
    on_comm(_name.capitalize())(partial(scan, inclusive=_inclusive))
    on_comm(_name)(partial(scan_objects, inclusive=_inclusive))
