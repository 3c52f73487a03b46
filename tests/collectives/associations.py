"""In which order each algorithm adds: nested pairs of ranks, ((0, 1), 2) for (a0 + a1) + a2, written down
independently.

Floating-point addition commutes but does not associate, so the shape of the tree decides about the bits.
"""

from functools import reduce


def chain(order):
    return reduce(lambda tree, rank: (tree, rank), order)


def folded(ranks):
    """What a power of two of workers start with: pairs (2i, 2i+1) as long as there are more ranks than workers."""
    power = 1 << (ranks.bit_length() - 1)
    extra = ranks - power
    return [(2 * i, 2 * i + 1) for i in range(extra)] + list(range(2 * extra, ranks))


def balanced(leaves):
    """Neighbours first: recursive doubling."""
    half = len(leaves) // 2
    return (balanced(leaves[:half]), balanced(leaves[half:])) if half else leaves[0]


def far_first(leaves):
    """The partner half the ranks away first, neighbours last: recursive halving."""
    while len(leaves) > 1:
        half = len(leaves) // 2
        leaves = [(leaves[i], leaves[i + half]) for i in range(half)]
    return leaves[0]


def binomial(number, ranks, root):
    """A rank adds what its children send to its own part, the nearest child first."""
    tree, bit = (root + number) % ranks, 1
    while not number & bit and number + bit < ranks:
        tree, bit = (tree, binomial(number + bit, ranks, root)), 2 * bit
    return tree


def association(algorithm, ranks, first, root=0, tree=False):
    """The tree of one chunk; `first`: where a ring begins; `tree`: of a reduce."""
    if algorithm == "two_level":  # one node: a tree for a reduce, else the ring
        algorithm = "binomial" if tree else "ring"
    if algorithm in ("ring", "ring_in_blocks", "segmented_ring"):
        return chain([(first + i) % ranks for i in range(ranks)])
    if algorithm == "recursive_doubling":
        return balanced(folded(ranks))
    if algorithm in ("recursive_halving", "rabenseifner"):
        return far_first(folded(ranks))
    if algorithm == "binomial":
        return binomial(0, ranks, root)
    return chain(range(ranks))
