"""Programs that both worlds run: every collective, blocking and in streams, groups, messages of all sizes."""

import hashlib

import ml_dtypes
import numpy as np

from minidist.collectives import TwoLevel, barrier
from minidist.collectives.two_level import sub
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather, all_reduce, ring
from minidist.core.comm import ANY, init_device_mesh
from tests.collectives.cases import ALL, DTYPES, OPS, Case


def digest(values):
    """What must be equal in every world: the bytes of all results."""
    data = hashlib.sha256()
    for value in values:
        data.update(b"none" if value is None else np.ascontiguousarray(value).tobytes())
    return data.hexdigest()


def every_collective(comm):
    """Each algorithm, blocking and in a stream, with an even and a ragged cut, in turn over the dtypes."""
    n, results = comm.size, []
    dtypes = [DTYPES[name] for name in sorted(DTYPES)]
    for i, (operation, algorithm) in enumerate(ALL):
        for size, async_op in ((2 * n + 1, False), (n - 1, True), (0, False)):
            dtype = dtypes[(i + size) % len(dtypes)]
            op = OPS[(i + size) % 5] if dtype.kind != "i" else OPS[2 * (i % 3)]  # an average of integers is none
            root = i % n
            counts = None if operation == "all_to_all" or not async_op else tuple([size] + [0] * (n - 1))
            case = Case(operation, algorithm, n, size, dtype, op, root, counts, async_op)
            with np.errstate(over="ignore"):  # a product of primes in float16: infinity, in both worlds
                result = case.call(comm)
                case.check(comm.rank, result)
            results.append(result)
    barrier(comm)
    return digest(results)


def two_levels(comm):
    """Each two-level collective on equal nodes and on ragged ones; blocking and in a stream; ragged counts."""
    n, rank, results = comm.size, comm.rank, []
    rng = np.random.default_rng(rank)
    for color in (rank % max(1, n // 2), 0 if rank < n // 3 else 1):
        levels, counts = TwoLevel(comm, color), [3 + (5 * r) % 4 for r in range(n)]
        whole = [rng.standard_normal(sum(counts)).astype(np.float32) for _ in range(4)]
        work = levels.all_reduce(whole[0], async_op=True)
        results.append(levels.reduce_scatter(whole[1], "max", counts=counts))
        results.append(levels.all_gather(whole[2][: counts[rank]], counts=counts))
        results.append(levels.reduce(whole[3], n - 1, "avg"))
        results.append(levels.broadcast(whole[1], n // 2))
        levels.barrier()
        results.append(work.wait())
        results.append(all_reduce(levels.comm, np.full(3, rank, np.int64), algorithm="two_level"))
        # A group of all ranks would choose by measured times under MPI; any other chooses by formulas.
        results.append(all_reduce(comm.split(rank % 2), np.full(3, rank, np.int64), algorithm="auto"))
    results.append(all_reduce(comm, np.full(7, rank + 0.5), algorithm="two_level"))  # nodes as the world has them: one
    return digest(results)


def groups_and_streams(comm):
    """Split, mesh and duplicate; streams of all of them at once, waited for in another order than started."""
    n = comm.size
    odd = comm.split(comm.rank % 2, key=-comm.rank)
    mesh = init_device_mesh(comm, (n // 2, 2) if n % 2 == 0 else (1, n), ("dp", "tp"))
    other = comm.dup()
    comms = [comm, odd, mesh["dp"], mesh["tp"], mesh["dp", "tp"], other]
    rng = np.random.default_rng(comm.rank)
    arrays = [rng.standard_normal(30 + i).astype(np.float32) for i in range(12)]
    works = []
    with purpose("gradient_reduce"):
        for i, array in enumerate(arrays):
            algorithm = ("ring", "ordered")[i % 2]
            works.append(all_reduce(comms[i % 6], array, algorithm=algorithm, async_op=True))
            comm.progress()
    gathered = all_gather(odd, arrays[0].copy() * 0 + comm.rank)  # next to the streams
    for i in (5, 11, 0, 6, 1, 7, 10, 4, 9, 3, 2, 8):
        works[i].wait()
    return digest([*arrays, gathered])


def parts_of_calls(comm):
    """Algorithms on a part of a call, on a part of that part and on the communicator itself; a wildcard in a part."""
    n, rank = comm.size, comm.rank
    call = comm.collective("mine")
    assert call.collective("inner") is call
    mine = [r for r in reversed(range(n)) if r % 2 == rank % 2]
    part = sub(call, mine)
    assert (part.rank, part.size, list(part.members), part.tag) == (mine.index(rank), len(mine), mine, call.tag)
    got = np.full(5, rank + 1.0)
    ring.all_reduce(part, got, "sum")
    assert got[0] == sum(r + 1 for r in mine)
    part.barrier()

    # Its last two ranks: the second sends to the first, which does not say from whom it receives.
    pair = sub(part, list(range(part.size))[-2:]) if part.rank >= part.size - 2 else None
    if pair is not None and pair.size == 2:
        number = np.array([rank])
        if pair.rank == 0:
            assert pair.recv(number, ANY) == 1
            assert number[0] == pair.members[1]
        else:
            pair.send(number, 0)
        got = np.append(got, number)

    # Two messages to one rank, which differ in their tags, in two calls at once.
    calls, pieces, requests = [comm.collective("mine") for _ in range(2)], np.zeros((2, 2), np.int64), []
    for i, j in ((1, 1), (0, 1), (1, 0), (0, 0)):
        requests.append(calls[i].irecv(pieces[i, j : j + 1], (rank + 1) % n, tag=j))
    for i, j in ((0, 0), (1, 0), (0, 1), (1, 1)):
        requests.append(calls[i].isend(np.array([10 * i + j]), (rank - 1) % n, tag=j))
    call.waitall(requests)
    assert pieces.tolist() == [[0, 1], [10, 11]]

    # Without a call the messages are the communicator's own.
    direct = np.full(4, rank, np.int64)
    ring.all_reduce(comm, direct, "max")
    assert direct[0] == n - 1
    return digest([got, direct])


def messages_of_all_sizes(comm):
    """Receives posted early, then blocking sends of up to 1 MiB, then the waits, in another order than the posts."""
    n, rank = comm.size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    results = []
    for size in (0, 1, 1000, 50_000, 262_144):
        got = [np.zeros(size, np.float32) for _ in range(3)]
        receives = [comm.irecv(got[0], left, tag=1), comm.irecv(got[1], right, tag=2), comm.irecv(got[2], left, tag=1)]
        mine = np.full(size, rank + 1, np.float32)
        requests = [comm.isend(mine * k, right, tag=1) for k in (1, 2)]
        if rank % 2 == 0:
            comm.send(mine, left, tag=2)  # the receivers may be waiting for something else
        else:
            requests.append(comm.isend(mine, left, tag=2))
        for request in (receives[2], receives[1], receives[0], *requests):
            request.wait()
        results += got
        comm.sendrecv(mine, left, got[0], right, tag=3)
        results.append(got[0])
    if rank == 0:
        comm.send_object(["text", 7], right)
    if rank == 1 % n:
        assert comm.recv_object(0) == ["text", 7]
    return digest(results)


def wildcards(comm):
    """Rank 0 receives from any rank, in several tags, early and late, small and large, and replies."""
    if comm.rank == 0:
        small = [np.zeros(1, ml_dtypes.bfloat16) for _ in range(2 * (comm.size - 1))]
        large = [np.zeros(40_000) for _ in range(comm.size - 1)]
        requests = [comm.irecv(array, ANY, tag=1) for array in small]
        order = [comm.recv(array, ANY, tag=2) for array in large]
        comm.waitall(requests)
        order += [request.peer for request in requests]
        for peer in range(1, comm.size):
            comm.send(np.array(order), peer, tag=3)
        return digest([*small, *large, np.array(order)])
    for i in range(2):
        comm.send(np.array([comm.rank + 10 * i], ml_dtypes.bfloat16), 0, tag=1)
    comm.send(np.full(40_000, float(comm.rank)), 0, tag=2)
    order = np.zeros(3 * (comm.size - 1), int)
    comm.recv(order, 0, tag=3)
    return digest([order])


def any_while_others_are_late(comm):
    """Rank 0 has receives from 1 and from any rank open; rank 1 sends only after rank 0 has heard of rank 2."""
    got = np.zeros(2)
    if comm.rank == 0:
        late, from_any = comm.irecv(got[:1], 1), comm.irecv(got[1:], ANY)
        from_any.wait()
        comm.send(got[1:], 1, tag=5)
        late.wait()
    elif comm.rank == 1:
        comm.recv(got[1:], 0, tag=5)
        comm.send(np.ones(1), 0)
    elif comm.rank == 2:
        comm.send(np.full(1, 2.0), 0)
    return digest([got])
