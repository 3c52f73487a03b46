"""Communicators: messages between two ranks, and how communicators are made of others.

    comm.Send([array, MPI.DOUBLE], 1)  ──▶  Buffer.get()  ──▶  MPIMatching.post_user  ──▶  a message of SimWorld
    comm.send(object, 1)               ──▶  pickle        ──▶

Arguments that are wrong on one rank alone are MPI.Exception with MPI's error class, or what mpi4py raises for them.

Proved by: tests/mpi_ranks/test_program.py, tests/mpi_ranks/test_messages.py
"""

import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from threading import Lock
from typing import Any, ClassVar, Self

import numpy as np

from minidist.comm.call_site import CallSite, call_site
from minidist.comm.communicator import CheckedComm as Members
from minidist.comm.tags import LocatedRequest
from minidist.core import collectives
from minidist.debug.mpi_ranks.buffers import BUFFER_AUTOMATIC, Buffer, memory, one
from minidist.debug.mpi_ranks.constants import (
    ANY_SOURCE,
    ANY_TAG,
    CONGRUENT,
    ERR_LASTCODE,
    IDENT,
    KEYVALS,
    MORE_RANKS,
    PROC_NULL,
    SIMILAR,
    TAG_LIMIT,
    UNDEFINED,
    UNEQUAL,
    failed,
    refusing,
)
from minidist.debug.mpi_ranks.group import Group
from minidist.debug.mpi_ranks.group import Members as GroupMembers
from minidist.debug.mpi_ranks.handle import Handle, Named
from minidist.debug.mpi_ranks.objects import OBJECT, Errhandler, Info, pickle
from minidist.debug.mpi_ranks.request import NO_MESSAGE, NO_PROC, Held, Message, Pending, Prequest, Request, Status
from minidist.debug.mpi_ranks.world import MPIWorld

COMM_TYPE_SHARED, COMM_TYPE_HW_GUIDED = 1, 2
BSEND_OVERHEAD = 96
ATTRIBUTES = dict.fromkeys(KEYVALS.values()) | {
    KEYVALS["TAG_UB"]: TAG_LIMIT,
    KEYVALS["HOST"]: PROC_NULL,
    KEYVALS["IO"]: ANY_SOURCE,
    KEYVALS["WTIME_IS_GLOBAL"]: 0,
    KEYVALS["LASTUSEDCODE"]: ERR_LASTCODE,
}
IRECV_BYTES = 1 << 15  # that mpi4py's irecv has room for, when it is given no buffer


class Aborted(BaseException):
    """Raised by Abort. Not an Exception, so that no `except Exception` of the program catches it."""

    def __init__(self, rank: int, code: int, site: CallSite) -> None:
        super().__init__(f"rank {rank} called Abort({code}) at {site}")
        self.code = code


class Context:
    """What a communicator is, which several handles may name.

    comm: ours. world: it runs in. topology: of a communicator with one (`topology.py`).
    """

    def __init__(self, comm: Members, name: str = "", topology: Any = None) -> None:
        self.comm, self.name, self.topology = comm, name, topology
        world: Any = comm.world
        self.world: MPIWorld = world
        self.children = 0
        self.locks: dict[str, Lock] = {}  # for the threads of a program; here it has one
        self.buffer: Any = None  # for buffered sends, in addition to that of the rank
        self.of_groups: dict[str, int] = {}
        self.info, self.errhandler = Info.Create(), Errhandler.of("MPI_ERRORS_RETURN")


class Comm(Handle):
    """A communicator."""

    held: Context | None
    named = context = Named[Context](
        "ERR_COMM", "the communicator is COMM_NULL; this rank is no member of it, or has freed it"
    )

    # what it is -------------------------------------------------------------------------------------------------------

    def Get_rank(self) -> int:
        return self.context.comm.rank

    def Get_size(self) -> int:
        return self.context.comm.size

    def Get_group(self) -> Group:
        comm = self.context.comm
        return Group.of(GroupMembers(list(comm.members), comm.members[comm.rank]))

    def Get_name(self) -> str:
        return self.held.name if self.held else "MPI_COMM_NULL"

    def Set_name(self, name: str) -> None:
        """Set the name, which stands in the table of what was sent, too."""
        context = self.context
        context.name = context.world.names[context.comm.name] = name

    def Get_attr(self, keyval: int) -> Any:
        """Return one of MPI's own attributes; None for one that has no value, such as APPNUM."""
        if keyval not in ATTRIBUTES:
            raise failed("ERR_KEYVAL", f"key {keyval} is unknown; use one of {', '.join(KEYVALS)}")
        self.context  # noqa: B018
        return ATTRIBUTES[keyval]

    def Get_info(self) -> Info:
        """Return a copy of the hints."""
        return self.context.info.Dup()

    def Set_info(self, info: Info) -> None:
        """Set hints, which change nothing here."""
        self.context.info.update(info)

    def Get_errhandler(self) -> Errhandler:
        return Errhandler(self.context.errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the error handler; errors are raised, whichever it is."""
        errhandler.named  # noqa: B018
        self.context.errhandler = Errhandler(errhandler)

    def Call_errhandler(self, errorcode: int) -> None:
        """Call the program's error handler, where it has set one."""
        handler = self.context.errhandler.held
        if callable(handler):
            handler(self, errorcode)

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[..., None]) -> Errhandler:
        """Return the error handler of function(communicator, code), which Call_errhandler calls."""
        return Errhandler.of(errhandler_fn)

    def Compare(self, comm: "Comm") -> int:
        """Return IDENT, CONGRUENT (the same ranks), SIMILAR (in another order) or UNEQUAL."""
        if self.context is comm.context:
            return IDENT
        groups = self.Get_group().Compare(comm.Get_group())
        return {IDENT: CONGRUENT, SIMILAR: SIMILAR}.get(groups, UNEQUAL)

    def Is_inter(self) -> bool:
        """Return False: there are no intercommunicators."""
        self.context  # noqa: B018
        return False

    def Is_intra(self) -> bool:
        return not self.Is_inter()

    def Get_topology(self) -> int:
        """Return CART, GRAPH, DIST_GRAPH or UNDEFINED."""
        topology = self.context.topology
        return UNDEFINED if topology is None else topology.kind

    rank, size, group = property(Get_rank), property(Get_size), property(Get_group)
    name = property(Get_name, Set_name)
    info = property(Get_info, Set_info)
    is_inter, is_intra = property(Is_inter), property(Is_intra)
    topology = property(Get_topology)
    is_topo = property(lambda self: self.Get_topology() != UNDEFINED)

    # messages ---------------------------------------------------------------------------------------------------------

    def _peer(self, rank: int, tag: int, kind: str) -> Context:
        """Return the context, if rank and tag are of this communicator."""
        context = self.context
        rank, tag, anything = index(rank), index(tag), kind != "send"
        if not (0 <= rank < context.comm.size or rank == PROC_NULL or (anything and rank == ANY_SOURCE)):
            raise failed(
                "ERR_RANK", f"rank {context.comm.rank}: {kind} names rank {rank}; ranks are 0..{context.comm.size - 1}"
            )
        if not (0 <= tag <= TAG_LIMIT or (anything and tag == ANY_TAG)):
            raise failed("ERR_TAG", f"rank {context.comm.rank}: {kind} with tag {tag}; tags are 0..{TAG_LIMIT}")
        return context

    def _post(
        self,
        kind: str,
        array: np.ndarray | None,
        peer: int,
        tag: int,
        finish: Callable[[Any], Any] = lambda part: None,
        mode: str = "",
    ) -> Pending:
        """Start a send or a receive. finish: returns the result, of the message when it is complete."""
        context = self._peer(peer, tag, kind)
        if peer == PROC_NULL:
            return Pending(None, fields=NO_PROC)
        world, rank = context.world, context.comm.members[context.comm.rank]
        room = max(bytes_in(world.buffered.get(rank)), bytes_in(context.buffer))
        if mode == "buffered" and array is not None and array.nbytes + BSEND_OVERHEAD > room:
            raise failed(
                "ERR_BUFFER",
                f"rank {rank}: a buffered send of {array.nbytes} B, and the attached buffer has {room} B;"
                f" MPI.Attach_buffer(bytearray(n)) with n of at least {array.nbytes + BSEND_OVERHEAD} first",
            )
        site = call_site(sys._getframe(2))
        part = world.matching.post_user(context.comm, kind, array, peer, tag, site, mode)
        return Pending(world, [part], partial(finish, part))

    def start_send(self, array: np.ndarray, dest: int, tag: int, mode: str = "") -> Pending:
        """Start sending a 1-D array."""
        return self._post("send", array, dest, tag, mode=mode)

    def start_receive(self, buf: Any, source: int, tag: int) -> Pending:
        """Start receiving into a buffer."""
        buffer = one(buf, True, source)
        return self._post("receive", buffer.get(), source, tag, partial(put_into, buffer))

    def start_receive_object(self, buf: Any, source: int, tag: int, limit: int | None = None) -> Pending:
        """Start receiving an object. buf: its room, a buffer or a number of bytes. limit: the bytes without one."""
        room = None
        if buf is not None:
            room = np.empty(buf, OBJECT) if isinstance(buf, int) else one(buf, True, source).get().view(OBJECT)

        def finish(part: LocatedRequest) -> Any:
            size = part.nbytes
            if limit is not None and size > limit:
                raise failed(
                    "ERR_TRUNCATE",
                    f"rank {part.stream.rank}: irecv without a buffer has room for {limit} B, and the object at"
                    f" {part.site} has {size} B; pass irecv(bytearray({size}), ...), or use recv",
                )
            return pickle.loads(part.array[:size])

        return self._post("receive", room, source, tag, finish)

    def receive(self, buffer: Buffer | None, send: LocatedRequest, site: CallSite) -> Request:
        """Return the request of receiving a message that a matched probe has taken. buffer: None for an object."""
        context = self.context
        array = None if buffer is None else buffer.get()
        part = context.world.matching.receive_taken(context.comm, array, send, site)
        finish = partial(put_into, buffer, part) if buffer is not None else lambda: pickle.loads(part.array)
        return Request.of(Pending(context.world, [part], finish))

    def Attach_buffer(self, buf: Any) -> None:
        """Give this communicator's buffered sends room."""
        self.context.buffer = BUFFER_AUTOMATIC if buf is None else buf

    def Detach_buffer(self) -> Any:
        """Return the buffer of buffered sends; messages in it have left it."""
        buffer, self.context.buffer = self.context.buffer, None
        return buffer

    def Flush_buffer(self) -> None:
        """Return when the messages in the buffer have left it, which they have."""

    def Iflush_buffer(self) -> Request:
        """Return a request that is complete."""
        return Request.of(Pending(None))

    def _pair(self, array: np.ndarray, dest: int, sendtag: int, receive: Callable[[], Pending]) -> Request:
        """Start a receive and a send of a 1-D array."""
        self._peer(dest, sendtag, "send")
        received = receive()
        parts = [*received.parts, *self.start_send(array, dest, sendtag).parts]
        return Request.of(Pending(self.context.world, parts, received.finish, received.fields))

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        self.Isendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag).Wait(status)

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:
        """Start sending and receiving."""
        outgoing = one(sendbuf, False, dest).get()
        return self._pair(outgoing, dest, sendtag, lambda: self.start_receive(recvbuf, source, recvtag))

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        self.Isendrecv_replace(buf, dest, sendtag, source, recvtag).Wait(status)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """Start sending a copy of a buffer and receiving into it."""
        copy = one(buf, False, dest).get().copy()
        return self._pair(copy, dest, sendtag, lambda: self.start_receive(buf, source, recvtag))

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Receive an object. buf: not needed, because the object's size is known when it is received."""
        if buf is not None:
            warnings.warn("recv needs no buffer: leave the argument buf out", UserWarning, stacklevel=2)
        return Request.of(self.start_receive_object(buf, source, tag)).wait(status)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start receiving an object; without a buffer it has at most 32 KiB, as in mpi4py."""
        return Request.of(self.start_receive_object(buf, source, tag, IRECV_BYTES if buf is None else None))

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        Request.of(self.start_receive(buf, source, tag)).Wait(status)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        return Request.of(self.start_receive(buf, source, tag))

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Return a receive that can be started again and again."""
        self._peer(source, tag, "receive")
        return self.persistent(lambda: self.start_receive(buf, source, tag))

    def persistent(self, start: Callable[[], Pending]) -> Prequest:
        """Return the request of an operation that can be started again and again."""
        return Prequest.of(Pending(self.context.world, start=start))

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Send an object and receive one."""
        receive = partial(self.start_receive_object, recvbuf, source, recvtag)
        return self._pair(pickled(sendobj, dest), dest, sendtag, receive).wait(status)

    # probes -----------------------------------------------------------------------------------------------------------

    def _probe(self, source: int, tag: int, status: Status | None, polls: bool) -> tuple[bool, LocatedRequest | None]:
        """Return whether a message is there, and the message."""
        context = self._peer(source, tag, "probe")
        if source == PROC_NULL:
            if status is not None:
                status.become(NO_PROC)
            return True, None
        matching = context.world.matching
        probe = matching.probe(context.comm, source, tag, call_site(sys._getframe(2)))
        send = matching.look(probe, polls)
        if send is not None:
            stream = context.world.state.running
            stream.time = max(stream.time, send.arrival)
            if status is not None:
                status.become((send.comm.rank, send.tag, 0, send.nbytes, 0))
        return send is not None, send

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Wait until a message is there."""
        return self._probe(source, tag, status, polls=False)[0]

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Return whether a message is there."""
        return self._probe(source, tag, status, polls=True)[0]

    def _matched(self, found: tuple[bool, LocatedRequest | None]) -> Message:
        if found[1] is None:
            return Message.of(NO_MESSAGE)
        self.context.world.matching.take_send(found[1])
        return Message.of(Held(self, found[1]))

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait until a message is there, and take it."""
        return self._matched(self._probe(source, tag, status, polls=False))

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message | None:
        """Take a message that is there; None when there is none."""
        found = self._probe(source, tag, status, polls=True)
        return self._matched(found) if found[0] else None

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe

    # others of some of its ranks --------------------------------------------------------------------------------------

    def make(self, members: Sequence[int], label: str, origin: str = "", topology: Any = None) -> Any:
        """Return a communicator of some world ranks; COMM_NULL on a rank that is none of them."""
        context = self.context
        if not origin:  # all ranks make the same ones in the same order
            context.children += 1
            origin = f"{context.comm.name}.{context.children}"
        me = context.comm.members[context.comm.rank]
        if me not in members:
            return Comm()
        comm = Members(context.world, origin, list(members), list(members).index(me), label)
        kind = Comm.intracomm if topology is None else topology.communicator
        return kind.of(Context(comm, topology=topology))

    def Dup(self, info: Info | None = None) -> Self:
        """Return a communicator of the same ranks, whose messages never meet this one's."""
        context = self.context
        context.comm.collective("Dup")
        other = self.make(context.comm.members, "dup", topology=context.topology)
        other.held.info, other.held.errhandler = (info or context.info).Dup(), context.errhandler
        return type(self)(other)

    Clone = Dup

    def Dup_with_info(self, info: Info) -> Self:
        """Return a communicator of the same ranks with other hints."""
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple[Self, Request]:
        """Return a communicator of the same ranks, and a request that is complete."""
        return self.Dup(info), Request.of(Pending(None))

    Idup_with_info = Idup

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return the communicator of the ranks with the same color, in the order of their keys."""
        comm = self.context.comm
        if color < 0 and color != UNDEFINED:
            raise failed("ERR_ARG", f"rank {comm.rank}: Split with color {color}; colors are at least 0, or UNDEFINED")
        call = comm.collective("Split")
        rows = collectives.all_gather(call, np.array([color, key], np.int64)).reshape(-1, 2).tolist()
        same = sorted((row[1], rank) for rank, row in enumerate(rows) if row[0] == color and color != UNDEFINED)
        return self.make([comm.members[rank] for _, rank in same], f"color{color}")

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        """Return the communicator of the ranks that share memory: all, for COMM_TYPE_SHARED."""
        shares = split_type == COMM_TYPE_SHARED or (
            split_type == COMM_TYPE_HW_GUIDED and info and info.get("mpi_hw_resource_type") == "mpi_shared_memory"
        )
        return self.Split(0 if shares else UNDEFINED, key)

    def _world_ranks(self, group: Group) -> list[int]:
        ranks = group.members.ranks
        if not set(ranks) <= set(self.context.comm.members):
            raise failed("ERR_GROUP", f"the group has ranks that {self.context.comm.name} does not have")
        return ranks

    def Create(self, group: Group) -> Any:
        """Return the communicator of a group; all ranks of this one call it."""
        ranks = self._world_ranks(group)
        self.context.comm.collective("Create")
        return self.make(ranks, f"group{ranks[0] if ranks else ''}")

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Return the communicator of a group; only the ranks of the group call it."""
        context, ranks = self.context, self._world_ranks(group)
        key = f"{context.comm.name}.tag{tag}of{zlib.crc32(str(ranks).encode()):08x}"
        context.of_groups[key] = context.of_groups.get(key, 0) + 1
        return self.make(ranks, "", f"{key}.{context.of_groups[key]}")

    def Free(self) -> None:
        """Make this COMM_NULL."""
        self.context  # noqa: B018
        if self.predefined:
            raise failed("ERR_COMM", f"MPI.{self.predefined} is predefined and cannot be freed")
        self.held = None

    Disconnect = Free

    def free(self) -> None:
        """Make this COMM_NULL, if it is not."""
        if self.held is not None and not self.predefined:
            self.Free()

    def Abort(self, errorcode: int = 0) -> None:
        """End the run of all ranks."""
        raise Aborted(self.Get_rank(), errorcode, call_site(sys._getframe(1)))

    @classmethod
    def Get_parent(cls) -> "Comm":
        """Return COMM_NULL: no rank was spawned."""
        return Comm.intercomm()

    intracomm: ClassVar[type["Comm"]]
    intercomm: ClassVar[type["Comm"]]


def bytes_in(buffer: Any) -> int:
    """Return the bytes of a buffer for buffered sends."""
    return 0 if buffer is None else 2**62 if buffer is BUFFER_AUTOMATIC else memory(buffer).size


def pickled(value: Any, dest: int = 0) -> np.ndarray:
    """Return the bytes of an object; of one for PROC_NULL none."""
    data = b"" if dest == PROC_NULL else pickle.dumps(value)
    return np.frombuffer(data, OBJECT)


def put_into(buffer: Buffer, part: LocatedRequest) -> None:
    """Write a message that has come into the program's buffer, where it is not there already."""
    if not buffer.is_view:
        buffer.put(part.array[: part.nbytes // buffer.layout.element.itemsize])


def _sends() -> None:
    """Give Comm the sends in all modes, and their nonblocking and persistent forms."""
    modes = {"": "", "b": "buffered", "s": "synchronous", "r": ""}
    for letter, mode in modes.items():

        def Send(self: Comm, buf: Any, dest: int, tag: int = 0, *, mode: str = mode) -> None:
            """Send a buffer."""
            Request.of(self.start_send(one(buf, False, dest).get(), dest, tag, mode)).Wait()

        def Isend(self: Comm, buf: Any, dest: int, tag: int = 0, *, mode: str = mode) -> Request:
            """Start sending a buffer."""
            return Request.of(self.start_send(one(buf, False, dest).get(), dest, tag, mode))

        def Send_init(self: Comm, buf: Any, dest: int, tag: int = 0, *, mode: str = mode) -> Prequest:
            """Return a send that can be started again and again."""
            self._peer(dest, tag, "send")
            return self.persistent(lambda: self.start_send(one(buf, False, dest).get(), dest, tag, mode))

        def send(self: Comm, obj: Any, dest: int, tag: int = 0, *, mode: str = mode) -> None:
            """Send an object."""
            Request.of(self.start_send(pickled(obj, dest), dest, tag, mode)).wait()

        def isend(self: Comm, obj: Any, dest: int, tag: int = 0, *, mode: str = mode) -> Request:
            """Start sending an object."""
            return Request.of(self.start_send(pickled(obj, dest), dest, tag, mode))

        word = f"{letter}send"
        functions: dict[str, Callable[..., Any]] = {
            word.capitalize(): Send,
            f"I{word}": Isend,
            f"{word.capitalize()}_init": Send_init,
        }
        if letter != "r":
            functions |= {word: send, f"i{word}": isend}
        for name, function in functions.items():
            function.__name__ = function.__qualname__ = name
            setattr(Comm, name, function)


_sends()


class Intracomm(Comm):
    """A communicator of one group of ranks: what Split, Dup and Create return."""

    Spawn = Spawn_multiple = refusing("MPI.Intracomm.Spawn", MORE_RANKS)
    Create_intercomm = refusing(
        "an intercommunicator (Create_intercomm)", "use Split, and messages on the whole communicator"
    )

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "org.mpi4py", info: Any = None, errhandler: Any = None
    ) -> Any:
        """Return the communicator of a group that was made without another communicator."""
        world = sys.modules["mpi4py.MPI"].COMM_WORLD
        return world.Create_group(group, zlib.crc32(stringtag.encode()) & TAG_LIMIT)


class Intercomm(Comm):
    """A communicator of two groups, which simulated ranks do not have: only the null handle exists."""


Comm.intracomm, Comm.intercomm = Intracomm, Intercomm
