"""Right answers that are written in another way than our solutions are: the judge must accept each of them."""

import functools
import heapq
import itertools
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

import numpy as np

from minidist.core.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from minidist.core.comm import ANY

RIGHT = []


def right(name):
    """Add the function to RIGHT, as a right answer to exercise `name`."""

    def add(function):
        RIGHT.append((name, function))
        return function

    return add


@right("00.in_rank_order")
def by_requests(comm, say):
    token = np.empty(0)
    if comm.rank:
        comm.irecv(token, comm.rank - 1).wait()
    say("now")
    if comm.rank + 1 != comm.size:
        comm.isend(token, comm.rank + 1).wait()


@right("00.in_rank_order")
def from_any(comm, say):
    if comm.rank != 0:
        comm.recv(np.zeros(3, np.int8), ANY)
    say("x" * 100)
    if comm.rank != comm.size - 1:
        comm.send(np.zeros(3, np.int8), comm.rank + 1)


def by_loops(gradient, shape):
    result = np.zeros(shape)
    for place in np.ndindex(gradient.shape):
        own = place[len(place) - len(shape) :]
        result[tuple(i if n > 1 else 0 for i, n in zip(own, shape, strict=True))] += gradient[place]
    return result


@right("00b.add_backward")
def element_by_element(g, a, b):
    return by_loops(g, a), by_loops(g, b)


@right("00b.cross_entropy_backward")
def with_log_sum_exp(logits, targets):
    total = np.logaddexp.reduce(logits, axis=1)
    return (np.exp(logits - total[:, None]) - (np.arange(logits.shape[1]) == targets[:, None])) / logits.shape[0]


@right("00b.cross_entropy_backward")
def row_by_row(logits, targets):
    def of(row, target):
        row = np.exp(row - max(row))
        return [p / sum(row) - (k == target) for k, p in enumerate(row)]

    return [[x / len(targets) for x in of(row, t)] for row, t in zip(logits, targets, strict=True)]


@right("02.free_in_order")
def with_a_deque(layers, x, loss_gradient):
    inputs = deque()
    for layer in layers:
        inputs.append(x)
        x = layer.forward(x)
    g = loss_gradient(x)
    x = None
    stack = list(layers)
    while stack:
        layer = stack.pop()
        gradient = layer.weight_gradient(inputs.pop(), g)
        g = layer.input_gradient(g) if stack else None
        layer.update(gradient)
        gradient = None


@right("03.by_order")
def the_last_receives_first(comm, outgoing):
    if comm.size == 1:
        return +outgoing
    calls = [
        lambda: comm.send(outgoing, (comm.rank + 1) % comm.size),
        lambda: comm.recv(incoming, (comm.rank - 1) % comm.size),
    ]
    incoming = np.zeros_like(outgoing)
    for call in calls if comm.rank + 1 < comm.size else calls[::-1]:
        call()
    return incoming


@right("03.by_sendrecv")
def with_negative_ranks_avoided(comm, outgoing):
    buffer = np.full(outgoing.size, np.nan)
    comm.sendrecv(outgoing, [*range(1, comm.size), 0][comm.rank], buffer, [comm.size - 1, *range(comm.size)][comm.rank])
    return buffer.tolist()


@right("03.by_requests")
def sends_first_and_waits_apart(comm, outgoing):
    sent = comm.isend(outgoing, (comm.rank + 1) % comm.size)
    incoming = np.empty_like(outgoing)
    comm.irecv(incoming, (comm.rank + comm.size - 1) % comm.size).wait()
    sent.wait()
    return incoming


@right("02b.adam")
def with_corrected_rates(weights, gradients, lr):
    result = []
    for weight, own in zip(weights.tolist(), gradients.T.tolist(), strict=True):
        m = v = 0.0
        for t, g in enumerate(own, 1):
            m, v = m + (g - m) / 10, v + (g * g - v) / 1000
            weight -= lr * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8)
        result.append(weight)
    return result


@right("04.ring_all_reduce")
def to_the_left(comm, array):
    n, r = comm.size, comm.rank
    chunks = np.array_split(array, n)
    for step in range(2 * n - 2):
        out, come = (r + step) % n, (r + step + 1) % n
        new = np.empty_like(chunks[come])
        comm.sendrecv(chunks[out], (r - 1) % n, new, (r + 1) % n)
        chunks[come][:] = chunks[come] + new if step < n - 1 else new


@right("04.ring_all_reduce")
def with_two_loops(comm, array):
    n, rank = comm.size, comm.rank
    chunks = np.array_split(array, n)
    for step in range(n - 1):
        leaving, arriving = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        part = np.empty_like(arriving)
        comm.sendrecv(leaving, (rank + 1) % n, part, (rank - 1) % n)
        arriving += part
    for step in range(n - 1):
        leaving, arriving = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        comm.sendrecv(leaving, (rank + 1) % n, arriving, (rank - 1) % n)


@right("04.ring_all_reduce")
class WithWaitall:
    """A class whose objects are called."""

    def __new__(cls, comm, array):
        self = super().__new__(cls)
        self.comm, self.parts = comm, np.array_split(array, comm.size)
        for step in range(comm.size - 1):
            self.pass_on(comm.rank - step, np.add)
        for step in range(comm.size - 1):
            self.pass_on(comm.rank + 1 - step, lambda mine, new: new)

    def pass_on(self, number, merge):
        n, rank = self.comm.size, self.comm.rank
        mine = self.parts[(number - 1) % n]
        new = np.empty_like(mine)
        self.comm.waitall(
            [self.comm.irecv(new, (rank - 1) % n), self.comm.isend(self.parts[number % n], (rank + 1) % n)]
        )
        mine[...] = merge(mine, new)


@right("05.halving_doubling")
def recursive(comm, array):
    power = 2 ** int(np.log2(comm.size))
    edges = np.cumsum([0] + [len(c) for c in np.array_split(array, power)])
    if comm.rank >= power:
        comm.send(array, comm.rank - power)
        comm.recv(array, comm.rank - power)
        return
    helped = comm.rank + power < comm.size
    if helped:
        part = np.empty_like(array)
        comm.recv(part, comm.rank + power)
        array += part

    def both(low, high):
        if high - low == 1:
            return
        middle = (low + high) // 2
        upper = comm.rank >= middle
        mine, other = ((middle, high), (low, middle)) if upper else ((low, middle), (middle, high))
        peer = comm.rank + (low - middle if upper else middle - low)
        keep, give = array[edges[mine[0]] : edges[mine[1]]], array[edges[other[0]] : edges[other[1]]]
        came = np.empty_like(keep)
        comm.sendrecv(give, peer, came, peer)
        keep += came
        both(*mine)
        comm.sendrecv(keep, peer, give, peer)

    both(0, power)
    if helped:
        comm.send(array, comm.rank + power)


@right("05.choose")
def by_sorting(n, size, alpha, beta):
    rounds, once = (n - 1).bit_length(), beta * size
    table = [(rounds * (alpha + once), "recursive_doubling"), (2 * (rounds * alpha + once - once / n), "rabenseifner")]
    return sorted(table)[0][1]


@right("06.weighted_average")
def from_two_reductions(comm, gradient, count):
    total = all_reduce(comm, np.array([float(count)]))
    return all_reduce(comm, np.nan_to_num(gradient) * (count / total[0]))


@right("06.weighted_average")
def by_gathering(comm, gradient, count):
    rows = all_gather(comm, np.append(np.where(count, gradient, 0.0), count)).reshape(comm.size, -1)
    return np.average(rows[:, :-1], axis=0, weights=rows[:, -1])


@right("06b.bucketed_reducer")
def with_counters(comm, backward, uses, buckets, launch):
    missing = [sum(uses[p] for p in bucket) for bucket in buckets]
    owner = {p: b for b, bucket in enumerate(buckets) for p in bucket}
    started, next_one = [], iter(range(len(buckets)))
    waiting = next(next_one, None)
    for parameter in itertools.chain([None], backward):
        if parameter is not None:
            missing[owner[parameter]] -= 1
        while waiting is not None and missing[waiting] == 0:
            started.append(launch(waiting))
            waiting = next(next_one, None)
    while started:
        started.pop(0).wait()


@right("06c.ssp")
def with_a_dict_of_clocks(comm, steps, bound, compute):
    weights = np.zeros(comm.size - 1)
    if comm.rank:
        for clock in range(steps):
            comm.send(compute(clock, weights), 0)
            if clock < steps - 1:
                comm.recv(weights, 0)
        return None
    clocks, held = dict.fromkeys(range(1, comm.size), 0), set()
    while min(clocks.values(), default=steps) < steps:
        part = np.empty(comm.size - 1)
        who = comm.recv(part, ANY)
        weights += part
        clocks[who] += 1
        held |= {who} if clocks[who] < steps else set()
        free = sorted(w for w in held if clocks[w] <= min(clocks.values()) + bound)
        held -= set(free)
        for w in free:
            comm.send(weights.copy(), w)
    return weights


@right("09.scaled_training")
def with_a_dataclass(comm, steps, backward, step):
    @dataclass
    class Scale:
        value: float = 65536.0
        row: int = 0

        def update(self, good):
            self.row = (self.row + 1) % 3 if good else 0
            self.value *= 0.5 if not good else 2.0 if self.row == 0 else 1.0

    scale = Scale()
    for _ in range(steps):
        gradient = backward(scale.value)
        good = all_reduce(comm, np.array([np.isfinite(np.sum(np.abs(gradient), dtype=np.float64))], np.int8), "min")
        if good[0]:
            step(np.float32(gradient) * np.float32(1 / scale.value))
        scale.update(bool(good[0]))
    return scale.value


@right("10.pick_segments")
def by_every_cut(saved, boundary, budget):
    n = len(saved)
    for count in range(1, n + 1):
        for inner in itertools.combinations(range(1, n), count - 1):
            edges = [0, *inner, n]
            parts = [saved[a:b] for a, b in itertools.pairwise(edges)]
            if max(map(sum, parts)) + count * boundary <= budget:
                return tuple(map(len, parts))
    return None


@right("10.recompute")
def with_the_state(segment, x, rng):
    state = rng.bit_generator.state
    y = segment.forward(x, rng)

    def backward(g):
        again = np.random.Generator(type(rng.bit_generator)())
        again.bit_generator.state = state
        return segment.gradient(x, g, again)

    return y, backward


@right("11.zero_step")
def with_np_resize(comm, weights, gradients, update):
    n, numel = comm.size, sum(w.size for w in weights)
    each = -(-numel // n)
    both = np.zeros((2, each * n))
    for row, arrays in zip(both, (weights, gradients), strict=True):
        row[:numel] = [x for array in arrays for x in array.flat]
    own = both[0].reshape(n, each)[comm.rank].copy()
    update(own, reduce_scatter(comm, both[1]))
    numbers = iter(all_gather(comm, own))
    for array in weights:
        array.flat = [next(numbers) for _ in range(array.size)]


@right("12.prefetch")
def with_an_iterator(comm, layers, x, gather, compute):
    def whole():
        coming = gather(0) if layers else None
        for i in range(1, layers + 1):
            now = coming.wait()
            coming = gather(i) if i < layers else None
            yield now
            del now

    arriving = whole()
    return functools.reduce(lambda y, i: compute(i, next(arriving), y), range(layers), x)


@right("12b.offloaded_step")
def with_deques(comm, pieces, down, step, up):
    coming, going = deque(), deque()
    for piece in range(pieces + 1):
        if piece < pieces:
            coming.append(down(piece))
        if piece:
            values = step(piece - 1, coming.popleft().wait())
            while going:
                going.popleft().wait()
            going.append(up(piece - 1, values))
    for way in going:
        way.wait()


@right("14.parallel_mlp")
def with_two_halves_in_one_message(comm, x, a, b, bias, gradient):
    z = x @ a
    parts = np.stack([z.clip(0) @ b, np.where(z > 0, gradient @ b.T, 0) @ a.T])
    whole = all_reduce(comm, parts)
    return whole[0] + bias, whole[1]


@right("14.parallel_mlp")
def the_bias_on_one_rank(comm, x, a, b, bias, gradient):
    hidden = x @ a
    hidden *= hidden > 0
    y = all_reduce(comm, hidden @ b + (bias if comm.rank == comm.size - 1 else 0))
    return [y, all_reduce(comm, np.sign(hidden) * (gradient @ b.T) @ a.T)]


@right("14.parallel_attention")
def head_by_head(comm, x, qkv, projection, heads, attention):
    d = projection.shape[0] // heads
    q, k, v = (x @ part for part in np.hsplit(qkv, 3))
    total = np.zeros((len(x), projection.shape[1]))
    for head in range(comm.rank * heads // comm.size, (comm.rank + 1) * heads // comm.size):
        own = slice(head * d, head * d + d)
        total += attention(np.hstack([q[:, own], k[:, own], v[:, own]]), 1) @ projection[own]
    return all_reduce(comm, total)


@right("14b.split_mlp")
def with_both_gathers_in_one(comm, x, a, b, gradient):
    both = all_gather(comm, np.stack([x, gradient])).reshape(comm.size, 2, *x.shape)
    rows, slope = (both[:, i].reshape(-1, x.shape[1]) for i in (0, 1))
    before = rows @ a
    parts = np.stack([before.clip(0) @ b, np.where(before > 0, slope @ b.T, 0) @ a.T])
    halves = parts.reshape(2, comm.size, -1).swapaxes(0, 1).copy()
    return tuple(reduce_scatter(comm, halves).reshape(2, *x.shape))


@right("14b.split_cross_entropy")
def with_fewer_steps(comm, logits, targets, first):
    top = all_reduce(comm, logits.max(axis=1).copy(), "max")
    here = np.equal(np.arange(first, first + logits.shape[1]), np.asarray(targets)[:, None])
    sums = np.stack([np.exp(logits - top[:, None]).sum(axis=1), (logits * here).sum(axis=1)])
    total, target = all_reduce(comm, sums)
    return np.log(total) + top - target, np.exp(logits - top[:, None]) / total[:, None] - here


@right("16.gpipe")
def oldest_first(stages, microbatches):
    m = range(microbatches)
    return tuple([*map("F{}".format, m), *map("B{}".format, m)] for _ in range(stages))


@right("17.one_f_one_b")
def greedy(stages, microbatches):
    lists = []
    for s in range(stages):
        order, f, b = [], 0, 0
        while b < microbatches:
            if f < microbatches and f - b < stages - s:
                order, f = [*order, f"F{f}"], f + 1
            else:
                order, b = [*order, f"B{b}"], b + 1
        lists.append(order)
    return lists


@right("17b.stashing")
def by_versions(order, weights, gradient):
    versions, seen = [weights], {}
    for kind, number in ((action[0], int(action[1:])) for action in order):
        if kind == "F":
            seen[number] = len(versions) - 1
        else:
            versions.append(versions[-1] - gradient(number, versions[seen[number]]) / 4)
    return np.array(versions[1:])


@right("17c.two_versions")
def as_a_list_of_copies(order, weights, gradient, m):
    old = new = weights
    total = 0
    for action in order:
        if action[0] == "B":
            k = int(action[1:])
            total = total + gradient(k, old)
            if (k + 1) % m == 0:
                old, new = new, new - 0.25 * total
                total = 0
                yield new.copy()


@right("19.zero_bubble")
def by_queues(stages, microbatches):
    def of(s):
        order, waiting = [], deque()
        todo = deque(range(microbatches))
        for _ in range(min(microbatches, stages - 1 - s)):
            order.append(f"F{todo.popleft()}")
        for i in range(microbatches):
            order += [f"F{todo.popleft()}"] if todo else []
            order.append(f"I{i}")
            waiting.append(i)
            if len(waiting) > s:
                order.append(f"W{waiting.popleft()}")
        return order + [f"W{i}" for i in waiting]

    return [of(s) for s in range(stages)]


@right("20.place_ranks")
def with_transposed_arrays(shape, traffic, node_size):
    order = np.argsort(traffic, kind="stable")
    numbers = np.arange(np.prod(shape)).reshape([shape[axis] for axis in order])
    return (numbers.transpose(np.argsort(order)) // node_size).reshape(-1)


@right("14c.slots_and_balance")
def with_cumulative_sums(probabilities, factor):
    tokens, experts = probabilities.shape
    capacity = int(-(-(tokens / experts * factor) // 1))
    chosen = np.eye(experts, dtype=int)[probabilities.argmax(axis=1)]
    place = ((np.cumsum(chosen, axis=0) - 1) * chosen).sum(axis=1)
    slots = np.where(place < capacity, chosen.argmax(axis=1) * capacity + place, -1)
    f, p = chosen.mean(axis=0), probabilities.mean(axis=0)
    return slots, experts * sum(f * p), np.tile(experts * f / tokens, (tokens, 1))


@right("14c.dispatch")
def one_call_per_expert_and_rank(comm, slots, run_expert):
    here = len(slots) // comm.size
    arrived = all_to_all(comm, np.array(slots).ravel()).reshape((comm.size, here, *slots.shape[1:]))
    done = [[run_expert(comm.rank * here + e, rows) for e, rows in enumerate(of_rank)] for of_rank in arrived]
    return all_to_all(comm, np.array(done).ravel()).reshape(slots.shape)


@right("22b.ulysses")
def with_messages_by_hand(comm, q, k, v, rows, attend):
    n, mine, here = comm.size, comm.rank, q.shape[1] // comm.size
    columns = [slice(here * rank, here * (rank + 1)) for rank in range(n)]
    parts, outputs = [np.stack([q, k, v])[:, :, columns[mine]]] * n, np.empty(q.shape)
    for step in range(1, n):
        to, source = (mine - step) % n, (mine + step) % n
        parts[source] = np.empty((3, rows[source], here, q.shape[2]))
        comm.sendrecv(np.stack([q, k, v])[:, :, columns[to]].copy(), to, parts[source], source)
    mixed = np.split(attend(*np.concatenate(parts, axis=1)), np.cumsum(rows)[:-1])
    outputs[:, columns[mine]] = mixed[mine]
    for step in range(1, n):
        to, source = (mine + step) % n, (mine - step) % n
        incoming = np.empty((rows[mine], here, q.shape[2]))
        comm.sendrecv(mixed[to].copy(), to, incoming, source)
        outputs[:, columns[source]] = incoming
    return outputs


@right("22c.visible")
def by_rows(tokens, separator, rank, ranks):
    edges = np.cumsum([0] + [len(c) for c in np.array_split(tokens, 2 * ranks)])
    document = list(itertools.accumulate([0, *(int(t == separator) for t in tokens[:-1])]))
    rows = [q for c in (rank, 2 * ranks - 1 - rank) for q in range(edges[c], edges[c + 1])]
    return [[k <= q and document[k] == document[q] for k in range(len(tokens))] for q in rows]


@right("22.ring_attention")
def with_log_sum_exp_of_blocks(comm, q, k, v, rows):
    outputs, logs = [], []
    block, owner = np.concatenate([k, v], axis=1), comm.rank
    for step in range(comm.size):
        keys, values = np.hsplit(block, 2)
        scores = q @ keys.T * q.shape[1] ** -0.5
        logs.append(np.logaddexp.reduce(scores, axis=1))
        outputs.append(np.exp(scores - logs[-1][:, None]) @ values)
        if step + 1 < comm.size:
            owner = (owner + 1) % comm.size
            new = np.empty((rows[owner], 2 * q.shape[1]))
            comm.sendrecv(block, (comm.rank - 1) % comm.size, new, (comm.rank + 1) % comm.size)
            block = new
    total = np.logaddexp.reduce(logs, axis=0)
    return sum(np.exp(log - total)[:, None] * out for log, out in zip(logs, outputs, strict=True))


@right("06d.error_feedback")
def all_steps_in_one_message(comm, gradients, k):
    steps, length = gradients.shape
    left, sent = [0.0] * length, []
    for gradient in gradients:
        left = [a + b for a, b in zip(left, gradient, strict=True)]
        for place in sorted(range(length), key=lambda i: abs(left[i]))[length - k :]:
            sent += [place, left[place]]
            left[place] = 0.0
    sums = np.zeros((steps, length))
    for row in all_gather(comm, np.array(sent)).reshape(comm.size, steps, k, 2):
        for step, place in np.ndindex(steps, k):
            sums[step, int(row[step, place, 0])] += row[step, place, 1]
    return sums, left


@right("06d.sign_feedback")
def signs_of_all_steps_in_one_message(comm, gradients):
    steps, length = gradients.shape
    left, sizes, signs = np.zeros(length), np.zeros(steps), np.zeros((steps, length), bool)
    for step, gradient in enumerate(gradients):
        left = left + gradient
        sizes[step], signs[step] = np.mean(np.abs(left)), ~np.signbit(left)
        left -= np.copysign(sizes[step], left)
    own = np.concatenate([sizes.view(np.uint8), np.packbits(signs, axis=1).reshape(-1)])
    sums = np.zeros((steps, length))
    for row in all_gather(comm, own).reshape(comm.size, own.size):
        theirs = np.unpackbits(row[8 * steps :].reshape(steps, -(-length // 8)), axis=1)[:, :length]
        sums += row[: 8 * steps].copy().view(float)[:, None] * np.where(theirs, 1, -1)
    return sums, left


@right("09b.one_grid")
def with_the_least_and_the_most(comm, x):
    (largest,) = all_reduce(comm, np.array([max(x.max(initial=0), -x.min(initial=0))]), "max")
    return np.rint(x / (largest / 127)) * (largest / 127) if largest else x


@right("09c.kept_all_reduce")
def with_indices(comm, gradient, mask):
    places = np.flatnonzero(mask)
    result = [0.0] * len(mask)
    for place, value in zip(places, all_reduce(comm, gradient.take(places)), strict=True):
        result[place] = value
    return result


@right("09d.distil")
def with_requests(comm, teachers, logits, rows, temperature):
    me, requests = comm.rank, []
    if me >= teachers:
        out = np.empty((rows, 4))
        comm.irecv(out, (me - teachers) % teachers).wait()
        return out
    for student in range(comm.size - teachers):
        if student % teachers == me:
            scaled = logits(student) / temperature
            requests.append(
                comm.isend(np.exp(scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)), teachers + student)
            )
    comm.waitall(requests)
    return np.empty((0, 4))


@right("20b.fastest_mesh")
def as_arrays(n, layers, activation, gradient, alpha, beta):
    tp = np.array([part for part in range(1, n + 1) if n % part == 0])
    dp = n // tp
    messages = 8 * layers * (tp - 1) + 2 * (dp - 1)
    nbytes = 8 * layers * (tp - 1) * activation / n + 2 * (dp - 1) * gradient / n
    place = np.argmin(messages * alpha + nbytes * beta)
    return np.array([dp[place], tp[place]])


@right("20c.min_max_split")
def by_bisection(times, stages):
    edges = [0, *itertools.accumulate(times)]

    def cut(limit):
        sizes, at = [], 0
        for left in range(stages - 1, -1, -1):
            end = at + 1
            while end < len(times) - left and edges[end + 1] - edges[at] <= limit:
                end += 1
            if left == 0:
                end = len(times)
            sizes.append(end - at)
            at = end
        slowest = max(edges[sum(sizes[: i + 1])] - edges[sum(sizes[:i])] for i in range(stages))
        return sizes if slowest <= limit else None

    limits = sorted({b - a for a, b in itertools.combinations(edges, 2)})
    return cut(limits[bisect_left(limits, True, key=lambda limit: cut(limit) is not None)])


@right("20c.min_max_split")
def with_a_cache(times, stages):
    @functools.cache
    def best(n, k):
        if k == 1:
            return sum(times[:n]), (n,)
        return min((max(best(j, k - 1)[0], sum(times[j:n])), (*best(j, k - 1)[1], n - j)) for j in range(k - 1, n))

    return best(len(times), stages)[1]


@right("20c.stages_by_time")
def by_trying_all(comm, sizes, seconds, flops):
    of = np.split(
        all_gather(comm, np.stack([seconds, flops], 1).ravel(), counts=[2 * s for s in sizes]).reshape(-1, 2),
        np.cumsum(sizes)[:-1],
    )
    pace = [rows[:, 0].sum() / rows[:, 1].sum() for rows in of]
    work = np.cumsum([0, *np.concatenate(of)[:, 1]])
    cuts = ([0, *inner, len(work) - 1] for inner in itertools.combinations(range(1, len(work) - 1), comm.size - 1))
    best = min(
        cuts, key=lambda c: max((work[b] - work[a]) * p for (a, b), p in zip(itertools.pairwise(c), pace, strict=True))
    )
    return np.diff(best)


@right("26.save")
def in_a_fresh_folder(disk, name, parts):
    fresh = next(n for n in map(f"{name}-{{}}".format, itertools.count()) if not disk.exists(n))
    for part in sorted(parts, reverse=True):
        disk.write(f"{fresh}/{part}", parts[part])
    disk.write("pointer", fresh.encode())
    disk.rename("pointer", "latest")


@right("26.load")
def element_wise(comm, size, pieces, read):
    mine = np.array_split(np.arange(size), comm.size)[comm.rank]
    result = np.full(len(mine), np.nan)
    for number, piece in enumerate(pieces):
        wanted = np.isin(mine, np.arange(*piece))
        if wanted.any():
            result[wanted] = read(number)[mine[wanted] - piece[0]]
    return result


@right("26b.steps_between_saves")
def by_search(cards, mtbf, save, step):
    steps = 1
    while save / (steps * (steps + 1) * step) > step * cards / (2 * mtbf):  # one step more costs less
        steps += 1
    return steps


@right("28.first_difference")
def with_two_checksums(comm, weights):
    data = weights.tobytes()
    mine = np.array([zlib.crc32(data), zlib.adler32(data), hash(data[:0])], np.uint32)
    table = all_gather(comm, mine).reshape(comm.size, -1).tolist()
    return next((rank for rank, row in enumerate(table) if row != table[0]), -1)


@right("28.wrong_steps")
def one_step_after_the_other(comm, steps, gradient, w, x, y):
    wrong = []
    for number, step in enumerate(steps):
        equal = np.allclose(step(comm, w, x, y), gradient(w, x, y), rtol=1e-7, atol=1e-12)
        if not all_reduce(comm, np.array([float(equal)]), "min")[0]:
            wrong.append(number)
    return tuple(wrong)


@right("28b.read_once")
def with_a_polynomial(comm, numbers, samples):
    prime = 2**31 - 1

    def digest(values):
        return functools.reduce(lambda product, x: product * (int(x) + 12345) % prime, values, 1)

    counts, digests = all_gather(comm, np.array([len(numbers), digest(numbers)])).reshape(-1, 2).T
    whole = functools.reduce(lambda a, b: int(a) * int(b) % prime, digests, 1)
    return counts.sum() == samples and whole == digest(range(samples))


@right("11b.trust_ratio_step")
def with_bincount(comm, sizes, weights, update):
    layer = np.repeat(range(len(sizes)), sizes).astype(int)
    norms = np.concatenate([np.bincount(layer, part**2, len(sizes)).astype(float) for part in (weights, update)])
    w, u = np.sqrt(all_reduce(comm, norms)).reshape(2, -1)
    with np.errstate(all="ignore"):
        ratio = np.where(w * u > 0, w / u, 1.0)
    return weights - update * np.take(ratio, layer)


@right("11c.owners_compute")
def by_point_to_point(comm, parts, rows, orthogonalize):
    n, r, requests, pieces = comm.size, comm.rank, [], defaultdict(dict)
    for k, part in enumerate(parts):
        if k % n != r and part.size:
            requests.append(comm.isend(part, k % n, tag=k))
        for other in range(n) if k % n == r else ():
            pieces[k][other] = part if other == r else np.empty((rows[k][other], part.shape[1]))
            if other != r and pieces[k][other].size:
                requests.append(comm.irecv(pieces[k][other], other, tag=k))
    comm.waitall(requests)
    results, requests = [np.empty_like(part) for part in parts], []
    for k, part in enumerate(parts):
        if k % n != r:
            requests += [comm.irecv(results[k], k % n, tag=k)] if part.size else []
            continue
        whole = orthogonalize(np.vstack([pieces[k][other] for other in range(n)]))
        for other, chunk in enumerate(np.split(whole, np.cumsum(rows[k])[:-1])):
            if other == r:
                results[k] = chunk
            elif chunk.size:
                requests.append(comm.isend(chunk.copy(), other, tag=k))
    comm.waitall(requests)
    return results


@right("06f.in_order")
def all_receives_first(comm, batches, make):
    workers = range(1, comm.size)
    if comm.rank:
        mine = [i for i in range(batches) if workers[i % len(workers)] == comm.rank]
        comm.waitall([comm.isend(make(i), 0, tag=i) for i in mine])
        return np.empty((0, 2))
    if not workers:
        return np.array([make(i) for i in range(batches)]).reshape(-1, 2)
    rows = np.empty((batches, 2))
    comm.waitall([comm.irecv(rows[i], workers[i % len(workers)], tag=i) for i in range(batches)])
    return rows


@right("10b.gradient_and_noise")
def by_two_equations(comm, rows):
    own, b = rows.sum(axis=0) / len(rows), len(rows)
    *gradient, square = all_reduce(comm, np.array([*own, own @ own])) / comm.size
    equations = [[1, 1 / b], [1, 1 / (b * comm.size)]]
    return [*gradient, *np.linalg.solve(equations, [square, np.square(gradient).sum()])]


@right("10c.shares_by_time")
def by_the_end_of_the_step(comm, rows, mine, seconds):
    """The earliest end at which all rows fit, and what is too much comes off the first ranks."""
    pace = all_gather(comm, np.array([seconds / mine]))
    ends = sorted(count * p for p in pace for count in range(1, rows + 1))
    shares = next(fits for end in ends if (fits := np.floor(end / pace + 1e-9).astype(int)).sum() >= rows)
    for rank in range(comm.size):
        shares[rank] -= min(shares[rank], shares.sum() - rows)
    return tuple(map(int, shares))


@right("16b.sync_batch_norm")
def with_sums_in_two_rounds(comm, x, eps):
    count, *sums = all_reduce(comm, np.array([len(x), *x.sum(axis=0)], float))
    centred = x - np.array(sums) / max(count, 1)
    variance = all_reduce(comm, np.square(centred).sum(axis=0)) / max(count, 1)
    return centred * (variance + eps) ** -0.5


@right("05b.ring_order")
def by_groups(nodes):
    groups = defaultdict(list)
    for rank, node in enumerate(nodes):
        groups[node].insert(0, rank)
    return [*itertools.chain.from_iterable(groups.values())]


@right("05b.two_level_sum")
def by_rings_of_first_ranks(comm, array, machines):
    groups = defaultdict(list)
    for rank, machine in enumerate(machines):
        groups[machine].append(rank)
    own, least = groups[machines[comm.rank]], min(map(len, groups.values()))
    arrays = {rank: np.empty_like(array) for rank in own if rank != comm.rank}
    comm.waitall([comm.irecv(arrays[rank], rank) for rank in arrays] + [comm.isend(array, rank) for rank in arrays])
    parts, me = np.array_split(sum(arrays.values(), array), least), own.index(comm.rank)
    if me < least:
        ring = [group[me] for group in groups.values()]
        size, place = len(ring), ring.index(comm.rank)
        chunks = np.array_split(parts[me].copy(), size)
        for step in range(1, size):
            to, source = (place + step) % size, (place - step) % size
            part = np.empty_like(chunks[place])
            comm.sendrecv(np.array_split(parts[me], size)[to].copy(), ring[to], part, ring[source])
            chunks[place] += part
        for step in range(1, size):
            to, source = (place + step) % size, (place - step) % size
            comm.sendrecv(chunks[place], ring[to], chunks[source], ring[source])
        parts[me] = np.concatenate(chunks)
    giving = [comm.isend(parts[me], rank) for rank in own if me < least and rank != comm.rank]
    comm.waitall(giving + [comm.irecv(parts[at], own[at]) for at in range(least) if at != me])
    return np.concatenate(parts)


@right("04b.ordered_reduce_scatter")
def with_requests_and_sum(comm, array):
    chunks, own = np.array_split(array, comm.size), None
    others = [r for r in range(comm.size) if r != comm.rank]
    table = {r: np.empty_like(chunks[comm.rank]) for r in others} | {comm.rank: chunks[comm.rank]}
    comm.waitall([comm.irecv(table[r], r) for r in others] + [comm.isend(chunks[r], r) for r in others])
    for r in range(comm.size):
        own = table[r] if own is None else own + table[r]
    return own


@right("19b.building_block")
def by_search_with_a_heap(p, offsets):
    f0, f1, i1, i0 = offsets
    heap = [(a + 2 * b + c, a, b, c) for a, b, c in itertools.product(range(1, 7), repeat=3)]
    heapq.heapify(heap)
    while heap:
        _, a, b, c = heapq.heappop(heap)
        starts = [0, (p - 1) * f0 + a]
        starts.append(starts[1] + (p - 1) * f1 + b)
        starts.append(starts[2] + (p - 1) * i1 + c)
        rows = [
            (f0 * r, starts[1] + f1 * (p - 1 - r), starts[2] + i1 * r, starts[3] + i0 * (p - 1 - r)) for r in range(p)
        ]
        if all(max(Counter(s % 6 for s in row).values()) == 1 for row in rows):
            return rows
    return None


@right("06e.outer_step")
def with_differences(comm, common, weights, momentum, lr, mu):
    g = all_reduce(comm, (common - weights) / comm.size)
    new = g + mu * momentum
    return common - lr * g - lr * mu * new, new
