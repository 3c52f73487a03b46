"""Who holds what, where each item goes whole to one rank: the largest items are assigned first.

    sizes   a 8, b 5, c 4, d 3        rank 0: a, d (11)        rank 1: b, c (9)

Proved by: tests/parallel/test_parameter_server.py, tests/parallel/test_muon.py
"""

from collections.abc import Sequence


def assign_keys(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Return the keys of each server: the largest first, each to the server with the fewest elements so far.

    Two servers' loads differ by at most the largest key.
    """
    held: list[list[int]] = [[] for _ in range(servers)]
    load = [0] * servers
    # Ties go to the smaller key and the first server, so that every rank computes the same assignment.
    for key in sorted(range(len(sizes)), key=lambda key: (-sizes[key], key)):
        server = load.index(min(load))
        held[server].append(key)
        load[server] += sizes[key]
    return [sorted(keys) for keys in held]
