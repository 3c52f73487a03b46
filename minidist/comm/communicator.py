"""The communicator that a program is given: a `Comm` that refuses what would go wrong later, and sends objects.

What a mesh, a cost model and a wrapper refuse is here, too: the core calls these functions through `hooks.comm_checks`.

    Comm          rank, size, send, recv, ..., collective, dup, group
    CheckedComm   split, objects; arguments are checked before anything is sent; what it is cannot be changed

A rank's members, order and label of a new communicator are its *claim*; the claims of all members must be equal. The
n-th call of `group`, `dup` or `split` on the parent makes one communicator on all its members. If two ranks name
different members, or another order, both may be rank 0 and receive messages that are meant for the other. If they give
different labels, there are two communicators, and on each of them one rank waits for ever. So the claims are compared
when the communicator is made: a simulated rank compares its claim with those of the members that came before, and under
MPI each rank sends its claim to the next rank in its list:

    rank 0   group([0, 1], "a")       ── 0, 1 as "a" ──▶ rank 1
    rank 1   group([0, 1, 2], "a")    receives a claim that differs from its own: MismatchError

Proved by: tests/comm/test_conformance.py, tests/comm/sim/test_misuse.py, tests/comm/test_mesh.py,
tests/comm/mpi/test_groups.py
"""

import pickle
import sys
from collections.abc import Iterable, Sequence
from math import inf, prod
from operator import index
from typing import Any, NamedTuple, NoReturn, SupportsIndex, TypeVar, cast

import numpy as np

from minidist.base.errors import MismatchError, UsageError, nearest, quoted, reason
from minidist.base.limits import MAX_VALUE, MIN_VALUE, check_size, is_size
from minidist.comm.call_site import NOWHERE, CallSite, call_site
from minidist.comm.errors import UnwaitedRequestError
from minidist.comm.message_checks import CheckedCall, CheckedMessages
from minidist.core.base.trace import purpose
from minidist.core.comm.communicator import Comm, PointToPoint
from minidist.core.comm.mesh import Mesh

Part = TypeVar("Part", bound=PointToPoint)

FIXED = ("rank", "size", "members", "ranks", "name")  # what a communicator is


def send_object(comm: Any, value: Any, dest: int, tag: int | None = None) -> None:
    """Send any picklable object: two messages, its length (8 B) and its bytes."""
    # The receiver cannot know how much to allocate, so the length travels first.
    try:
        data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise UsageError(
            f"rank {comm.rank}: send_object of a {type(value).__name__}, which cannot be pickled ({reason(error)}),"
            f" at {comm.site or call_site(sys._getframe(1))}; send arrays, numbers and text"
        ) from None
    comm.send(np.array([data.size], dtype=np.int64), dest, tag)
    comm.send(data, dest, tag)


def recv_object(comm: PointToPoint, source: int, tag: int | None = None) -> Any:
    """Receive what `send_object` sent."""
    length = np.empty(1, dtype=np.int64)

    source = comm.recv(length, source, tag)
    data = np.empty(int(length[0]), dtype=np.uint8)
    comm.recv(data, source, tag)
    return pickle.loads(data.tobytes())


class CheckedComm(CheckedMessages, Comm):
    """A rank's handle on a group of ranks, in a world that programs run in.

    passed: what reports say that this rank passes to a call, in place of its array (`call_log.Passed`).
    """

    call_class = CheckedCall
    passed: Any = None

    def __init__(self, world: Any, origin: str, members: Sequence[int], rank: int, label: str = "") -> None:
        super().__init__(world, origin, members, rank, label)
        world.register(self, origin, label)

    def collective(
        self,
        operation: str,
        equal: str = "",
        root: int | None = None,
        sends_itself: bool = False,
        array: np.ndarray | None = None,
    ) -> CheckedCall:
        """Return this rank's next collective call, with the line of the program that makes it.

        sends_itself: the algorithm is the user's, so a report names the lines of its messages instead of the line of
        the call. array: what this rank passes to it, for reports.
        """
        call = cast(CheckedCall, super().collective(operation, equal, root))
        # A program that sends the call's messages itself has a line for each of them, and a library's algorithm has
        # the line of the call.
        world, frame = self.world, sys._getframe(1)
        call.opened = site = NOWHERE if world.unchecked else call_site(frame)
        own_lines = world.checks and (sends_itself or site.filename == frame.f_code.co_filename)
        call.site = None if own_lines else site
        world.called(self, call, array, root)
        return call

    def group(self, ranks: Sequence[int], label: str) -> Comm:
        try:
            check_group(self, ranks)
        except UsageError:
            self._children += 1  # a program that catches the error has made the call, as the other members have
            raise
        return super().group(ranks, label)

    def __setattr__(self, name: str, value: Any) -> None:
        # A rank that counts itself as another one would take that one's messages.
        if name in FIXED and hasattr(self, name):  # a look at `__dict__` makes one, and all access slower
            raise UsageError(
                f"rank {self.rank}: comm.{name} = {str(value)[:80]}, at {call_site(sys._getframe(1))}; what a"
                " communicator is cannot be changed: use another variable, or make another communicator with split()"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"rank {self.rank}: the communicator {self.name!r} cannot be copied or pickled, and neither can what holds"
            " one (a wrapped, sharded or split model); copy the model before that, or use comm.dup()"
        )

    def set_nodes(self, nodes: list[list[int]]) -> None:
        """Name the ranks that are near to each other, node by node, instead of asking the world."""
        self.nodes = nodes

    def split(self, color: int, key: int = 0) -> Comm:
        """Return the communicator of the ranks with the same color, ordered by (key, rank).

        Every rank learns each (color, key), 16 B, in ceil(log2 n) messages per rank (Bruck et al. 1997): row i of a
        rank's table is that of rank + i, and the rank that has the next rows of the table sends them.
        """
        color, key = int64(color, self.rank, "a color of split"), int64(key, self.rank, "a key of split")
        if color < 0:
            raise UsageError(f"rank {self.rank}: split needs a color of at least 0, got {color}")

        # What travels: rows of (color, key), 16 B each, in rounds like those of a barrier.
        call = self.collective("split")
        table = np.zeros((self.size, 2), dtype=np.int64)
        table[0] = (color, key)

        # The known rows double in each round.
        known = 1
        with purpose("startup"):
            while known < self.size:
                more = min(known, self.size - known)
                dest, source = (self.rank - known) % self.size, (self.rank + known) % self.size
                call.sendrecv(table[:more], dest, table[known : known + more], source)
                known += more

        # Row i was that of rank + i; now it is that of rank i.
        table = np.roll(table, self.rank, axis=0)
        same = np.flatnonzero(table[:, 0] == color).tolist()
        return self.group(sorted(same, key=lambda r: (table[r, 1], r)), f"color{color}")

    send_object, recv_object = send_object, recv_object


def part(comm: PointToPoint, kind: type[Part], **changes: Any) -> Part:
    """Return a group as an object of class `kind`, with other values of some attributes; it sends nothing."""
    other = object.__new__(kind)
    other.__dict__.update(comm.__dict__, **changes)
    return other


def check_alike(comm: Comm, operation: str, what: str, checksum: int) -> None:
    """Raise MismatchError when other members make this call with another checksum of `what`; it sends nothing.

    Simulated ranks are compared at once, and under MPI the next message of a collective call says it.
    """
    if comm.size > 1:
        call = comm.collective(operation, f"{what} {checksum:08x}")
        if isinstance(comm, CheckedComm):  # a `Sim` compares nothing
            comm.world.compare_calls(call, checksum)


def int64(value: SupportsIndex, rank: int, what: str) -> int:
    """Return a whole number that fits into 8 bytes as a Python integer; 1.5 is refused, not rounded."""
    try:
        number = index(value)
    except TypeError:
        number = 2**63
    if not -(2**63) <= number < 2**63:
        raise UsageError(f"rank {rank}: {what} is {quoted(value)}; it must be a whole number of at most 64 bits")
    return number


def second_thread(comm: PointToPoint, site: Any) -> UsageError:
    """Return the error for a communicator that another thread than the ranks' uses."""
    return UsageError(
        f"rank {comm.members[comm.rank]}: {comm.name} is used in a second thread, at {site}; communicate only in the"
        " thread that calls the rank's program, and use async_op=True to overlap"
    )


def unwaited(rank: int, item: Any) -> UnwaitedRequestError:
    """Return the error for a request or a work that no wait was called for."""
    return UnwaitedRequestError(
        f"rank {rank}: its {item.describe()} was never waited for; call wait() on every request"
    )


# --- claims ---


class Claim(NamedTuple):
    """What a rank says of a communicator.

    origin: the communicator and the number of the call that made this one from it, such as "world.2". All members have
    the same origin, also where their other fields differ.
    """

    origin: str
    rank: int  # world rank
    members: Sequence[int]  # world ranks
    label: str
    site: CallSite

    def agrees(self, other: "Claim") -> bool:
        """Return whether both name the same members in the same order, and the same label."""
        # Two ranges are compared at once, whatever their lengths.
        mine, theirs = self.members, other.members
        same = mine == theirs if isinstance(mine, range) and isinstance(theirs, range) else list(mine) == list(theirs)
        return same and self.label == other.label


def unlike_claims(one: Claim, two: Claim) -> MismatchError:
    """Return the error for a communicator on which two ranks do not agree."""
    if one.rank > two.rank:
        one, two = two, one
    parent, _, number = one.origin.rpartition(".")
    lines = f"{one.site}" if one.site == two.site else f"{one.site} and {two.site}"
    if one.label == two.label:
        return MismatchError(
            f"members differ: rank {one.rank} makes the communicator {one.origin}{one.label} of the world's ranks"
            f" {quoted(list(one.members))}, but rank {two.rank} makes it of {quoted(list(two.members))}, at {lines};"
            " every member must pass the same ranks in the same order"
        )
    return MismatchError(
        f"labels differ: call {number} of group, dup or split on {parent} is {_made(one)} on rank {one.rank}, but"
        f" {_made(two)} on rank {two.rank}, at {lines}; every member must make the same communicators in the same"
        " order, with the same labels"
    )


def _made(claim: Claim) -> str:
    if claim.label == "dup":
        return "dup()"
    return f"a group labelled {quoted(claim.label)} of {quoted(list(claim.members))}"


# --- checks of the arguments of worlds, links, groups and meshes ---


def check_watching(record: bool | str, checks: bool | str) -> None:
    """Raise UsageError for values of `record` and `checks` that a world does not have.

    record: True keeps every event, False none, "totals" the bytes by purpose. checks: True makes all checks, False
    none, "headers" those of the messages' headers alone.
    """
    if record not in (True, False, "totals"):
        raise UsageError(f'record={quoted(record)}; it must be True, False or "totals"')
    if checks not in (True, False, "headers"):
        raise UsageError(f'checks={quoted(checks)}; it must be True, False or "headers"')


def check_links(links: Any) -> None:
    """Raise UsageError for a cost below 0, an overhead above the latency, and a rate that is not above 0.

    links: an `AlphaBeta`, or a `LinkModel`, which also has an overhead.
    """
    overhead = getattr(links, "overhead", 0.0)
    for name, cost in (("alpha", links.alpha), ("beta", links.beta), ("overhead", overhead)):
        check_size(cost, f"link model: {name}")
    if overhead > links.alpha and links.link is None:
        raise UsageError(
            f"link model: overhead is {overhead}; it is a part of the latency alpha, so it must be from 0 to "
            f"{links.alpha}"
        )
    for name in ("flops", "memory_bandwidth"):
        rate = getattr(links, name)
        if rate == 0 or not (rate == inf or is_size(rate)):
            raise UsageError(
                f"link model: {name} is {quoted(rate)}; it must be from {MIN_VALUE:g} to {MAX_VALUE:g} per"
                " second, or infinite"
            )


def check_core_world(ranks: int, links: Any) -> None:
    """Raise UsageError where a `Sim` is given no rank, or costs that only a `SimWorld` uses."""
    if ranks < 1:
        raise UsageError(f"a world needs at least 1 rank, got {ranks}")
    for name in ("link", "slowdown", "overhead", "free_startup"):
        if getattr(links, name, None):
            raise UsageError(f"Sim has no {name} in its link model, and would ignore it; use SimWorld(links=links)")


def refuse_time(rank: int, seconds: float) -> NoReturn:
    """Raise UsageError: a virtual clock cannot be advanced by these seconds."""
    raise UsageError(f"rank {rank}: compute of {seconds:g} s; it must be a finite number of at least 0")


def check_group(comm: Comm, ranks: Sequence[int]) -> None:
    """Raise UsageError unless these are distinct ranks of `comm`, with its own."""
    try:
        numbers = list(map(index, ranks))
    except TypeError:
        numbers = []
    if comm.rank in numbers and len(set(numbers)) == len(numbers) and 0 <= min(numbers) <= max(numbers) < comm.size:
        return

    # What is wrong?
    try:
        ranks = [int64(r, comm.rank, "a rank of a group") for r in ranks]
    except TypeError:
        raise UsageError(f"rank {comm.rank}: a group of {quoted(ranks)}; pass a list of ranks") from None
    raise UsageError(
        f"rank {comm.rank}: a group needs distinct ranks of 0..{comm.size - 1} with its caller, got {ranks}"
    )


def check_mesh(comm: object, shape: Any, names: Any) -> None:
    """Raise UsageError for axes without a size and a distinct name each, and a product that is not the ranks' number.

    comm: of the mesh. shape, names: as they were passed.
    """
    if not isinstance(comm, PointToPoint):
        refuse_communicator(comm, "init_device_mesh")
    if not isinstance(shape, Iterable) or not all(isinstance(size, SupportsIndex) for size in shape):
        raise UsageError(f"mesh shape {quoted(shape)}; pass the ranks of each axis, such as (2, 4)")
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"mesh names {quoted(names)}; pass the name of each axis, such as ('dp', 'tp')")

    shape, names = tuple(shape), tuple(names)
    if not len(shape) == len(names) == len(set(names)):
        raise UsageError(f"a mesh needs one distinct name for each axis, got shape {shape} and names {names}")
    if prod(shape) != comm.size or min(shape, default=1) < 1:
        product = " x ".join(map(str, shape)) or "1"
        raise UsageError(
            f"mesh {dict(zip(names, shape, strict=True))}: {product} = {prod(shape)} ranks, "
            f"but there are {comm.size}; make the product of the axes equal to the number of ranks"
        )


def check_axes(mesh: Mesh, names: Sequence[str]) -> None:
    """Raise UsageError for the name of no axis."""
    for name in names:
        if name not in mesh.axis_names:
            hint = nearest(str(name), mesh.axis_names)
            raise UsageError(f"the mesh has no axis {name!r}{hint}; it has {', '.join(mesh.axis_names)}")


def refuse_communicator(comm: object, who: str) -> NoReturn:
    """Raise UsageError for an object that is not a communicator; for a mesh the sentence names its axes."""
    remedy = "pass the communicator that the program was given, or the axis of a mesh, such as mesh['dp']"
    if isinstance(comm, Mesh):
        axes = " or ".join(f"mesh[{name!r}]" for name in comm.axis_names) or "mesh.comm"
        remedy = f"a mesh has one communicator per axis: pass {axes}"
    raise UsageError(f"{who} needs a communicator, and got a value of type {type(comm).__name__}; {remedy}")
