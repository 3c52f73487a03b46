"""More wrong answers, as students give them: each with the beginning of the hint that it must get."""

import numpy as np

from minidist.core.collectives import all_gather, all_reduce
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
my_cross_entropy_backward = solution("00b.cross_entropy_backward")
my_gradient_and_noise = solution("10b.gradient_and_noise")
my_min_max_split = solution("20b.min_max_split")
my_place_ranks = solution("20.place_ranks")
my_ring_all_reduce = solution("04.ring_all_reduce")
my_save = solution("26.save")
my_ssp = solution("06c.ssp")
my_stashing = solution("17b.stashing")
my_visible = solution("22.visible")


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
def axis0(l, t):
    s = np.exp(l - l.max(0))
    p = s / s.sum(0)
    return (p - np.eye(5)[t]) / len(t)


@wrong("02.free_in_order", "the weights are as they were: call")
def no_step(layers, x, lg):
    pass


@wrong("02.free_in_order", "a layer's weight is as it was")
def last_only(layers, x, lg):
    k = forward_keeping(layers, x)
    g = lg(k.pop())
    layers[-1].update(layers[-1].weight_gradient(k.pop(), g))


@wrong("03.by_requests", "a wait comes before both requests have")
def wait_recv_first(comm, out):
    r, l = neighbours(comm)
    inc = np.empty_like(out)
    comm.irecv(inc, l).wait()
    comm.isend(out, r).wait()
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


@wrong("04.ring_all_reduce", "every rank has the sum of its")
def only_first_half(comm, array):
    n, rank = comm.size, comm.rank
    ch = np.array_split(array, n)
    for s in range(n - 1):
        a = ch[(rank - 2 - s) % n]
        i = np.empty_like(a)
        comm.sendrecv(ch[(rank - 1 - s) % n], (rank + 1) % n, i, (rank - 1) % n)
        a += i


@wrong("04.ring_all_reduce", "this is the mean of the ranks'")
def mean(comm, array):
    my_ring_all_reduce(comm, array)
    array /= comm.size


@wrong("04.ring_all_reduce", "np.split cuts into equal parts only")
def equal_parts(comm, array):
    np.split(array, comm.size)


@wrong("09c.kept_all_reduce", "this is this rank's own gradient")
def nothing_is_sent(comm, gradient, mask):
    return gradient * mask


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


@wrong("16.gpipe", "micro-batches are numbered from 0 to m-1")
def from_one(p, m):
    return [[f"F{i + 1}" for i in range(m)] + [f"B{i + 1}" for i in range(m)] for s in range(p)]


@wrong("16.gpipe", "each stage runs each micro-batch once forward")
def twice(p, m):
    return [[f"F{i}" for i in range(m)] * 2 + [f"B{i}" for i in range(m)] for s in range(p)]


@wrong("16.gpipe", "an action is a text of a")
def lower(p, m):
    return [[f"f{i}" for i in range(m)] + [f"b{i}" for i in range(m)]] * p


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


@wrong("20.place_ranks", "a list with the node of rank")
def as_matrix(shape, traffic, node):
    return np.array(my_place_ranks(shape, traffic, node)).reshape(shape)


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


@wrong("22.visible", "this is the reverse: True where a")
def strict(tokens, sep, rank, ranks):
    r = my_visible(tokens, sep, rank, ranks)
    return ~r


@wrong("22.visible", "every query sees every key: it sees")
def nothing_masked(tokens, sep, rank, ranks):
    return np.ones_like(my_visible(tokens, sep, rank, ranks))


@wrong("26.save", "what is renamed has been written before")
def forgets_part(disk, name, parts):
    return my_save(disk, name, dict(list(parts.items())[:-1]))


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


@wrong("16b.sync_batch_norm", "eps is added to the variance, under")
def eps_outside(comm, x, eps):
    n = all_reduce(comm, np.array([float(len(x))]))[0]
    m = all_reduce(comm, x.sum(0)) / max(n, 1)
    v = all_reduce(comm, ((x - m) ** 2).sum(0)) / max(n, 1)
    return (x - m) / (np.sqrt(v) + eps)
