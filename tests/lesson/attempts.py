"""More wrong answers, as students give them: each with the beginning of the hint that it must get."""

import numpy as np

from minidist.core.collectives import all_gather, all_reduce
from minidist.core.comm import ANY
from minidist.course.lesson import solution
from tests.lesson.wrong_answers import forward_keeping, neighbours

ATTEMPTS = []


def wrong(name, hint):
    """Add the function to ATTEMPTS, as a wrong answer to exercise `name`."""

    def add(function):
        ATTEMPTS.append((name, function, hint))
        return function

    return add


my_add_backward = solution("00b.add_backward")
my_building_block = solution("19b.building_block")
my_by_sendrecv = solution("03.by_sendrecv")
my_cross_entropy_backward = solution("00b.cross_entropy_backward")
my_first_difference = solution("28.first_difference")
my_fit_a_line = solution("05.fit_a_line")
my_gpipe = solution("16.gpipe")
my_gradient_and_noise = solution("10b.gradient_and_noise")
my_halving_doubling = solution("05.halving_doubling")
my_min_max_split = solution("20b.min_max_split")
my_one_f_one_b = solution("17.one_f_one_b")
my_place_ranks = solution("20.place_ranks")
my_ring_all_reduce = solution("04.ring_all_reduce")
my_save = solution("26.save")
my_ssp = solution("06c.ssp")
my_stashing = solution("17b.stashing")
my_visible = solution("22.visible")
my_zero_bubble = solution("19.zero_bubble")


@wrong("00.in_rank_order", "the ranks speak in the reverse order")
def reversed_order(comm, say):
    token = np.zeros(1)
    if comm.rank < comm.size - 1:
        comm.recv(token, comm.rank + 1)
    say("x")
    if comm.rank > 0:
        comm.send(token, comm.rank - 1)


@wrong("00.in_rank_order", "say(...) is called once per rank, with")
def says_twice(comm, say):
    token = np.zeros(1)
    if comm.rank > 0:
        comm.recv(token, comm.rank - 1)
    say("a")
    say("b")
    if comm.rank < comm.size - 1:
        comm.send(token, comm.rank + 1)


@wrong("00.in_rank_order", "every rank calls say(...) exactly once")
def says_nothing(comm, say):
    pass


@wrong("00.in_rank_order", "every rank calls say(...) exactly once")
def prints(comm, say):
    print(comm.rank)


@wrong("00.in_rank_order", "every rank waits for a token and")
def everyone_waits(comm, say):
    token = np.zeros(1)
    comm.recv(token, (comm.rank - 1) % comm.size)
    say("x")
    comm.send(token, (comm.rank + 1) % comm.size)


@wrong("00.in_rank_order", "the first rank receives from no one")
def no_last_check(comm, say):
    token = np.zeros(1)
    if comm.rank > 0:
        comm.recv(token, comm.rank - 1)
    say("x")
    comm.send(token, comm.rank + 1)


@wrong("00.in_rank_order", "one rank lets all others speak at")
def rank0_tells_all(comm, say):
    token = np.zeros(1)
    if comm.rank == 0:
        say("x")
        for r in range(1, comm.size):
            comm.send(token, r)
    else:
        comm.recv(token, 0)
        say("x")


@wrong("00b.add_backward", "return two gradients as a tuple: that")
def first_only(g, a, b):
    return g


@wrong("00b.add_backward", "an axis of length 1 was stretched")
def forgets_keepdims(g, sa, sb):
    def fold(s):
        n = g.sum(axis=tuple(range(g.ndim - len(s))))
        return n.sum(axis=tuple(i for i, k in enumerate(s) if k == 1 and n.shape[i] > 1))

    return fold(sa), fold(sb)


@wrong("00b.add_backward", "the two gradients are exchanged: that of")
def swapped(g, a, b):
    x, y = my_add_backward(g, a, b)
    return y, x


@wrong("00b.add_backward", "without broadcasting nothing is repeated: both gradients")
def repeats(g, a, b):
    return np.broadcast_to(g, np.broadcast_shapes(a, b))[..., :0], g


@wrong("00b.cross_entropy_backward", "the sign is reversed: the loss is")
def sign(l, t):
    return -my_cross_entropy_backward(l, t)


@wrong("00b.cross_entropy_backward", "return the gradient of the loss, one")
def loss(l, t):
    s = l - l.max(1, keepdims=True)
    return -(s[np.arange(len(t)), t] - np.log(np.exp(s).sum(1))).mean()


@wrong("00b.cross_entropy_backward", "exp overflows: subtract each row's maximum first")
def max_of_all(l, t):
    s = np.exp(l - l.max())
    p = s / s.sum(1, keepdims=True)
    return (p - np.eye(5)[t]) / len(t)


@wrong("00b.cross_entropy_backward", "the probabilities of a row do not")
def softmax_over_all(l, t):
    s = np.exp(l - l.max())
    p = s / s.sum()
    return (p - np.eye(5)[t]) / len(t)


@wrong("00b.cross_entropy_backward", "the probabilities of a row do not")
def axis0(l, t):
    s = np.exp(l - l.max(0))
    p = s / s.sum(0)
    return (p - np.eye(5)[t]) / len(t)


@wrong("02.free_in_order", "the weights are as they were: call")
def no_step(layers, x, lg):
    pass


@wrong("02.free_in_order", "the weights are as they were: call")
def wrong_order_input(layers, x, lg):
    k = forward_keeping(layers, x)
    g = lg(k[-1])
    for i in reversed(range(len(layers))):
        layers[i].weight_gradient(k[i + 1], g)


@wrong("02.free_in_order", "a layer's weight is as it was")
def last_only(layers, x, lg):
    k = forward_keeping(layers, x)
    g = lg(k.pop())
    layers[-1].update(layers[-1].weight_gradient(k.pop(), g))


@wrong("03.by_requests", "a wait comes before both requests have")
def wait_before_irecv(comm, out):
    r, l = neighbours(comm)
    inc = np.empty_like(out)
    comm.isend(out, r).wait()
    comm.irecv(inc, l).wait()
    return inc


@wrong("03.by_requests", "a wait comes before both requests have")
def wait_recv_first(comm, out):
    r, l = neighbours(comm)
    inc = np.empty_like(out)
    comm.irecv(inc, l).wait()
    comm.isend(out, r).wait()
    return inc


@wrong("03.by_requests", "isend and irecv only start: wait for")
def no_wait(comm, out):
    r, l = neighbours(comm)
    inc = np.empty_like(out)
    comm.irecv(inc, l)
    comm.isend(out, r)
    return inc


@wrong("03.by_sendrecv", "what comes in needs an array of")
def same_buffer(comm, out):
    r, l = neighbours(comm)
    comm.sendrecv(out, r, out, l)
    return out


@wrong("03.by_sendrecv", "the ring closes with % size: the")
def no_modulo3(comm, out):
    inc = np.empty_like(out)
    comm.sendrecv(out, comm.rank + 1, inc, comm.rank - 1)
    return inc


@wrong("03.by_sendrecv", "does every path of your function end")
def returns_none(comm, out):
    r, l = neighbours(comm)
    inc = np.empty_like(out)
    comm.sendrecv(out, r, inc, l)


@wrong("03.by_order", "this one of the three ways uses")
def uses_sendrecv(comm, out):
    return my_by_sendrecv(comm, out)


@wrong("03.by_order", "with one rank the right neighbour is")
def odd_first_alone(comm, out):
    r, l = neighbours(comm)
    inc = np.empty_like(out)
    if comm.rank == 0:
        comm.recv(inc, l)
        comm.send(out, r)
    else:
        comm.send(out, r)
        comm.recv(inc, l)
    return inc


@wrong("03.by_order", "correct, but slower than two rounds")
def half(comm, out):
    r, l = neighbours(comm)
    inc = np.empty_like(out)
    if comm.size == 1:
        return out.copy()
    if comm.rank < comm.size // 2:
        comm.send(out, r)
        comm.recv(inc, l)
    else:
        comm.recv(inc, l)
        comm.send(out, r)
    return inc


@wrong("04.ring_all_reduce", "every rank has the sum of its")
def only_first_half(comm, array):
    n, rank = comm.size, comm.rank
    ch = np.array_split(array, n)
    for s in range(n - 1):
        a = ch[(rank - 2 - s) % n]
        i = np.empty_like(a)
        comm.sendrecv(ch[(rank - 1 - s) % n], (rank + 1) % n, i, (rank - 1) % n)
        a += i


@wrong("04.ring_all_reduce", "every rank has the sum of its")
def one_step_short(comm, array):
    n, rank = comm.size, comm.rank
    ch = np.array_split(array, n)
    for s in range(n - 1):
        a = ch[(rank - 2 - s) % n]
        i = np.empty_like(a)
        comm.sendrecv(ch[(rank - 1 - s) % n], (rank + 1) % n, i, (rank - 1) % n)
        a += i
    for s in range(n - 2):
        comm.sendrecv(ch[(rank - s) % n], (rank + 1) % n, ch[(rank - 1 - s) % n], (rank - 1) % n)


@wrong("04.ring_all_reduce", "this is the mean of the ranks'")
def mean(comm, array):
    my_ring_all_reduce(comm, array)
    array /= comm.size


@wrong("04.ring_all_reduce", "the numbers are those of single ranks")
def overwrites(comm, array):
    n, rank = comm.size, comm.rank
    ch = np.array_split(array, n)
    for s in range(n - 1):
        comm.sendrecv(ch[(rank - 1 - s) % n], (rank + 1) % n, ch[(rank - 2 - s) % n], (rank - 1) % n)
    for s in range(n - 1):
        comm.sendrecv(ch[(rank - s) % n], (rank + 1) % n, ch[(rank - 1 - s) % n], (rank - 1) % n)


@wrong("04.ring_all_reduce", "follow the circle in the report: which")
def sends_first(comm, array):
    n, rank = comm.size, comm.rank
    ch = np.array_split(array, n)
    for s in range(n - 1):
        a = ch[(rank - 2 - s) % n]
        i = np.empty_like(a)
        comm.send(ch[(rank - 1 - s) % n], (rank + 1) % n)
        comm.recv(i, (rank - 1) % n)
        a += i


@wrong("04b.ordered_reduce_scatter", "is it the rank's own chunk that")
def returns_whole(comm, array):
    x = array.copy()
    my_ring_all_reduce(comm, x)
    return x


@wrong("04b.ordered_reduce_scatter", "is it the rank's own chunk that")
def wrong_chunk(comm, array):
    n, rank = comm.size, comm.rank
    ch = np.array_split(array, n)
    parts = [None] * n
    parts[rank] = ch[(rank + 1) % n]
    return ch[(rank + 1) % n]


@wrong("05.halving_doubling", "rank xor distance is a rank only")
def power_only(comm, array):
    n, rank = comm.size, comm.rank
    d = 1
    while d < n:
        i = np.empty_like(array)
        comm.sendrecv(array, rank ^ d, i, rank ^ d)
        array += i
        d *= 2


@wrong("05.halving_doubling", "right when n is a power of")
def extras_not_returned(comm, array):
    n, rank = comm.size, comm.rank
    p = 1 << (n.bit_length() - 1)
    if rank >= p:
        comm.send(array, rank - p)
        return
    if rank < n - p:
        i = np.empty_like(array)
        comm.recv(i, rank + p)
        array += i
    my_halving_doubling(comm.group(range(p), "p"), array)


@wrong("05.choose", "return the name of an algorithm: binomial")
def index(n, s, a, b):
    return 0


@wrong("06.weighted_average", "this is each rank's own mean: nothing")
def not_reduced(comm, g, c):
    return g


@wrong("06.weighted_average", "this is the sum of the means")
def just_sum(comm, g, c):
    return all_reduce(comm, g.copy())


@wrong("06.weighted_average", "the ranks got different averages, so their")
def weighted_by_max(comm, g, c):
    return all_reduce(comm, g * c) / max(c, 1)


@wrong("06.weighted_average", "a rank without rows has the mean")
def list_gather(comm, g, c):
    t = all_gather(comm, np.append(g * c, c)).reshape(comm.size, -1).sum(0)
    return t[:-1] / t[-1]


@wrong("06c.ssp", "rank 0 alone returns the weights, the")
def returns_on_workers(comm, steps, bound, compute):
    r = my_ssp(comm, steps, bound, compute)
    return r if comm.rank == 0 else np.zeros(comm.size - 1)


@wrong("06c.ssp", "rank 0 returns the weights after the")
def server_returns_none(comm, steps, bound, compute):
    my_ssp(comm, steps, bound, compute)


@wrong("06c.ssp", "the server replies to a worker that")
def extra_answer(comm, steps, bound, compute):
    weights = np.zeros(comm.size - 1)
    if comm.rank > 0:
        for c in range(steps):
            comm.send(compute(c, weights), 0)
            if c + 1 < steps:
                comm.recv(weights, 0)
        return None
    done = np.zeros(comm.size, int)
    waiting = []
    done[0] = steps
    for _ in range(steps * (comm.size - 1)):
        g = np.empty_like(weights)
        who = comm.recv(g, ANY)
        weights += g
        done[who] += 1
        waiting.append(who)
        for r in [x for x in waiting if done[x] - done.min() <= bound]:
            waiting.remove(r)
            comm.send(weights, r)
    return weights


@wrong("06c.ssp", "a worker waits although the bound lets")
def fixed_order(comm, steps, bound, compute):
    weights = np.zeros(comm.size - 1)
    if comm.rank > 0:
        for c in range(steps):
            comm.send(compute(c, weights), 0)
            if c + 1 < steps:
                comm.recv(weights, 0)
        return None
    for c in range(steps):
        for who in range(1, comm.size):
            g = np.empty_like(weights)
            comm.recv(g, who)
            weights += g
            if c + 1 < steps:
                comm.send(weights, who)
    return weights


@wrong("06c.ssp", "the weights are the sum of all")
def averages(comm, steps, bound, compute):
    r = my_ssp(comm, steps, bound, compute)
    return r / (comm.size - 1) if r is not None and comm.size > 1 else r


@wrong("16.gpipe", "an action is a text of a")
def stage_first(p, m):
    return [[f"{s}F{i}" for i in range(m)] + [f"{s}B{i}" for i in range(m)] for s in range(p)]


@wrong("16.gpipe", "micro-batches are numbered from 0 to m-1")
def from_one(p, m):
    return [[f"F{i + 1}" for i in range(m)] + [f"B{i + 1}" for i in range(m)] for s in range(p)]


@wrong("16.gpipe", "an action is a text of a")
def tuples(p, m):
    return [[("F", i) for i in range(m)] + [("B", i) for i in range(m)] for s in range(p)]


@wrong("16.gpipe", "the answer is a list with one")
def per_microbatch(p, m):
    return [[f"F{i}" for s in range(p)] + [f"B{i}" for s in range(p)] for i in range(m)]


@wrong("16.gpipe", "a stage waits for something that comes")
def backwards_first(p, m):
    return [[f"B{i}" for i in range(m)] + [f"F{i}" for i in range(m)] for s in range(p)]


@wrong("16.gpipe", "each stage runs each micro-batch once forward")
def twice(p, m):
    return [[f"F{i}" for i in range(m)] * 2 + [f"B{i}" for i in range(m)] for s in range(p)]


@wrong("16.gpipe", "the answer is a list with one")
def strings(p, m):
    return [" ".join([f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)])] * p


@wrong("16.gpipe", "an action is a text of a")
def lower(p, m):
    return [[f"f{i}" for i in range(m)] + [f"b{i}" for i in range(m)]] * p


@wrong("16.gpipe", "stages wait for each other: let a")
def oldest_on_odd(p, m):
    return [
        [f"F{i}" for i in range(m)] + [f"B{i}" for i in (range(m) if s % 2 else reversed(range(m)))] for s in range(p)
    ]


@wrong("17.one_f_one_b", "some stage has too little in flight")
def one_short(p, m):
    out = []
    for s in range(p):
        a = min(m, max(0, p - 2 - s))
        o = [f"F{i}" for i in range(a)]
        for i in range(m):
            if a + i < m:
                o.append(f"F{a + i}")
            o.append(f"B{i}")
        out.append(o)
    return out


@wrong("17.one_f_one_b", "a stage waits for something that comes")
def b_first(p, m):
    out = []
    for s in range(p):
        a = min(m, p - 1 - s)
        o = [f"F{i}" for i in range(a)]
        for i in range(m):
            o.append(f"B{i}")
            if a + i < m:
                o.append(f"F{a + i}")
        out.append(o)
    return out


@wrong("17.one_f_one_b", "a stage runs too far ahead: stage")
def same_ahead(p, m):
    a = min(m, p - 1)
    o = [f"F{i}" for i in range(a)]
    for i in range(m):
        if a + i < m:
            o.append(f"F{a + i}")
        o.append(f"B{i}")
    return [o] * p


@wrong("17.one_f_one_b", "each stage runs each micro-batch forward and")
def lost_tail17(p, m):
    out = []
    for s in range(p):
        a = min(m, p - 1 - s)
        o = [f"F{i}" for i in range(a)]
        for i in range(m - a):
            o += [f"F{a + i}", f"B{i}"]
        out.append(o)
    return out


@wrong("17.one_f_one_b", "a stage waits for something that comes")
def reversed_stages(p, m):
    return my_one_f_one_b(p, m)[::-1]


@wrong("19.zero_bubble", "W needs the gradient that has arrived")
def w_before_i(p, m):
    return [[a.replace("I", "X").replace("W", "I").replace("X", "W") for a in row] for row in my_zero_bubble(p, m)]


@wrong("19.zero_bubble", "a micro-batch is once F, once I")
def i_and_b(p, m):
    return [[*row, *[f"B{i}" for i in range(m)]] for row in my_zero_bubble(p, m)]


@wrong("19.zero_bubble", "the stage before waits for I, no")
def w_at_once(p, m):
    return [
        [x for a in row for x in ([a.replace("B", "I"), a.replace("B", "W")] if a[0] == "B" else [a])]
        for row in my_one_f_one_b(p, m)
    ]


@wrong("19.zero_bubble", "a micro-batch is once F, once I")
def w_twice(p, m):
    return [[*row, "W0"] for row in my_zero_bubble(p, m)]


@wrong("19.zero_bubble", "a micro-batch is alive until its W")
def gpipe19(p, m):
    return my_gpipe(p, m)


@wrong("19.zero_bubble", "W needs the gradient that has arrived")
def w_first(p, m):
    return [[*[a for a in row if a[0] == "W"], *[a for a in row if a[0] != "W"]] for row in my_zero_bubble(p, m)]


@wrong("17b.stashing", "every gradient is computed with the first")
def oldest(order, weights, gradient):
    first = weights
    h = []
    for a in order:
        if a[0] == "B":
            weights = weights - 0.25 * gradient(int(a[1:]), first)
            h.append(weights)
    return h


@wrong("17b.stashing", "the weights move up the gradient: subtract")
def adds(order, weights, gradient):
    b = {}
    h = []
    for a in order:
        i = int(a[1:])
        if a[0] == "F":
            b[i] = weights
        else:
            weights = weights + 0.25 * gradient(i, b.pop(i))
            h.append(weights)
    return h


@wrong("17b.stashing", "each update starts from the weights that")
def starts_from_stash(order, weights, gradient):
    b = {}
    h = []
    for a in order:
        i = int(a[1:])
        if a[0] == "F":
            b[i] = weights
        else:
            weights = b[i] - 0.25 * gradient(i, b[i])
            h.append(weights)
    return h


@wrong("17b.stashing", "return a list with the weights after")
def final_only(order, weights, gradient):
    return my_stashing(order, weights, gradient)[-1]


@wrong("17c.two_versions", "the gradients are those of two batches")
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


@wrong("17c.two_versions", "is the sum of gradients set back")
def not_reset(order, weights, gradient, m):
    v = [weights]
    t = 0
    for a in order:
        if a[0] == "B":
            k = int(a[1:])
            t = t + gradient(k, v[max(k // m - 1, 0)])
            if k % m == m - 1:
                v.append(v[-1] - 0.25 * t)
    return [x.copy() for x in v[1:]]


@wrong("17c.two_versions", "batch b used version b, which is")
def at_f(order, weights, gradient, m):
    begun = {}
    t = 0
    for a in order:
        k = int(a[1:])
        if a[0] == "F":
            begun[k] = weights
        else:
            t = t + gradient(k, begun.pop(k))
            if k % m == m - 1:
                weights = weights - 0.25 * t
                t = 0
                yield weights


@wrong("19b.building_block", "the answer is a list with four")
def as_lists_of_three(p, o):
    return [r[:3] for r in my_building_block(p, o)]


@wrong("19b.building_block", "the answer is a list with four")
def dicts(p, o):
    return dict(enumerate(my_building_block(p, o)))


@wrong("20.place_ranks", "a list with the node of rank")
def as_matrix(shape, traffic, node):
    return np.array(my_place_ranks(shape, traffic, node)).reshape(shape)


@wrong("20.place_ranks", "the order in which you number the")
def modulo(shape, traffic, node):
    n = int(np.prod(shape))
    return [r % (n // node) for r in range(n)]


@wrong("20b.min_max_split", "these are the places where stages end")
def cut_points(t, s):
    return list(np.cumsum(my_min_max_split(t, s)))


@wrong("20b.min_max_split", "the answer has another form than the")
def lists(t, s):
    out = []
    i = 0
    for k in my_min_max_split(t, s):
        out.append(t[i : i + k])
        i += k
    return out


@wrong("05.fit_a_line", "some measurements took twice as long: give")
def first_and_last(s, t):
    b = (t[-1] - t[0]) / (s[-1] - s[0])
    return t[0] - b * s[0], b


@wrong("05.fit_a_line", "this is a bandwidth, in bytes per")
def bandwidth(s, t):
    a, b = my_fit_a_line(s, t)
    return a, 1 / b


@wrong("28.first_difference", "the lowest rank that differs from rank")
def a_bool(comm, x):
    return my_first_difference(comm, x) != -1


@wrong("28.first_difference", "the lowest rank that differs from rank")
def zero_for_none(comm, x):
    return max(0, my_first_difference(comm, x))


@wrong("28.first_difference", "two entries were exchanged: their sum is")
def rounded(comm, x):
    m = np.array([np.round(x, 6).sum() * 1.0])
    d = all_gather(comm, m)
    r = np.flatnonzero(np.abs(d - d[0]) > 1e-9)
    return int(r[0]) if r.size else -1


@wrong("22.visible", "this is the reverse: True where a")
def strict(tokens, sep, rank, ranks):
    r = my_visible(tokens, sep, rank, ranks)
    return ~r


@wrong("22.visible", "every query sees every key: it sees")
def nothing_masked(tokens, sep, rank, ranks):
    return np.ones_like(my_visible(tokens, sep, rank, ranks))


@wrong("26.save", "writing `latest` is not atomic, and half")
def no_latest_new(disk, name, parts):
    for p, d in parts.items():
        disk.write(f"{name}/{p}", d)
    disk.write("latest", name.encode())


@wrong("26.save", "what is renamed has been written before")
def forgets_part(disk, name, parts):
    return my_save(disk, name, dict(list(parts.items())[:-1]))


@wrong("26.load", "the number of elements need not be")
def whole(comm, size, pieces, read):
    out = np.empty(size)
    for i, (a, b) in enumerate(pieces):
        out[a:b] = read(i)
    return out


@wrong("06f.in_order", "one rank alone has no loader: it")
def modulo_off(comm, batches, make):
    n = comm.size - 1
    if comm.rank > 0:
        for i in range(comm.rank - 1, batches, n):
            comm.send(make(i), 0)
        return np.zeros((0, 2))
    out = np.zeros((batches, 2))
    for i in range(batches):
        comm.recv(out[i], 1 + (i + 1) % n) if n else None
    return out


@wrong("10b.gradient_and_noise", "return one array: the gradient, then its")
def grad_only(comm, shares, rows):
    return my_gradient_and_noise(comm, shares, rows)[:-2]


@wrong("10b.gradient_and_noise", "the last two numbers are exchanged: the")
def swapped31(comm, shares, rows):
    r = my_gradient_and_noise(comm, shares, rows).copy()
    r[-2:] = r[-2:][::-1]
    return r


@wrong("16b.sync_batch_norm", "batch norm normalises by the variance of")
def unbiased(comm, x, eps):
    n = all_reduce(comm, np.array([float(len(x))]))[0]
    m = all_reduce(comm, x.sum(0)) / max(n, 1)
    v = all_reduce(comm, ((x - m) ** 2).sum(0)) / max(n - 1, 1)
    return (x - m) / np.sqrt(v + eps)


@wrong("16b.sync_batch_norm", "eps is added to the variance, under")
def eps_outside(comm, x, eps):
    n = all_reduce(comm, np.array([float(len(x))]))[0]
    m = all_reduce(comm, x.sum(0)) / max(n, 1)
    v = all_reduce(comm, ((x - m) ** 2).sum(0)) / max(n, 1)
    return (x - m) / (np.sqrt(v) + eps)
