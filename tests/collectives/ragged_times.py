"""How long rings and the pairwise exchange take with chunks of any sizes, on the alpha-beta clock, in seconds."""


def rounds_seconds(rounds, alpha, beta, buffered=False):
    """Rounds of `sendrecv`, (to, sent) each: rank v sends sent[v] bytes to rank to[v].

    A rank goes on when its message has landed and its own is out: with synchronous sends no earlier than its receiver
    came.
    """
    ranks = len(rounds[0][0]) if rounds else 1
    time, port = [0.0] * ranks, [0.0] * ranks
    for to, sent in rounds:
        source = [to.index(v) for v in range(ranks)]
        port = [max(time[w] + alpha + beta * sent[w], port[v] + beta * sent[w], time[v]) for v, w in enumerate(source)]
        time = [max(port[v], time[v] + beta * sent[v], 0.0 if buffered else time[to[v]]) for v in range(ranks)]
    return max(time)


def once_around(sizes, first):
    """n-1 rounds to the right neighbour; in the first one rank v sends chunk v + first."""
    n = len(sizes)
    return [
        ([(v + 1) % n for v in range(n)], [sizes[(v + first - step) % n] for v in range(n)]) for step in range(n - 1)
    ]


def ring_reduce_scatter(sizes, alpha, beta):
    """sizes: bytes of each rank's chunk."""
    return rounds_seconds(once_around(sizes, -1), alpha, beta)


def ring_all_gather(sizes, alpha, beta):
    """As the reduce-scatter; rank v begins with its own chunk."""
    return rounds_seconds(once_around(sizes, 0), alpha, beta)


def ring_all_reduce(sizes, alpha, beta):
    """A reduce-scatter and an all-gather without a pause between them."""
    return rounds_seconds(once_around(sizes, -1) + once_around(sizes, 0), alpha, beta)


def pairwise(rows, alpha, beta, buffered=False):
    """rows[v][w]: bytes from rank v to rank w."""
    n = len(rows)
    rounds = [([(v + s) % n for v in range(n)], [rows[v][(v + s) % n] for v in range(n)]) for s in range(1, n)]
    return rounds_seconds(rounds, alpha, beta, buffered)
