"""Wrong answers that are more than one change away from our solution, each with words of the hint that it must get.

Those with one change are in mutations.py.
"""

import numpy as np

from minidist.core.collectives import all_gather
from minidist.course.lesson import solution


def all_heads_to_all(comm, q, k, v, rows, attend):
    counts = [q[0].size * count for count in rows]
    keys, values = (all_gather(comm, part.ravel(), counts=counts).reshape(-1, *q.shape[1:]) for part in (k, v))
    return attend(q, keys, values)


def no_rank_waits(comm, say):
    say("here")


def a_barrier_per_turn(comm, say):
    for turn in range(comm.size):
        if turn == comm.rank:
            say("here")
        comm.barrier()


def input_gradient_first(layers, x, loss_gradient):
    kept = [x]
    for layer in layers:
        kept.append(layer.forward(kept[-1]))
    g = loss_gradient(kept.pop())
    for layer in reversed(layers):
        below = layer.input_gradient(g) if kept[1:] else None
        layer.update(layer.weight_gradient(kept.pop(), g))
        g = below
        del below


def passes_on_its_own_part(comm, array):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chunks, originals = np.array_split(array, comm.size), np.array_split(array.copy(), comm.size)
    for step in range(comm.size - 1):
        leaving, arriving = originals[(comm.rank - step) % comm.size], chunks[(comm.rank - step - 1) % comm.size]
        incoming = np.empty_like(arriving)
        comm.sendrecv(leaving, right, incoming, left)
        arriving += incoming
    for step in range(comm.size - 1):
        leaving, arriving = chunks[(comm.rank - step + 1) % comm.size], chunks[(comm.rank - step) % comm.size]
        comm.sendrecv(leaving, right, arriving, left)


def folded_whole_arrays(comm, array):
    n, rank = comm.size, comm.rank
    power = 1 << (n.bit_length() - 1)
    if rank >= power:
        comm.send(array, rank - power)
        comm.recv(array, rank - power)
        return
    incoming = np.empty_like(array)
    if rank < n - power:
        comm.recv(incoming, rank + power)
        array += incoming
    distance = 1
    while distance < power:
        comm.sendrecv(array.copy(), rank ^ distance, incoming, rank ^ distance)
        array += incoming
        distance *= 2
    if rank < n - power:
        comm.send(array, rank + power)


def out_of_order(comm, backward, uses, buckets, launch):
    left, works = list(uses), {}
    for parameter in backward:
        left[parameter] -= 1
        for b in range(len(buckets)):
            if b not in works and not any(left[p] for p in buckets[b]):
                works[b] = launch(b)
    for b in range(len(buckets)):
        if b not in works:
            works[b] = launch(b)
    for work in works.values():
        work.wait()


def gathers_everything_first(comm, layers, x, gather, compute):
    coming = [gather(layer) for layer in range(layers)]
    for layer in range(layers):
        x = compute(layer, coming[layer].wait(), x)
    return x


def rmsprop(weights, gradients, lr):
    square = np.zeros_like(weights)
    for g in gradients:
        square = 0.99 * square + 0.01 * g**2
        weights = weights - lr * g / (np.sqrt(square) + 1e-8)
    return weights


def one_teacher_does_all(comm, teachers, logits, rows, temperature):
    for student in range(comm.size - teachers) if comm.rank == 0 else ():
        scores = np.exp(logits(student) / temperature)
        comm.send(scores / scores.sum(axis=1, keepdims=True), teachers + student)
    targets = np.zeros((rows if comm.rank >= teachers else 0, 4))
    if comm.rank >= teachers:
        comm.recv(targets, 0)
    return targets


def one_piece_at_a_time(comm, pieces, down, step, up):
    for piece in range(pieces):
        up(piece, step(piece, down(piece).wait())).wait()


def everything_down_first(comm, pieces, down, step, up):
    coming = [down(piece) for piece in range(pieces)]
    going = [up(piece, step(piece, coming[piece].wait())) for piece in range(pieces)]
    for crossing in going:
        crossing.wait()


def in_proportion(comm, rows, mine, seconds):
    """Shares in proportion to the speeds, by largest remainders: the slow rank may get one row too many."""
    speeds = all_gather(comm, np.array([mine / seconds]))
    exact = rows * speeds / speeds.sum()
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: rows - shares.sum()]] += 1
    return shares.tolist()


def onto_what_a_dead_save_left(disk, name, parts):
    for part, data in parts.items():
        disk.write(f".saving/{part}", data)
    name = name if not disk.exists(name) else f"{name}.1"
    disk.rename(".saving", name)
    disk.write("latest.new", name.encode())
    disk.rename("latest.new", "latest")


def reversed_order(comm, say):
    token = np.zeros(1)
    if comm.rank < comm.size - 1:
        comm.recv(token, comm.rank + 1)
    say("x")
    if comm.rank > 0:
        comm.send(token, comm.rank - 1)


def rank0_tells_all(comm, say):
    token = np.zeros(1)
    if comm.rank == 0:
        say("x")
        for r in range(1, comm.size):
            comm.send(token, r)
    else:
        comm.recv(token, 0)
        say("x")


def two_delay(order, weights, gradient, m):
    v = [weights]
    t = 0
    for a in order:
        if a[0] == "B":
            k = int(a[1:])
            t = t + gradient(k, v[max(k // m - 2, 0)])
            if k % m == m - 1:
                v.append(v[-1] - 0.25 * t)
                t = 0
    return [x.copy() for x in v[1:]]


WRONG = [
    ("00.in_rank_order", no_rank_waits, "no rank waits"),
    ("00.in_rank_order", a_barrier_per_turn, "a barrier per turn"),
    ("02.free_in_order", input_gradient_first, "need not be alive"),
    ("04.ring_all_reduce", passes_on_its_own_part, "the sum that it has just made"),
    ("02b.adam", rmsprop, "this is RMSProp"),
    ("05.halving_doubling", solution("04.ring_all_reduce"), "a ring's number"),
    ("05.halving_doubling", folded_whole_arrays, "whole arrays travel in every round"),
    ("05.choose", lambda n, size, alpha, beta: "tree", "return the name"),
    ("05.choose", lambda n, size, alpha, beta: "ring", "count the latencies too"),
    ("05.choose", lambda n, size, alpha, beta: "recursive_doubling", "here bytes decide"),
    ("06b.bucketed_reducer", out_of_order, "the order of their index"),
    ("12.prefetch", gathers_everything_first, "more than two whole layers"),
    ("12b.offloaded_step", one_piece_at_a_time, "*before* you step"),
    ("12b.offloaded_step", everything_down_first, "more than two gradients"),
    ("19.zero_bubble", solution("17.one_f_one_b"), "no stage waits for W"),
    ("19.zero_bubble", lambda p, m: [[f"F{i}" for i in range(m)]] * p, "needs F, I and W"),
    ("19.zero_bubble", lambda p, m: [], "'F0', 'I0', 'W0'"),
    ("19b.building_block", lambda p, offsets: [], "four starts per rank"),
    ("20c.stages_by_time", lambda comm, sizes, *_: sizes, "takes other seconds"),
    ("20c.stages_by_time", lambda comm, sizes, *_: [sum(sizes), *[0] * (comm.size - 1)], "every stage has a layer"),
    ("20c.stages_by_time", lambda *_: 3, "a list of whole numbers"),
    ("22b.ulysses", all_heads_to_all, "send each rank its heads"),
    ("10c.shares_by_time", in_proportion, "another one would have"),
    ("10c.shares_by_time", lambda *_: 3, "a list of whole numbers"),
    ("11c.owners_compute", lambda comm, parts, rows, orthogonalize: parts, "the rows that came in"),
    ("09d.distil", one_teacher_does_all, "more than its share"),
    ("26.save", onto_what_a_dead_save_left, "remove them first"),
    ("00.in_rank_order", reversed_order, "the ranks speak in the reverse order"),
    ("00.in_rank_order", rank0_tells_all, "one rank lets all others speak at"),
    ("17c.two_versions", two_delay, "the gradients are those of two batches"),
]
